"""The pictures of the CIFAR-10 pages."""

from __future__ import annotations

import statistics
from pathlib import Path

from cifar10_asked import GAINS
from cifar10_record import Record
from cifar10_results import KNN, Gain, Results, drawing, interval
from matplotlib.axes import Axes

SHORT = "cifar10-short.png"


def compared(results: Results) -> dict[str, list[Gain]]:
    """What the branch brought, of the runs that have one and something to compare with."""
    return {run: found for run in results.runs if (found := results.gains(run, KNN))}


def picture_of(results: Results) -> str:
    return f"cifar10-{results.group}.png"


def curves_of(results: Results) -> str:
    return f"cifar10-{results.group}-curves.png"


def draw_curves(results: Results, path: Path) -> None:
    alone = [run for run in results.runs if run not in results.pairs]
    with drawing(path, columns=len(alone), width=4.4, height=3.6) as panels:
        for axes, plain in zip(panels, alone, strict=True):
            for number, run in enumerate([plain, *(run for run in results.pairs if results.pairs[run] == plain)]):
                _curve(axes, list(results.runs[run].values()), run, f"C{number}")
            axes.set_xlabel("epoch")
            axes.set_ylabel("k-NN, %")
            axes.legend(loc="lower right")


def _curve(axes: Axes, records: list[Record], label: str, colour: str) -> None:
    found = [{row["epoch"]: row["knn"] for row in record["epochs"] if "knn" in row} for record in records]
    epochs = sorted(set.intersection(*(set(each) for each in found)))
    values = [[each[epoch] for each in found] for epoch in epochs]
    axes.plot(epochs, [statistics.mean(row) for row in values], label=label, color=colour)
    axes.fill_between(
        epochs, [min(row) for row in values], [max(row) for row in values], color=colour, alpha=0.2, linewidth=0
    )


def draw_gains(results: Results, path: Path) -> None:
    shown = compared(results)
    if not shown:
        return
    with drawing(path, width=7.0, height=1.2 + 0.32 * len(shown)) as (axes,):
        names = [f"{run}{'' if all(each.shared for each in gains) else ' †'}" for run, gains in shown.items()]
        values = [[each.value for each in gains] for gains in shown.values()]
        axes.barh(names, [statistics.mean(each) for each in values], color="C0", alpha=0.5)
        for row, each in enumerate(values):
            axes.plot(each, [row] * len(each), "o", color="C0", markersize=4)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.use_sticky_edges = False  # a dot at zero is shown whole
        axes.margins(x=0.05)
        axes.invert_yaxis()  # from top to bottom as in the table
        axes.set_xlabel("k-NN gained by the branch, points; a dot is a seed")


def with_interval(results: Results) -> list[str]:
    """The runs with a branch whose difference has an interval."""
    return [run for run, plain in results.pairs.items() if interval(results.differences(run, plain, KNN))]


def draw_short(results: Results, path: Path) -> None:
    """For each measure the differences with their 95 % intervals, a row for each method."""
    runs = with_interval(results)
    if not runs:
        return
    names = [name for name, (measure, _) in GAINS.items() if any(results.values(run, measure) for run in runs)]
    with drawing(path, columns=len(names), width=2.6, height=0.9 + 0.4 * len(runs)) as panels:
        for number, (axes, name) in enumerate(zip(panels, names, strict=True)):
            for row, run in enumerate(runs):
                values = results.differences(run, results.pairs[run], GAINS[name][0])
                found = interval(values)
                axes.plot(values, [row] * len(values), ".", color="grey", markersize=5)
                if found is not None:
                    clear = found[0] > 0 or found[1] < 0
                    axes.plot(found, [row, row], color="C0" if clear else "grey", linewidth=2.5, alpha=0.8)
                    axes.plot(statistics.mean(values), row, "o", color="C0" if clear else "grey", markersize=7)
            axes.axvline(0, color="black", linewidth=0.8)
            axes.set_yticks(range(len(runs)), [run if number == 0 else "" for run in runs])
            axes.set_ylim(len(runs) - 0.5, -0.5)
            axes.set_xlabel(f"{name}, points")
