"""k-NN: the weighted vote of the nearest training images, nothing trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from interclr.evaluate.base import Context, Evaluation, LabelledData, Subject, check_labels, features_of
from interclr.evaluate.heads import ACCURACIES, TOP
from interclr.evaluate.plots import figure
from interclr.knn import auto_k, nearest_rows, votes_of
from interclr.run.files import save_tensors
from interclr.types import UserError

ROWS = 2**12  # left out one by one, so many at a time: bounds memory, and tells how far it is
VOTES = 2**27  # of all classes, at once and in the file: half a gigabyte
CURVE = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # values of k in the plot, as far as there are images


class KNN(Evaluation):
    """Cosine k-NN with votes e^{s/T}.

    ``auto`` is 200, the usual, and of less than 10,000 images a fiftieth: what training measures itself by.

    ``leave_one_out`` also asks for every training image among the others. Their labels were no more seen in
    pre-training than those of the test images, and there are more of them, so two runs are compared with less noise;
    but a network has seen these images, so it says nothing of new ones.
    """

    name: Literal["knn"] = "knn"
    k: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    temperature: Annotated[float, Field(gt=0)] = 0.1
    leave_one_out: bool = False

    @classmethod
    def qualifier(cls, figure: str, figures: Mapping[str, float]) -> str:
        return f"k={figures['k']:.0f}, T={figures['temperature']:g}"

    def run(self, subject: Subject, data: LabelledData, context: Context) -> dict[str, float]:
        check_labels(data)
        count = len(data.train)
        k = auto_k(count) if self.k == "auto" else self.k
        most = count - self.leave_one_out
        if k > most:
            raise UserError(f"k={k} is more than there are training images of {data.name}: {most} at most")
        bank, queries = (features_of(subject, source, context) for source in (data.train, data.test))
        assert data.train.labels is not None
        assert data.test.labels is not None
        labels, truth = data.train.labels.to(bank.device), data.test.labels.to(bank.device)
        ks = sorted({k, *(value for value in CURVE if value <= min(max(2 * k, 200), count))})
        similarity, nearest = nearest_rows(bank, queries, ks[-1])
        hits: dict[int, Tensor] = dict.fromkeys(ks, truth.new_zeros(2))
        kept: list[dict[str, Tensor]] = []
        for rows in torch.arange(len(truth), device=bank.device).split(max(1, VOTES // data.classes)):
            for value in ks:  # the k nearest are the first k of the most, so one search serves all
                near = similarity[rows, :value], labels[nearest[rows, :value]]
                scores = votes_of(*near, data.classes, self.temperature)
                hits[value] = hits[value] + hits_of(
                    scores.where(scores > 0, -torch.inf), truth[rows]
                )  # no vote: no hit
                if value == k:
                    kept.append(self._kept(scores, truth[rows], nearest[rows], len(truth)))
        curve = {value: shares(hits[value], len(truth), data.classes) for value in ks}
        tensors = {name: torch.cat([part[name] for part in kept]) for name in kept[0]}
        save_tensors(context.out / "predictions.safetensors", tensors)
        figures = {**curve[k], "k": float(k), "temperature": self.temperature}
        if self.leave_one_out:
            figures["leave_one_out"] = self._leave_one_out(bank, labels, data.classes, k, context)
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

    def _leave_one_out(self, bank: Tensor, labels: Tensor, classes: int, k: int, context: Context) -> float:
        right = 0
        with context.screen.working(f"k-NN of {len(bank):,} training images") as progress:
            step = min(ROWS, max(1, VOTES // classes))
            for begin in range(0, len(bank), step):
                rows = slice(begin, begin + step)
                similarity, nearest = nearest_rows(bank, bank[rows], k, own_from=begin)
                scores = votes_of(similarity, labels[nearest], classes, self.temperature)
                right += int((scores.argmax(1) == labels[rows]).sum())
                progress(min(begin + step, len(bank)), len(bank))
        return 100 * right / len(bank)

    def _kept(self, scores: Tensor, truth: Tensor, nearest: Tensor, images: int) -> dict[str, Tensor]:
        """What of some test images goes into the file; the votes only where those of all are no huge table."""
        kept = {
            "prediction": scores.argmax(1),
            "label": truth,
            "nearest": nearest[:, :10],  # rows of the training set, nearest first
        }
        if images * scores.shape[1] <= VOTES:
            kept["votes"] = scores / scores.sum(1, keepdim=True)
        return kept

    def _show(
        self,
        figures: dict[str, float],
        curve: dict[int, dict[str, float]],
        subject: Subject,
        data: LabelledData,
        context: Context,
    ) -> None:
        found = {title: f"{figures[key]:.2f}" for key, title in ACCURACIES.items() if key in figures}
        if self.leave_one_out:
            found["top-1 %, training images"] = f"{figures['leave_one_out']:.2f}"
        row = {**found, "k": str(int(figures["k"])), "T": f"{self.temperature:g}"}
        context.screen.table(f"k-NN of {subject.name} on {data.name}", [tuple(row.values())], tuple(row))
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
    """Top-1 and top-5 in percent of scores (N, classes); a class with −∞ is not among the five.

    With up to five classes top-5 would always be right: there is none.
    """
    return shares(hits_of(scores, truth), len(truth), scores.shape[1])


def hits_of(scores: Tensor, truth: Tensor) -> Tensor:
    """(2,) how often the first, and any of the first five, is right."""
    best, ranked = scores.topk(min(TOP, scores.shape[1]))
    hits = (ranked == truth[:, None]) & (best > -torch.inf)
    return torch.stack((hits[:, 0].sum(), hits.any(1).sum()))


def shares(hits: Tensor, images: int, classes: int) -> dict[str, float]:
    top1, top5 = (100 * count / images for count in hits.tolist())
    return {"top1": top1, "top5": top5} if classes > TOP else {"top1": top1}
