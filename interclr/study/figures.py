"""Figures of a study, in the paper's form, and a scatter of label-free figures against k-NN."""

from __future__ import annotations

import math
import textwrap
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
HOLLOW = "white"
HOLLOW_MARK = "hollow: one seed"
# Why a cell has no point, by the state of its runs, the graver first.
WHY_ABSENT = {"failed": "failed", "started": "not finished", "new": "not run yet", "finished": "no such figure"}


def draw(out: Path, study: Study, document: dict[str, Any]) -> None:
    """``figure`` and, where there is something to compare, ``label_free``, as .png and .svg; nothing without cells."""
    cells = [cell for cell in document["cells"] if cell["summary"]]
    if not cells:
        return
    metric = YARDSTICK if any(YARDSTICK in cell["summary"] for cell in cells) else FALLBACK
    shown = cells if study.figure == "table" else [cell for cell in cells if metric in cell["summary"]]
    absent = _absent(document["cells"], shown)
    if study.figure == "table":
        _cost(out / "figure", study, shown, absent)
    elif study.figure == "over-epochs":
        _over_epochs(out / "figure", study, shown, metric, absent)
    elif study.figure == "curve" and all(cell["x"] is not None for cell in shown):
        _curve(out / "figure", study, shown, metric, absent)
    else:
        _points(out / "figure", study, shown, metric, absent)
    if metric == YARDSTICK:
        _label_free(out / "label_free", document)


def _of(cells: list[dict[str, Any]], metric: str) -> tuple[list[float], list[float]]:
    return (
        [cell["summary"][metric]["mean"] for cell in cells],
        [cell["summary"][metric]["std"] or 0.0 for cell in cells],
    )


def _seeds(cells: list[dict[str, Any]], metric: str) -> str:
    counts = [cell["summary"][metric]["n"] for cell in cells]
    least, most = min(counts), max(counts)
    return "one seed" if most == 1 else f"{most} seeds" if least == most else f"{least}–{most} seeds"


def _errors(spreads: list[float]) -> list[float] | None:
    """Without a spread there is no bar, rather than one of no length."""
    return [spread or math.nan for spread in spreads] if any(spreads) else None


def _single(cells: list[dict[str, Any]], metric: str) -> list[bool]:
    """Which cells are of one seed where others are of several: without a spread they would look the surest."""
    counts = [cell["summary"][metric]["n"] for cell in cells]
    return [count == 1 < max(counts) for count in counts]


def _absent(cells: list[dict[str, Any]], shown: list[dict[str, Any]]) -> str:
    """``not shown: a, b (failed), c (not run yet)``; empty where all are shown."""
    names = {cell["name"] for cell in shown}
    by_reason: dict[str, list[str]] = {}
    for cell in cells:
        if cell["name"] not in names:
            states = {run["state"] for run in cell["runs"]}
            reason = next(why for state, why in WHY_ABSENT.items() if state in states)
            by_reason.setdefault(reason, []).append(cell["name"])
    groups = [f"{', '.join(group)} ({reason})" for reason, group in by_reason.items()]
    return f"not shown: {', '.join(groups)}" if groups else ""


def _curve(path: Path, study: Study, cells: list[dict[str, Any]], metric: str, absent: str) -> None:
    cells = sorted(cells, key=lambda cell: cell["x"])
    xs, (means, spreads) = [cell["x"] for cell in cells], _of(cells, metric)
    with figure(path, width=5.6) as (axes,):
        axes.errorbar(xs, means, yerr=_errors(spreads), marker="o", capsize=3)
        for x, value, single in zip(xs, means, _single(cells, metric), strict=True):
            if single:
                axes.plot([x], [value], "o", color="C0", markerfacecolor=HOLLOW, zorder=3)  # over the line's own point
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
        _name(axes, study, metric, cells, absent)


def _points(path: Path, study: Study, cells: list[dict[str, Any]], metric: str, absent: str) -> None:
    """The axis does not start at 0, as differences are small; every point bears its value."""
    means, spreads = _of(cells, metric)
    with figure(path, width=max(4.8, 1.2 * len(cells))) as (axes,):
        names = [cell["name"] for cell in cells]
        places = list(range(len(cells)))
        colours = ["C0" if name != study.paper.best else "C1" for name in names]
        fills = [HOLLOW if single else colour for single, colour in zip(_single(cells, metric), colours, strict=True)]
        for place, value, spread, colour, fill in zip(places, means, spreads, colours, fills, strict=True):
            # Points, not bars: the axis does not begin at 0, and lengths of bars would be read as shares.
            error = _errors([spread])
            axes.errorbar([place], [value], yerr=error, fmt="o", capsize=4, color=colour, markerfacecolor=fill)
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
        _name(axes, study, metric, cells, absent, note)


def _over_epochs(path: Path, study: Study, cells: list[dict[str, Any]], metric: str, absent: str) -> None:
    with figure(path, width=5.6) as (axes,):
        for number, (cell, single) in enumerate(zip(cells, _single(cells, metric), strict=True)):
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
            colour = f"C{number}"
            fill = HOLLOW if single else colour
            axes.plot(epochs, means, "o-", markersize=4, color=colour, markerfacecolor=fill, label=cell["name"])
            if any(spreads):
                low = [m - s for m, s in zip(means, spreads, strict=True)]
                high = [m + s for m, s in zip(means, spreads, strict=True)]
                axes.fill_between(epochs, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
        keep_to_percent(axes, metric)
        _name(axes, study, metric, cells, absent)


def _cost(path: Path, study: Study, cells: list[dict[str, Any]], absent: str) -> None:
    wanted = ("milliseconds_per_step", "seconds_per_epoch", "memory_megabytes")
    metrics = [name for name in wanted if all(name in cell["summary"] for cell in cells)]
    with figure(path, columns=len(metrics), width=4.4, height=3.2) as panels:
        for axes, metric in zip(panels, metrics, strict=True):
            means, spreads = _of(cells, metric)
            places = list(range(len(cells)))
            single, error = _single(cells, metric), _errors(spreads)
            fills = [HOLLOW if alone else "C0" for alone in single]
            axes.barh(places, means, xerr=error, capsize=4, height=0.55, color=fills, edgecolor="C0", alpha=0.85)
            for place, value, alone in zip(places, means, single, strict=True):
                ratio = f"  ×{value / means[0]:.2f}" if means[0] > 0 and place else ""
                text = f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.1f}"
                axes.annotate(
                    text + ratio,
                    (0, place),
                    (6, 0),
                    textcoords="offset points",
                    va="center",
                    color="C0" if alone else "white",
                    fontsize=10,
                )
            axes.set_yticks(places, [cell["name"] for cell in cells] if axes is panels[0] else [""] * len(cells))
            axes.invert_yaxis()
            axes.set_xlim(left=0)
            axes.grid(axis="y", visible=False)
            axes.set_xlabel(LABELS[metric])
        _title(panels[0], study, metrics[0], cells, absent)


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


def _name(axes: Axes, study: Study, metric: str, cells: list[dict[str, Any]], absent: str, colours: str = "") -> None:
    axes.set_xlabel(study.axis)
    axes.set_ylabel(LABELS[metric] if metric == YARDSTICK else f"{LABELS[metric]} (no labels)")
    _title(axes, study, metric, cells, absent, colours)


def _title(axes: Axes, study: Study, metric: str, cells: list[dict[str, Any]], absent: str, colours: str = "") -> None:
    axes.set_title(f"{study.title}\n", loc="left")
    several = any(cell["summary"][metric]["n"] > 1 for cell in cells)
    seeds = _seeds(cells, metric) + ", ± standard deviation" * several
    axes.text(0, 1.02, seeds + colours, transform=axes.transAxes, fontsize=9, color=GREY)
    _footnote(axes, HOLLOW_MARK * any(_single(cells, metric)), absent)


def _footnote(axes: Axes, *remarks: str) -> None:
    """Below the whole figure, in as many lines as it needs."""
    text = "; ".join(filter(None, remarks))
    if text:
        letters = int(14 * axes.figure.bbox.width / axes.figure.dpi)  # so many to an inch
        axes.figure.supxlabel(textwrap.fill(text, letters), x=0.02, ha="left", fontsize=9, color=GREY)


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
            fills = [HOLLOW if single else "C0" for single in _single(here, YARDSTICK)]
            axes.scatter(xs, ys, s=28, c=fills, edgecolors="C0", clip_on=False)
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
        own = [cell for cell in document["cells"] if cell["same_as"] is None]
        hollow = HOLLOW_MARK * any(_single(cells, YARDSTICK))
        _footnote(panels[0], f"{_seeds(cells, YARDSTICK)} a point", hollow, _absent(own, cells))
