"""Figures of a study, in the paper's form, and a scatter of label-free figures against k-NN."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from interclr.evaluate.plots import figure
from interclr.study.schema import Study
from interclr.study.tables import LABEL_FREE, LABELS, YARDSTICK

FALLBACK = "rank_me"  # where there are no labels
PAPER_MARK = "the paper's best"
GREY = "0.45"


def draw(out: Path, study: Study, document: dict[str, Any]) -> None:
    """``figure`` and, where there is something to compare, ``label_free``, as .png and .svg; nothing without cells."""
    cells = [cell for cell in document["cells"] if cell["summary"]]
    if not cells:
        return
    metric = YARDSTICK if any(YARDSTICK in cell["summary"] for cell in cells) else FALLBACK
    if study.figure == "table":
        _cost(out / "figure", study, cells)
    elif study.figure == "over-epochs":
        _over_epochs(out / "figure", study, cells, metric)
    else:
        cells = [cell for cell in cells if metric in cell["summary"]]
        if study.figure == "curve" and all(cell["x"] is not None for cell in cells):
            _curve(out / "figure", study, cells, metric)
        else:
            _points(out / "figure", study, cells, metric)
    if metric == YARDSTICK:
        _label_free(out / "label_free", document)


def _of(cells: list[dict[str, Any]], metric: str) -> tuple[list[float], list[float]]:
    return (
        [cell["summary"][metric]["mean"] for cell in cells],
        [cell["summary"][metric]["std"] or 0.0 for cell in cells],
    )


def _seeds(cells: list[dict[str, Any]], metric: str) -> str:
    most = max(cell["summary"][metric]["n"] for cell in cells)
    return "one seed" if most == 1 else f"{most} seeds, ± standard deviation"


def _curve(path: Path, study: Study, cells: list[dict[str, Any]], metric: str) -> None:
    cells = sorted(cells, key=lambda cell: cell["x"])
    xs, (means, spreads) = [cell["x"] for cell in cells], _of(cells, metric)
    with figure(path, width=5.6) as (axes,):
        axes.errorbar(xs, means, yerr=spreads if any(spreads) else None, marker="o", capsize=3)
        best = next((cell for cell in cells if cell["name"] == study.paper.best), None)
        if best is not None:
            axes.axvline(best["x"], color=GREY, linestyle=":", linewidth=1.4, label=PAPER_MARK)
            axes.legend()
        if study.scale == "log":
            axes.set_xscale("log")
        axes.set_xticks(xs, [f"{x:,.0f}" if x >= 100 else f"{x:g}".replace("-", "−") for x in xs])
        axes.minorticks_off()
        axes.margins(y=0.15)
        keep_to_percent(axes, metric)
        _name(axes, study, metric, _seeds(cells, metric))


def _points(path: Path, study: Study, cells: list[dict[str, Any]], metric: str) -> None:
    """The axis does not start at 0, as differences are small; every point bears its value."""
    means, spreads = _of(cells, metric)
    with figure(path, width=max(4.8, 1.2 * len(cells))) as (axes,):
        names = [cell["name"] for cell in cells]
        places = list(range(len(cells)))
        colours = ["C0" if name != study.paper.best else "C1" for name in names]
        for place, value, spread, colour in zip(places, means, spreads, colours, strict=True):
            # Points, not bars: the axis does not begin at 0, and lengths of bars would be read as shares.
            axes.errorbar([place], [value], yerr=[spread] if spread else None, fmt="o", capsize=4, color=colour)
        axes.set_xlim(-0.6, len(cells) - 0.4)
        low, high = (
            min(m - s for m, s in zip(means, spreads, strict=True)),
            max(m + s for m, s in zip(means, spreads, strict=True)),
        )
        room = max(high - low, 0.02 * abs(high), 1e-3)
        axes.set_ylim(low - 0.6 * room if low - 0.6 * room > 0 or low < 0 else 0, high + 0.3 * room)
        keep_to_percent(axes, metric)
        for place, value, spread in zip(places, means, spreads, strict=True):
            _label(axes, f"{value:.1f}", place, value, spread)
        axes.set_xticks(places, names)
        axes.grid(axis="x", visible=False)
        note = f", orange: {PAPER_MARK}" if study.paper.best in names else ""
        _name(axes, study, metric, _seeds(cells, metric) + note)


def _over_epochs(path: Path, study: Study, cells: list[dict[str, Any]], metric: str) -> None:
    with figure(path, width=5.6) as (axes,):
        for number, cell in enumerate(cells):
            curves = [
                {record["epoch"]: record.get(metric, record.get(f"{metric}_before")) for record in run.get("curve", [])}
                for run in cell["runs"]
            ]
            by_epoch: dict[float, list[float]] = {}
            for curve in curves:
                for epoch, value in curve.items():
                    if value is not None:
                        by_epoch.setdefault(epoch, []).append(value)
            epochs = sorted(by_epoch)
            means = [mean(by_epoch[epoch]) for epoch in epochs]
            spreads = [stdev(by_epoch[epoch]) if len(by_epoch[epoch]) > 1 else 0.0 for epoch in epochs]
            axes.plot(epochs, means, marker="o", markersize=3.5, color=f"C{number}", label=cell["name"])
            if any(spreads):
                low = [m - s for m, s in zip(means, spreads, strict=True)]
                high = [m + s for m, s in zip(means, spreads, strict=True)]
                axes.fill_between(epochs, low, high, color=f"C{number}", alpha=0.18, linewidth=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
        keep_to_percent(axes, metric)
        _name(axes, study, metric, _seeds([cell for cell in cells if metric in cell["summary"]], metric))


def _cost(path: Path, study: Study, cells: list[dict[str, Any]]) -> None:
    wanted = ("milliseconds_per_step", "seconds_per_epoch", "memory_megabytes")
    metrics = [name for name in wanted if all(name in cell["summary"] for cell in cells)]
    with figure(path, columns=len(metrics), width=4.4, height=3.2) as panels:
        for axes, metric in zip(panels, metrics, strict=True):
            means, spreads = _of(cells, metric)
            places = list(range(len(cells)))
            axes.barh(
                places, means, xerr=spreads if any(spreads) else None, capsize=4, height=0.55, color="C0", alpha=0.85
            )
            for place, value in zip(places, means, strict=True):
                ratio = f"  ×{value / means[0]:.2f}" if means[0] > 0 and place else ""
                text = f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.1f}"
                axes.annotate(
                    text + ratio,
                    (0, place),
                    (6, 0),
                    textcoords="offset points",
                    va="center",
                    color="white",
                    fontsize=10,
                )
            axes.set_yticks(places, [cell["name"] for cell in cells] if axes is panels[0] else [""] * len(cells))
            axes.invert_yaxis()
            axes.set_xlim(left=0)
            axes.grid(axis="y", visible=False)
            axes.set_xlabel(LABELS[metric])
        panels[0].set_title(study.title, loc="left")


def keep_to_percent(axes: Axes, metric: str) -> None:
    """No axis of percentages goes below 0 or beyond 100; what lies on the border is drawn whole."""
    if metric != YARDSTICK:
        return
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 100))
    for line in axes.lines:
        values = np.asarray(line.get_ydata(), dtype=float)
        line.set_clip_on(bool(((values < 0) | (values > 100)).any()))  # the caps of a spread may lie beyond


def _has_room(axes: Axes, y: float) -> bool:
    """For a word above ``y``, below the title."""
    low, high = axes.get_ylim()
    return y + 0.08 * (high - low) <= high


def _label(axes: Axes, text: str, place: float, value: float, spread: float) -> None:
    """Above a point and its spread, or below them where the axis ends."""
    above = _has_room(axes, value + spread)
    axes.annotate(
        text,
        (place, value + spread if above else value - spread),
        (0, 3 if above else -3),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
        fontsize=10,
    )


def _name(axes: Axes, study: Study, metric: str, seeds: str) -> None:
    axes.set_xlabel(study.axis)
    axes.set_ylabel(LABELS[metric] if metric == YARDSTICK else f"{LABELS[metric]} (no labels)")
    axes.set_title(f"{study.title}\n", loc="left")
    axes.text(0, 1.02, seeds, transform=axes.transAxes, fontsize=9, color=GREY)


def _label_free(path: Path, document: dict[str, Any]) -> None:
    """k-NN over each label-free figure, one point a cell, the rank correlation above; better is to the right."""
    cells = [cell for cell in document["cells"] if YARDSTICK in cell["summary"] and cell["same_as"] is None]
    metrics = [name for name in LABEL_FREE if sum(name in cell["summary"] for cell in cells) > 1]
    if not metrics:
        return
    everyone = _of(cells, YARDSTICK)[0]
    low, high = min(everyone), max(everyone)
    with figure(path, columns=len(metrics), width=3.5, height=3.4) as panels:
        for axes, metric in zip(panels, metrics, strict=True):
            here = [cell for cell in cells if metric in cell["summary"]]
            (xs, _), (ys, _) = _of(here, metric), _of(here, YARDSTICK)
            axes.scatter(xs, ys, s=28, clip_on=False)
            axes.margins(0.12)
            axes.set_ylim(low - 0.12 * (high - low or 1), high + 0.15 * (high - low or 1))
            keep_to_percent(axes, YARDSTICK)
            middle = (min(xs) + max(xs)) / 2
            for cell, x, y in zip(here, xs, ys, strict=True):
                right = (x > middle) == LABEL_FREE[metric]  # names lean inwards, so that none leaves the panel
                axes.annotate(
                    cell["name"],
                    (x, y),
                    (-5 if right else 5, 4 if _has_room(axes, y) else -4),
                    textcoords="offset points",
                    fontsize=8,
                    ha="right" if right else "left",
                    va="bottom" if _has_room(axes, y) else "top",
                )
            found = document["label_free"][metric]
            title = found["unranked"] or f"rank correlation {found['spearman']:+.2f}"
            axes.set_title(title, fontsize=10)
            axes.set_xlabel(f"{LABELS[metric]}, better →")
            if not LABEL_FREE[metric]:
                axes.invert_xaxis()  # better is to the right in every panel
        panels[0].set_ylabel(LABELS[YARDSTICK])
