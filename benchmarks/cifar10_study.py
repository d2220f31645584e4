"""The paper's observations and curves, from a group of runs that differ in one setting of the inter branch each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cifar10_results import (
    DEFAULTS,
    KNN,
    LOW_SHOT,
    Measure,
    Results,
    bracketed,
    direction,
    drawing,
    interval,
    rows_of,
    standard_error,
    without_gone,
)

from interclr.config import flat

STUDY, PLAIN = "study-", "plain"  # groups whose names begin so have curves
STUDIED = "study-npidv2"  # where the paper's observations are to be decided
SMALL_STUDIED = "small-long-npidv2"  # where they can be told something of without a GPU
OBSERVED = (STUDIED, SMALL_STUDIED, "small-controls")  # groups with the runs that they compare
BASES = ("interclr", "branch")  # what one thing at a time is changed of: whichever a group has
BASE = BASES[0]
CONTROLLED = "mostly-right-"  # what the same runs are called where most positives are right, by labels
OBSERVATIONS = (
    # what the paper says, the run that should be ahead, of which other
    ("1: labels kept up to date online are better than offline ones", "negatives-random", "labels-offline"),
    ("2: semi-hard negatives are better than random ones", "margin-0", "negatives-random"),
    ("2: semi-hard negatives are better than the hardest", "margin-0", "negatives-hard"),
    ("2: random negatives are better than the hardest", "negatives-random", "negatives-hard"),
    ("3: a margin of −0.5 is better than none", BASE, "margin-0"),
    ("3: no margin is better than one of +0.3", "margin-0", "margin-plus-0.3"),
)
AXES = {
    "intra_weight": "λ (1: no inter branch)",
    "clusters": "clusters",
    "sampler.negatives": "negatives K",
    "sampler.pool_fraction": "share of other clusters that is semi-hard",
    "margin": "margin",
    "warmup_epochs": "the branch begins, epoch",
}
UNKNOWN, TOO_SMALL = "not run yet", "a difference too small to matter"
MATTERS = 0.05  # points: runs that share half of their training differ clearly by less than anybody could use
FEWEST = 3  # points of a curve
LOGARITHMIC = ("clusters", "sampler.negatives")
DERIVED = ("sampler.candidates",)  # follows from the others


def observations(results: Results) -> list[str]:
    lines = [
        "### The paper's observations",
        "",
        "Differences seed by seed, in points, with 95 % intervals (Student's t). *Reproduced* and *contradicted*: the",
        f"interval leaves zero out, and the mean is {MATTERS} points or more. *No difference found*: not so, which",
        "does not show that there is none. Labels are compared with random negatives and no margin, negatives with no",
        "margin, as in the paper.",
        "",
        *_observed(results, pairs_of(results)),
    ]
    if again := controlled(results):
        lines += [
            "The same of controls, most of whose positives are right by the classes of the images: are they seen where",
            "pseudo-labels are mostly right?",
            "",
            *_observed(results, again),
        ]
    return lines


def pairs_of(results: Results, prefix: str = "") -> list[tuple[str, str, str]]:
    """What the paper says, the run that should be ahead, of which other, as they are called in a group."""
    base = base_of(results)
    named = [(told, *(base if run == BASE else run for run in pair)) for told, *pair in OBSERVATIONS]
    return [(told, prefix + better, prefix + worse) for told, better, worse in named]


def controlled(results: Results) -> list[tuple[str, str, str]]:
    """Those that are asked of controls as well."""
    named = pairs_of(results, CONTROLLED)
    return [(told, better, worse) for told, better, worse in named if {better, worse} <= set(results.runs)]


def _observed(results: Results, pairs: Sequence[tuple[str, str, str]]) -> list[str]:
    table = []
    for told, better, worse in pairs:
        knn, low = (results.differences(better, worse, measure) for measure in (KNN, LOW_SHOT))
        shown = (str(len(knn)), bracketed(knn), verdict(knn), bracketed(low), verdict(low))
        table.append((told, f"{better} − {worse}", *shown))
    header = (
        "the paper's observation",
        "difference",
        "seeds",
        "k-NN",
        "by k-NN",
        "low-shot mAP",
        "by mAP",
    )
    return rows_of(header, table)


def tally(results: Results, pairs: Sequence[tuple[str, str, str]]) -> dict[str, int]:
    """How many of the observations came to which verdict by k-NN; nothing where none can be judged yet."""
    verdicts = [verdict(results.differences(*pair, KNN)) for _, *pair in pairs]
    return {} if set(verdicts) <= {UNKNOWN} else {each: verdicts.count(each) for each in dict.fromkeys(verdicts)}


def base_of(results: Results) -> str:
    return next((run for run in BASES if run in results.runs), BASE)


def verdict(differences: Sequence[float]) -> str:
    if not differences:
        return UNKNOWN
    if interval(differences) is None:
        return "too few seeds"
    side = direction(differences)
    if side and abs(statistics.mean(differences)) < MATTERS:
        return TOO_SMALL
    return {1: "reproduced", -1: "contradicted", 0: "no difference found"}[side]


def curves(results: Results) -> dict[str, list[tuple[float, str]]]:
    """For each setting with a curve its values and the runs that have them, ascending."""
    name = base_of(results)
    if not (results.group.startswith(STUDY) or results.group in OBSERVED) or name not in results.runs:
        return {}
    base = settings_of(results, name)
    found: dict[str, list[tuple[float, str]]] = {}
    for run in results.runs:
        mine = settings_of(results, run)
        if results.is_control(run):
            continue
        changed = [key for key in base if mine.get(key) != base[key]] if mine else []
        if len(changed) == 1 and changed[0] in AXES and set(mine) == set(base):
            found.setdefault(changed[0], []).append((mine[changed[0]], run))
    for key, points in found.items():
        points.append((base[key], name))
        if key == "intra_weight" and PLAIN in results.runs:
            points.append((1.0, PLAIN))
    return {key: sorted(found[key]) for key in AXES if len(found.get(key, [])) >= FEWEST}


def gained(results: Results, run: str, measure: Measure) -> list[float]:
    if run == PLAIN:
        return [0.0] * bool(results.values(run, measure))
    return [each.value for each in results.gains(run, measure)]


def settings_of(results: Results, run: str) -> dict[str, Any]:
    """The settings of a run's inter branch, flat; none without one. Older records lack what is newer than they are."""
    branch = next(iter(results.runs[run].values()))["settings"]["inter"]
    if branch is None:
        return {}
    return {key: value for key, value in flat(DEFAULTS | without_gone(branch)).items() if key not in DERIVED}


def curve_section(results: Results, picture: str) -> list[str]:
    if not curves(results):
        return []
    return [
        "### One setting at a time",
        "",
        f"![One setting at a time](images/{picture})",
        "",
        "What the branch gains over the plain run, seed by seed: means, and from three seeds on their standard errors",
        "as bars. The dashed line has no inter branch.",
        "",
    ]


def draw_study(results: Results, path: Path) -> None:
    found = curves(results)
    if not found:
        return
    measures: list[tuple[str, Measure]] = [("k-NN", KNN)]
    if any(results.values(run, LOW_SHOT) for run in results.runs):
        measures.append(("low-shot mAP", LOW_SHOT))
    with drawing(path, columns=len(found), rows=len(measures), width=3.1, height=2.9) as panels:
        for number, axes in enumerate(panels):
            (label, measure), key = measures[number // len(found)], list(found)[number % len(found)]
            points = [(x, gained(results, run, measure)) for x, run in found[key]]
            points = [(x, values) for x, values in points if values]
            axes.errorbar(
                [x for x, _ in points],
                [statistics.mean(values) for _, values in points],
                yerr=[standard_error(values) or 0.0 for _, values in points],
                marker="o",
                capsize=3,
            )
            axes.axhline(0, linestyle="--", color="grey", linewidth=1)
            if key in LOGARITHMIC:
                axes.set_xscale("log", base=2)
                axes.set_xticks([x for x, _ in points], [f"{x:g}" for x, _ in points])
                axes.minorticks_off()
            axes.set_xlabel(AXES[key])
            axes.set_ylabel(f"{label} gained, points")
        for row in range(len(measures)):
            one, *others = panels[row * len(found) : (row + 1) * len(found)]
            for axes in others:
                axes.sharey(one)
            one.autoscale(axis="y")
