"""What was asked of the CIFAR-10 runs before any was made, beside what was found: the first table of the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from cifar10_results import INTER, KNN, LOW_SHOT, Measure, Results, change, field, protocol, rows_of, standard_error

SEEDS = 3  # as many, or a figure decides nothing
METHODS = ("npidv2", "mocov2", "byol")
GAIN_AIM = 1.5
LEAST_KNN = {
    "mocov2": (84.0, None),
    "byol": (87.0, None),
    "mocov2-interclr": (86.0, 89.0),
    "byol-interclr": (89.0, 91.0),
}
MOST_SECONDS = ("alone", "mocov2-interclr", 360.0, 180.0)
FEW_LABELS = {
    "low-shot mAP": LOW_SHOT,
    "1 % fine-tuned": protocol("semi-supervised", "top1@1%"),
    "10 % fine-tuned": protocol("semi-supervised", "top1@10%"),
}
Row = tuple[str, str, str, str, str]


def asked_section(groups: dict[str, Results], main: str) -> list[str]:
    found = [*_gains(groups.get(main)), *_least(groups.get(main)), *_time(groups), *_few(groups.get(main))]
    return [
        "## What was asked for",
        "",
        "Differences are InterCLR minus plain, seed by seed, in points, ± the standard error. A line is decided by",
        "three seeds or more, the time by one run.",
        "",
        *rows_of(("measure", "asked for", "hoped for", "found", ""), found),
    ]


def _gains(results: Results | None) -> Iterator[Row]:
    for method in METHODS:
        found = _differences(results, method, KNN)
        error = standard_error(found)
        clear = error is not None and statistics.mean(found) > 2 * error
        verdict = _verdict(found, clear, bool(found) and statistics.mean(found) >= GAIN_AIM)
        yield f"{method}: k-NN gained", "> 0, beyond two standard errors", f"≥ +{GAIN_AIM}", change(found), verdict


def _least(results: Results | None) -> Iterator[Row]:
    for run, (bar, aim) in LEAST_KNN.items():
        found = list(results.values(run, KNN).values()) if results else []
        mean = statistics.mean(found) if found else float("nan")
        hoped = "–" if aim is None else f"≥ {aim:g}"
        verdict = _verdict(found, mean >= bar, None if aim is None else mean >= aim)
        yield f"{run}: k-NN", f"≥ {bar:g}", hoped, f"{mean:.2f}" if found else "–", verdict


def _time(groups: dict[str, Results]) -> Iterator[Row]:
    group, run, bar, aim = MOST_SECONDS
    found = list(groups[group].values(run, field("seconds")).values()) if group in groups else []
    shown = f"{max(found):.0f} s" if found else "–"
    verdict = _verdict(found, bool(found) and max(found) <= bar, bool(found) and max(found) <= aim, least=1)
    yield f"{run}: time of one run alone", f"≤ {bar:.0f} s", f"≤ {aim:.0f} s", shown, verdict


def _few(results: Results | None) -> Iterator[Row]:
    for method in METHODS:
        for name, measure in FEW_LABELS.items():
            found = _differences(results, method, measure)
            ahead = bool(found) and statistics.mean(found) > 0
            error = standard_error(found)
            unclear = ahead and error is not None and statistics.mean(found) <= 2 * error
            verdict = _verdict(found, ahead, None) + (", within two standard errors" if unclear else "")
            yield f"{method}: {name}", "> 0", "–", change(found), verdict


def _differences(results: Results | None, method: str, measure: Measure) -> list[float]:
    return results.differences(f"{method}{INTER}", method, measure) if results else []


def _verdict(found: Sequence[float], reached: bool, hoped: bool | None, least: int = SEEDS) -> str:
    """``hoped`` is None where nothing beyond the bar was hoped for."""
    if not found:
        return "not run yet"
    if len(found) < least:
        return f"too few seeds ({len(found)})"
    if not reached:
        return "**missed**"
    return {None: "reached", True: "reached, and what was hoped for", False: "reached; not what was hoped for"}[hoped]
