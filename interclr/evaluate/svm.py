"""SVM: one linear SVM per class on frozen features, its cost by cross-validation; VOC07's protocol, on any labels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from interclr.evaluate.base import Context, Evaluation, LabelledData, Subject, features_of
from interclr.evaluate.multilabel import MultiLabelSet, targets_of
from interclr.evaluate.plots import figure
from interclr.evaluate.requested import Requested
from interclr.run.files import save_tensors
from interclr.svm import COSTS, PRIMAL_FROM, Machine, Reals, Signs, average_precision, best_cost, in_parallel, unit_rows

Cost = Annotated[float, Field(gt=0)]
NAMED_BARS = 40  # classes whose names fit under their bars


class SVM(Evaluation):
    """Goyal et al. 2019: L2-normalised features, positives weigh double, the cost of each class by 3-fold AP.

    ``mAP`` is the mean area under the interpolated precision-recall curve, which is what the public benchmark computes
    (the paper follows it without naming a rule); ``mAP_11point`` is VOC07's own rule. With one label per image
    ``top1`` compares the SVMs' decision values, which are not calibrated to each other. A class without a test image
    has no AP and is left out of the mean; one with a single training image cannot be cross-validated and takes the
    cost nearest to 1.

    Difficult images are left out of training and testing. The public scripts train on them as negatives and leave
    them out of the test alone: ``difficult="negative"``.
    """

    name: Literal["svm"] = "svm"
    costs: Annotated[tuple[Cost, ...], Field(min_length=1)] = COSTS
    folds: Annotated[int, Field(ge=2)] = 3
    positive_weight: Annotated[float, Field(gt=0)] = 2.0
    tolerance: Annotated[float, Field(gt=0)] = 1e-4
    iterations: Annotated[int, Field(ge=1)] = 2000
    solver: Literal["auto", "dual", "primal"] = "auto"  # auto: dual below four images per feature
    difficult: Literal["ignore", "negative"] = "ignore"
    voc: Path | None = None  # a VOC devkit to use in place of the data
    jobs: Annotated[int, Field(ge=0)] = 0  # processes; 0: one for every core

    def open(self, images: Requested) -> tuple[LabelledData, Evaluation]:
        return super().open(images) if self.voc is None else (images.named_by_settings(self.voc), self)

    def run(self, subject: Subject, data: LabelledData, context: Context) -> dict[str, float]:
        train, test = targets_of(data, self.voc)
        features, queries = (unit_rows(features_of(subject, s.source, context).cpu().numpy()) for s in (train, test))
        signs = train.targets
        if self.difficult == "negative":
            signs = np.where(signs == 0, -1, signs).astype(np.int8)
        dual = len(features) < PRIMAL_FROM * features.shape[1] if self.solver == "auto" else self.solver == "dual"
        machine = Machine(self.positive_weight, self.tolerance, self.iterations, dual, context.seed)
        validated = self._validate(machine, features, signs, context)  # (C, costs)
        costs = [best_cost(self.costs, row) for row in validated]
        fits = [(machine, features, signs[:, c], cost, queries) for c, cost in enumerate(costs)]
        trained = in_parallel(Machine.decide, fits, jobs=self.jobs, work=features.size * len(fits))
        scores = np.stack([scores for scores, *_ in trained], axis=1)  # (M, C)
        figures, precisions = measure(test, scores)
        unconverged = sum(not converged for *_, converged in trained)
        if unconverged:
            context.screen.warn(f"{unconverged} of {len(fits)} SVMs did not converge in {self.iterations} iterations")
        kept: dict[str, NDArray[Any]] = {
            "scores": scores.astype(np.float32),
            "targets": test.targets,
            "cross_validated_ap": validated,
            "costs": np.array(costs),
            "weights": np.stack([weights for _, weights, _ in trained]),  # (C, F + 1), the bias last
            **precisions,
        }
        if test.labels is not None:
            kept |= {"prediction": scores.argmax(1), "label": test.labels}
        keep(context.out / "predictions.safetensors", kept)
        name = test.source.name if self.voc is not None else data.name
        self._show(figures, precisions, test, f"{subject.name} on {name}", context)
        self.write_result(
            subject,
            name,
            context,
            {
                "figures": figures,
                "solver": "dual" if dual else "primal",
                "unconverged": unconverged,
                "classes": [
                    {"name": name, "cost": cost, "ap": _known(area), "ap_11point": _known(points)}
                    for name, cost, area, points in zip(
                        test.classes, costs, precisions["ap"], precisions["ap_11point"], strict=True
                    )
                ],
            },
        )
        return figures

    def _validate(self, machine: Machine, features: Reals, signs: Signs, context: Context) -> NDArray[np.float64]:
        """Cross-validated AP (C, costs); nothing to compute where there is one cost."""
        classes = signs.shape[1]
        if len(self.costs) == 1:
            return np.full((classes, 1), math.nan)
        # Dear costs first: the long fits should not be what the last core waits for.
        order = sorted(range(len(self.costs)), key=lambda position: -self.costs[position])
        pairs = [(c, position) for position in order for c in range(classes)]
        tasks = [(machine, features, signs[:, c], self.costs[position], self.folds) for c, position in pairs]
        with context.screen.working(f"cross-validating {classes} SVMs at {len(self.costs)} costs") as progress:
            found = in_parallel(
                Machine.cross_validate,
                tasks,
                jobs=self.jobs,
                work=features.size * len(tasks) * (self.folds - 1),
                progress=lambda done: progress(done, len(tasks)),
            )
        table = np.empty((classes, len(self.costs)))
        for (c, position), value in zip(pairs, found, strict=True):
            table[c, position] = value
        return table

    def _show(
        self,
        figures: dict[str, float],
        found: dict[str, NDArray[np.float64]],
        test: MultiLabelSet,
        title: str,
        context: Context,
    ) -> None:
        header = {"mAP": "mAP %", "mAP_11point": "mAP 11-point %", "top1": "top-1 %, not calibrated"}
        row = (*(f"{value:.2f}" for value in figures.values()), str(len(test.classes)))
        context.screen.table(f"SVM of {title}", [row], (*(header[name] for name in figures), "classes"))
        with figure(context.out / "svm", width=max(6.4, min(len(test.classes), NAMED_BARS) * 0.3)) as (axes,):
            order = np.argsort(-np.nan_to_num(found["ap"]))
            axes.bar(range(len(order)), 100 * np.nan_to_num(found["ap"])[order])
            if len(order) <= NAMED_BARS:
                axes.set_xticks(range(len(order)), [test.classes[c] for c in order], rotation=60, ha="right")
            axes.axhline(figures["mAP"], color="black", linestyle="--", linewidth=1)
            axes.set_ylim(0, 100)
            axes.set_ylabel("average precision, %")
            axes.set_title(f"SVM of {title}: mAP {figures['mAP']:.1f} %")


def measure(test: MultiLabelSet, scores: Reals) -> tuple[dict[str, float], dict[str, NDArray[np.float64]]]:
    """Figures in percent from decision values (M, C), and the AP of each class."""
    columns = range(len(test.classes))
    precisions = {
        "ap": np.array([average_precision(test.targets[:, c], scores[:, c], "area") for c in columns]),
        "ap_11point": np.array([average_precision(test.targets[:, c], scores[:, c], "11-point") for c in columns]),
    }
    figures = {f"m{name.replace('ap', 'AP')}": 100 * float(np.nanmean(values)) for name, values in precisions.items()}
    if test.labels is not None:
        figures["top1"] = 100 * float((scores.argmax(1) == test.labels).mean())
    return figures, precisions


def keep(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    save_tensors(path, {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()})


def _known(value: float) -> float | None:
    return None if math.isnan(value) else 100 * value
