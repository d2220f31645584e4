"""The pictures of the CIFAR-10 pages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from cifar10_asked import ALL_LABELS, GAINS
from cifar10_record import Record
from cifar10_results import KNN, LOW_SHOT, Gain, Results, at_epoch, direction, drawing, interval, start_of
from matplotlib.axes import Axes

SHORT = "cifar10-short.png"
MORE, LESS, NOT_CLEAR = "C0", "C3", "grey"


def compared(results: Results) -> dict[str, list[Gain]]:
    """What the branch brought, of the runs that have one and something to compare with."""
    return {run: found for run in results.runs if (found := results.gains(run, KNN))}


def picture_of(results: Results) -> str:
    return f"cifar10-{results.group}.png"


def curves_of(results: Results) -> str:
    return f"cifar10-{results.group}-curves.png"


# k-NN over the epochs.


def draw_curves(results: Results, path: Path) -> None:
    alone = [run for run in results.runs if run not in results.pairs]
    with drawing(path, columns=len(alone), rows=2, width=4.4, height=3.0) as panels:
        for column, plain in enumerate(alone):
            levels, gained = panels[column], panels[len(alone) + column]
            _curve(levels, list(results.runs[plain].values()), plain, "C0")
            branched = [run for run, other in results.pairs.items() if other == plain]
            for number, run in enumerate(branched, start=1):
                _curve(levels, list(results.runs[run].values()), run, f"C{number}")
                _gained(gained, results, run, plain, f"C{number}")
            levels.set_ylabel("k-NN, %")
            levels.legend(loc="lower right")
            gained.axhline(0, color="black", linewidth=0.8)
            gained.set_ylabel("k-NN gained, points")
            gained.set_xlabel("epoch")
            gained.sharex(levels)
        first, *others = panels[len(alone) :]
        for axes in others:
            axes.sharey(first)
        first.autoscale(axis="y")


def _curve(axes: Axes, records: list[Record], label: str, colour: str) -> None:
    epochs = _epochs(records)
    values = [[at_epoch(epoch)(record) or 0.0 for record in records] for epoch in epochs]
    axes.plot(epochs, [statistics.mean(row) for row in values], label=label, color=colour)
    axes.fill_between(
        epochs, [min(row) for row in values], [max(row) for row in values], color=colour, alpha=0.2, linewidth=0
    )


def _epochs(records: list[Record]) -> list[int]:
    """Those at which all of the records have been measured."""
    return sorted(set.intersection(*({row["epoch"] for row in record["epochs"] if "knn" in row} for record in records)))


def _gained(axes: Axes, results: Results, run: str, plain: str, colour: str) -> None:
    records = list(results.runs[run].values())
    start = start_of(records[0])
    found = {epoch: results.differences(run, plain, at_epoch(epoch)) for epoch in _epochs(records) if epoch > start}
    found = {epoch: values for epoch, values in found.items() if values}
    if not found:
        return
    means = [statistics.mean(values) for values in found.values()]
    errors = [statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0 for each in found.values()]
    axes.plot(list(found), means, "o-", color=colour, markersize=4)
    bounds = ([mean + side * error for mean, error in zip(means, errors, strict=True)] for side in (-1, 1))
    axes.fill_between(list(found), *bounds, color=colour, alpha=0.2, linewidth=0)
    if start:
        axes.axvline(start, color=colour, linestyle=":", linewidth=1)


# What the branch gained in every run of a group.


def draw_gains(results: Results, path: Path) -> None:
    shown = compared(results)
    if not shown:
        return
    measures = {"k-NN": KNN, "low-shot mAP": LOW_SHOT}
    found = {
        name: {run: [each.value for each in results.gains(run, measure)] for run in shown}
        for name, measure in measures.items()
    }
    found = {name: by_run for name, by_run in found.items() if any(by_run.values())}
    with drawing(path, columns=len(found), width=7.0 if len(found) == 1 else 5.2, height=1.2 + 0.32 * len(shown)) as (
        first,
        *others,
    ):
        for axes, (name, by_run) in zip((first, *others), found.items(), strict=True):
            _bars(axes, results, by_run)
            axes.set_xlabel(f"{name} gained by the branch, points")
        first.set_yticks(
            range(len(shown)),
            [f"{run}{'' if all(each.shared for each in gains) else ' †'}" for run, gains in shown.items()],
        )
        for axes in others:
            axes.set_yticks(range(len(shown)), [""] * len(shown))


def _bars(axes: Axes, results: Results, by_run: dict[str, list[float]]) -> None:
    """A dot is a seed, a bar the mean of two or more; hatched where the run trains with labels."""
    for row, (run, values) in enumerate(by_run.items()):
        colour = NOT_CLEAR if results.is_control(run) else MORE
        if len(values) > 1:
            hatch = "///" if results.is_control(run) else None
            axes.barh(row, statistics.mean(values), color=colour, alpha=0.5, hatch=hatch, edgecolor="white")
        axes.plot(values, [row] * len(values), "o", color=colour, markersize=4)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.use_sticky_edges = False  # a dot at zero is shown whole
    axes.margins(x=0.05)
    axes.set_ylim(len(by_run) - 0.5, -0.5)  # from top to bottom as in the table


# What the branch brings, on the test set.


def with_interval(results: Results) -> list[str]:
    """The runs with a branch whose difference has an interval."""
    return [run for run, plain in results.pairs.items() if interval(results.differences(run, plain, KNN))]


def draw_short(results: Results, path: Path) -> None:
    """For each measure the differences with their 95 % intervals, a row for each method."""
    runs = with_interval(results)
    if not runs:
        return
    names = [name for name, measure in GAINS.items() if any(results.values(run, measure) for run in runs)]
    with drawing(path, columns=len(names), width=2.6, height=0.9 + 0.4 * len(runs)) as panels:
        for number, (axes, name) in enumerate(zip(panels, names, strict=True)):
            for row, run in enumerate(runs):
                _interval(axes, row, results.differences(run, results.pairs[run], GAINS[name]))
            axes.axvline(0, color="black", linewidth=0.8)
            axes.set_yticks(range(len(runs)), [run if number == 0 else "" for run in runs])
            axes.set_ylim(len(runs) - 0.5, -0.5)
            axes.set_xlabel(f"{name}, points")
        one, *same = [axes for axes, name in zip(panels, names, strict=True) if name in ALL_LABELS]
        for axes in same:
            axes.sharex(one)
        one.autoscale(axis="x")


def _interval(axes: Axes, row: int, values: Sequence[float]) -> None:
    axes.plot(values, [row] * len(values), ".", color=NOT_CLEAR, markersize=5)
    found = interval(values)
    if found is not None:
        colour = {1: MORE, -1: LESS, 0: NOT_CLEAR}[direction(values)]
        axes.plot(found, [row, row], color=colour, linewidth=2.5, alpha=0.8)
        axes.plot(statistics.mean(values), row, "o", color=colour, markersize=7)
