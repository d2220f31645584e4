"""Low-shot: SVMs on frozen features from a handful of images per class, over several draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from interclr.evaluate.base import Context, Evaluation, LabelledData, Subject, features_of
from interclr.evaluate.draws import Indices, balanced_draw
from interclr.evaluate.multilabel import MultiLabelSet, targets_of
from interclr.evaluate.plots import figure
from interclr.evaluate.requested import Requested
from interclr.evaluate.svm import Cost, keep, measure
from interclr.svm import Machine, Signs, in_parallel, unit_rows
from interclr.types import UserError

SIZES = (1, 2, 4, 8, 16, 32, 64, 96)


class LowShot(Evaluation):
    """Goyal et al. 2019: ``size`` images of every class, ``draws`` independent draws, mean and standard deviation.

    With one label per image a draw holds exactly ``size`` images of each class; the other classes' are the negatives.
    Where images have several (VOC), every class draws its own ``size`` positives and (classes − 1)·``size`` negatives,
    as in the public benchmark, or all its negatives where there are fewer; difficult images are never drawn.
    Sizes beyond the smallest class are left out, since a draw would not be balanced. ``mAP`` is the mean over all sizes
    and draws, the figure of the paper's table. The deviation is that of a sample: over draws − 1, none of a single one.

    A handful of images does not allow a choice of cost, so it is fixed at 1. Of several ``costs`` each draw takes that
    of the highest AP in cross-validation on the draw itself (one image per class: the cost nearest to 1). The public
    scripts choose, for each size, the cost that does best on the *test* images: ``choose="test"`` does that to compare
    with published figures, which are optimistic by it.
    """

    name: Literal["low-shot"] = "low-shot"
    sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = SIZES
    draws: Annotated[int, Field(ge=1)] = 5
    costs: Annotated[tuple[Cost, ...], Field(min_length=1)] = (1.0,)
    choose: Literal["cross-validation", "test"] = "cross-validation"
    folds: Annotated[int, Field(ge=2)] = 3
    positive_weight: Annotated[float, Field(gt=0)] = 2.0
    tolerance: Annotated[float, Field(gt=0)] = 1e-4
    iterations: Annotated[int, Field(ge=1)] = 2000
    voc: Path | None = None  # a VOC devkit to use in place of the data
    jobs: Annotated[int, Field(ge=0)] = 0  # processes; 0: one for every core

    def open(self, images: Requested) -> tuple[LabelledData, Evaluation]:
        return super().open(images) if self.voc is None else (images.named_by_settings(self.voc), self)

    @classmethod
    def qualifier(cls, figure: str, figures: Mapping[str, float]) -> str:
        sizes = [name.removeprefix("mAP@") for name in figures if name.startswith("mAP@") and not name.endswith("_std")]
        return f"{_range(sizes)} per class"

    def run(self, subject: Subject, data: LabelledData, context: Context) -> dict[str, float]:
        train, test = targets_of(data, self.voc)
        sizes = self._possible(train, context)
        features, queries = (unit_rows(features_of(subject, s.source, context).cpu().numpy()) for s in (train, test))
        machine = Machine(self.positive_weight, self.tolerance, self.iterations, seed=context.seed)
        folds = 0 if self.choose == "test" else self.folds
        figures: dict[str, float] = {}
        kept: dict[str, NDArray[Any]] = {"targets": test.targets}
        table: list[dict[str, Any]] = []
        with context.screen.working(f"{len(sizes)} sizes of {self.draws} draws") as progress:
            for done, size in enumerate(sizes):
                drawn = [draw(train, size, context.seed, number) for number in range(self.draws)]
                tasks = [(machine, features, *each, self.costs, folds, queries) for each in drawn]
                work = drawn[0][1].size * features.shape[1] * len(self.costs) * self.draws
                found = in_parallel(
                    Machine.decide_from,
                    tasks,
                    jobs=self.jobs,
                    work=work,
                    # draws of larger sizes take longer: count images, which all sizes have in proportion
                    progress=lambda n, done=done, size=size: progress(  # type: ignore[misc]
                        self.draws * sum(sizes[:done]) + n * size, self.draws * sum(sizes)
                    ),
                )
                if self.choose == "test":
                    found = self._best_on_test(found, test)
                measured = [measure(test, scores) for scores, _ in found]
                runs = {name: np.array([each[name] for each, _ in measured]) for name in measured[0][0]}
                table.append({"size": size, "costs": [cost for _, cost in found]})
                for name, values in runs.items():
                    table[-1][name] = values.tolist()
                    figures[f"{name}@{size}"] = float(values.mean())
                    if self.draws > 1:  # a single draw does not tell how others would spread
                        figures[f"{name}@{size}_std"] = float(values.std(ddof=1))
                kept |= _raw(size, drawn, [scores for scores, _ in found], [each for _, each in measured], test)
        names: list[str] = [name for name in ("mAP", "mAP_11point", "top1") if name in table[0]]
        figures = {name: float(np.mean([row[name] for row in table])) for name in names} | figures
        keep(context.out / "predictions.safetensors", kept)
        name = test.source.name if self.voc is not None else data.name
        self._show(figures, sizes, names, f"{subject.name} on {name}", context)
        self.write_result(
            subject,
            name,
            context,
            {
                "figures": figures,
                "draws": table,
                "classes": list(test.classes),
            },
        )
        return figures

    def _possible(self, train: MultiLabelSet, context: Context) -> list[int]:
        counts = (train.targets > 0).sum(0)
        fewest = int(counts.min())
        sizes = sorted({size for size in self.sizes if size <= fewest})
        which = f"{train.classes[int(counts.argmin())]} has only {fewest} training image{'s' * (fewest != 1)}"
        if not sizes:
            raise UserError(f"{which}, fewer than the smallest size {min(self.sizes)}: choose smaller sizes")
        if len(sizes) < len(set(self.sizes)):
            context.screen.warn(f"{which}: low-shot stops at {sizes[-1]} per class")
        return sizes

    def _best_on_test(
        self, found: list[tuple[NDArray[np.float32], float]], test: MultiLabelSet
    ) -> list[tuple[NDArray[np.float32], float]]:
        """One cost for all draws of a size, that of the highest mean mAP on the test images."""
        means = [[measure(test, scores)[0]["mAP"] for scores in per_cost] for per_cost, _ in found]  # (draws, costs)
        best = int(np.argmax(np.mean(means, axis=0)))
        return [(per_cost[best], self.costs[best]) for per_cost, _ in found]

    def _show(
        self, figures: dict[str, float], sizes: list[int], names: list[str], title: str, context: Context
    ) -> None:
        header = {"mAP": "mAP %", "mAP_11point": "mAP 11-point %", "top1": "top-1 %"}
        several = self.draws > 1

        def cell(name: str) -> str:
            return f"{figures[name]:.2f} ± " + (f"{figures[f'{name}_std']:.2f}" if several else "–")

        rows = [(str(size), *(cell(f"{name}@{size}") for name in names)) for size in sizes]
        rows.append((f"mean of {_range(sizes)}", *(f"{figures[name]:.2f}" for name in names)))
        draws = f"{self.draws} draw{'s' * several}"
        context.screen.table(f"low-shot of {title}, {draws}", rows, ("per class", *map(header.get, names)))  # type: ignore[arg-type]
        with figure(context.out / "low-shot") as (axes,):
            for name in (name for name in names if name != "mAP_11point"):
                means = [figures[f"{name}@{size}"] for size in sizes]
                spreads = [figures[f"{name}@{size}_std"] for size in sizes] if several else None
                axes.errorbar(sizes, means, yerr=spreads, marker="o", capsize=3, label=header[name].removesuffix(" %"))
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set_xlabel("labelled images per class")
            axes.set_ylabel(f"%, mean ± standard deviation of {draws}" if several else f"%, {draws}")
            axes.set_title(f"low-shot of {title}: mAP {figures['mAP']:.1f} %")
            axes.legend()


def _range(sizes: Sequence[int | str]) -> str:
    return f"{sizes[0]}…{sizes[-1]}" if len(sizes) > 1 else str(sizes[0])


def draw(train: MultiLabelSet, size: int, seed: int, number: int) -> tuple[Indices, Signs]:
    """Images drawn (M,) and their part in each class's training (M, C): 1, −1, or 0 where not drawn for the class."""
    random = np.random.default_rng([seed, size, number])
    if train.labels is not None:
        rows = np.sort(balanced_draw(train.labels, size, random).ravel())
        return rows, train.targets[rows]
    classes = len(train.classes)
    signs = np.zeros_like(train.targets)
    for c in range(classes):
        positive, negative = np.flatnonzero(train.targets[:, c] > 0), np.flatnonzero(train.targets[:, c] < 0)
        signs[random.choice(positive, size, replace=False), c] = 1
        signs[random.choice(negative, min(size * (classes - 1), len(negative)), replace=False), c] = -1
    rows = np.flatnonzero(signs.any(1))
    return rows, signs[rows]


def _raw(
    size: int,
    drawn: list[tuple[Indices, Signs]],
    scores: list[NDArray[np.float32]],
    precisions: list[dict[str, NDArray[np.float64]]],
    test: MultiLabelSet,
) -> dict[str, NDArray[Any]]:
    """For each draw of a size: the images drawn and their part, the AP of each class, and the predictions."""
    kept: dict[str, NDArray[Any]] = {}
    for number, ((rows, signs), values) in enumerate(zip(drawn, scores, strict=True)):
        kept |= {f"rows_{size}_{number}": rows, f"signs_{size}_{number}": signs}
        kept[f"scores_{size}_{number}"] = values
    kept |= {f"{name}_{size}": np.stack([each[name] for each in precisions]) for name in precisions[0]}
    if test.labels is not None:
        kept[f"prediction_{size}"] = np.stack([values.argmax(1) for values in scores])
    return kept
