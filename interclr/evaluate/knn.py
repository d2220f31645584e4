"""k-NN: the weighted vote of the nearest training images, nothing trained."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from interclr.evaluate.base import Context, Evaluation, LabelledData, Subject, check_labels, features_of
from interclr.evaluate.plots import figure
from interclr.knn import auto_k, nearest_rows, votes_of
from interclr.run.files import save_tensors

CURVE = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # values of k in the plot, as far as there are images


class KNN(Evaluation):
    """Cosine k-NN with votes e^{s/T}. A ``k`` beyond the training images means all of them, and is reported as that.

    ``auto`` is 200, the usual, and of less than 10,000 images a fiftieth: what training measures itself by.
    """

    name: Literal["knn"] = "knn"
    k: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    temperature: Annotated[float, Field(gt=0)] = 0.1

    def run(self, subject: Subject, data: LabelledData, context: Context) -> dict[str, float]:
        check_labels(data)
        bank, queries = (features_of(subject, source, context) for source in (data.train, data.test))
        assert data.train.labels is not None
        assert data.test.labels is not None
        labels, truth = data.train.labels.to(bank.device), data.test.labels.to(bank.device)
        k = auto_k(len(bank)) if self.k == "auto" else min(self.k, len(bank))
        ks = sorted({k, *(value for value in CURVE if value <= min(max(2 * k, 200), len(bank)))})
        similarity, nearest = nearest_rows(bank, queries, ks[-1])
        curve: dict[int, dict[str, float]] = {}
        for value in ks:  # the k nearest are the first k of the most, so one search serves all
            scores = votes_of(similarity[:, :value], labels[nearest[:, :value]], data.classes, self.temperature)
            curve[value] = accuracies(scores, truth)
            if value == k:
                self._keep(scores, truth, nearest, context)
        figures = {**curve[k], "k": float(k), "temperature": self.temperature}
        self._show(figures, curve, subject, data, context)
        self.write_result(
            subject,
            data.name,
            context,
            {
                "figures": figures,
                "accuracy_by_k": {str(value): found for value, found in curve.items()},
            },
        )
        return figures

    def _keep(self, scores: Tensor, truth: Tensor, nearest: Tensor, context: Context) -> None:
        kept = {
            "prediction": scores.argmax(1),
            "label": truth,
            "votes": scores / scores.sum(1, keepdim=True),
            "nearest": nearest[:, :10],  # rows of the training set, nearest first
        }
        save_tensors(context.out / "predictions.safetensors", kept)

    def _show(
        self,
        figures: dict[str, float],
        curve: dict[int, dict[str, float]],
        subject: Subject,
        data: LabelledData,
        context: Context,
    ) -> None:
        row = (f"{figures['top1']:.2f}", f"{figures['top5']:.2f}", str(int(figures["k"])), f"{self.temperature:g}")
        context.screen.table(f"k-NN of {subject.name} on {data.name}", [row], ("top-1 %", "top-5 %", "k", "T"))
        with figure(context.out / "knn") as (axes,):
            axes.plot(list(curve), [found["top1"] for found in curve.values()], marker="o")
            axes.plot([figures["k"]], [figures["top1"]], marker="o", markersize=11, fillstyle="none", color="black")
            axes.set_xscale("log")
            axes.set_xticks(list(curve), [str(value) for value in curve])
            axes.minorticks_off()
            axes.set_xlabel(f"k (T = {self.temperature:g})")
            axes.set_ylabel("top-1 accuracy, %")
            axes.set_title(f"k-NN on {data.name}: {figures['top1']:.1f} % at k = {int(figures['k'])}")


def accuracies(scores: Tensor, truth: Tensor) -> dict[str, float]:
    """Top-1 and top-5 in percent of scores (N, classes). With fewer than five classes top-5 is always right."""
    ranked = scores.topk(min(5, scores.shape[1])).indices
    hits = ranked == truth[:, None]
    shares = torch.stack((hits[:, 0].double().mean(), hits.any(1).double().mean())).tolist()
    return {"top1": 100 * shares[0], "top5": 100 * shares[1]}
