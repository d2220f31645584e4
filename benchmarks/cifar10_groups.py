"""The sections of the CIFAR-10 pages on groups that choose settings: a table of runs each, and one of all settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cifar10_plots import compared, curves_of, picture_of
from cifar10_record import Record
from cifar10_results import (
    KNN,
    LEFT_OUT,
    LOW_SHOT,
    Gain,
    Measure,
    Results,
    change,
    control_of,
    either,
    emphasised,
    figure,
    inter_and_work,
    one_line,
    rows_of,
    standard_error,
    without_empty,
)
from cifar10_study import OBSERVED, curve_section, observations, settings_of

BASES = (
    "interclr",
    "branch",
    "start-100",
    "start-50",
    "fast-paper",
)  # the first a group has is what others differ from


def group_table(results: Results) -> list[str]:
    """Every run of a group, and what its branch gained over the same run without one."""
    table = [
        (
            *(run, str(len(by_seed)), results.cell(run, KNN), *gained(results, run)),
            *(results.cell(run, LEFT_OUT), gain(results, run, LEFT_OUT)),
            *_low_shot(results, run),
            *(results.cell(run, figure(name), ".2f") for name in ("purity", "positives_right", "negatives_wrong")),
            either(note_of(record) for record in by_seed.values()),
        )
        for run, by_seed in results.runs.items()
    ]
    header = (
        *("run", "seeds", "k-NN", "gained by the branch", "over"),
        *("k-NN of training images", "gained"),
        *("low-shot mAP", "gained", "± s.e. over the draws"),
        *("purity", "positives right", "negatives wrong", "note"),
    )
    lines, controls = rows_of(*without_empty(header, table)), [results.is_control(run) for run in results.runs]
    if any(not each.shared for run in results.runs for each in results.gains(run, KNN)):
        lines += [
            "† shares seed and settings only, so its difference has the noise of two whole runs in it: the branch",
            "begins at once, or the run that it continues was trained again and has no record. Others share all epochs",
            "before the branch.",
            "",
        ]
    if compared(results):
        lines += [f"![What the branch gained](images/{picture_of(results)})", ""]
        lines += ["Grey and hatched: controls; the notes say of what.", ""] if any(controls) else []
    if results.group in OBSERVED:
        lines += observations(results)
    return lines + curve_section(results, curves_of(results))


def gained(results: Results, run: str) -> tuple[str, str]:
    """Of k-NN, and over which run."""
    gains = results.gains(run, KNN)
    return gain(results, run, KNN), either(over(results, each) for each in gains)


def gain(results: Results, run: str, measure: Measure) -> str:
    found = [each.value for each in results.gains(run, measure)]
    return change(found) if found else ""


def over(results: Results, each: Gain) -> str:
    place = "" if each.over["group"] == results.group else f"{each.over['group']}/"
    return f"{place}{each.over['name']}{', trained again for it' if each.again else '' if each.shared else ' †'}"


def _low_shot(results: Results, run: str) -> tuple[str, str, str]:
    """mAP, what it gained with its error over the seeds, and the latter over the draws of images."""
    error = standard_error(results.by_draw(run, results.baseline))
    told = "" if run == results.baseline or error is None else f"{error:.2f}"
    return results.cell(run, LOW_SHOT), gain(results, run, LOW_SHOT), told


def note_of(record: Record) -> str:
    start = record["from"]
    again = ", trained again up to there" if start and start.get("again") else ""
    continued = f"continues {start['run']} from epoch {start['epoch']}{again}" if start else ""
    classes, own_target = control_of(record)
    control = f"a control: {' and '.join(map(_right, classes))} right, by labels" if classes else ""
    control = "a control: targets by the method's own loss, which relates no images" if own_target else control
    return "; ".join(part for part in (one_line(record["note"], 200), control, continued) if part)


def _right(part: str) -> str:
    """What a control has right, as its record names it: ``positives``, or ``positives=0.6`` of a share of the draws."""
    name, _, share = part.partition("=")
    return f"{name} of {share} of all draws" if share else name


# All settings at once.


def settings_section(groups: Sequence[Results]) -> list[str]:
    """Every run that differs from its group's branch in one setting, beside it: what was tried, and what came of it."""
    rows = sorted((row for results in groups for row in _tried(results)), key=lambda row: (row[0], row[3]))
    if not rows:
        return []
    header = ("setting", "tried", "instead of", "group", "seeds", "k-NN", "low-shot mAP")
    return [
        "## One setting at a time",
        "",
        "Every run that differs from its group's branch in one setting, minus that run, in points: seed by seed where",
        "there are fewer than three, else the mean with its 95 % interval, **bold** where that leaves zero out. One",
        "seed says little: the same run made again ends up to a point away (see below).",
        "",
        *rows_of(header, rows),
    ]


def _tried(results: Results) -> Iterator[tuple[str, ...]]:
    base = next((name for name in BASES if name in results.runs), None)
    if base is None:
        return
    ours, work = settings_of(results, base), inter_and_work(results.runs[base])[1]
    for run in results.runs:
        theirs = settings_of(results, run) if inter_and_work(results.runs[run])[1] == work else {}
        changed = [key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]
        named = [key for key in ("sampler.name", "labels.name", "loss") if key in changed]
        if not theirs or not (named or len(changed) == 1) or results.is_control(run) or _continues(results, run, base):
            continue
        if len(named) > 1 or (named and {key for key in changed if "." not in key} - set(named)):
            continue  # more than what belongs to the component
        key = (named or changed)[0]
        found = [results.differences(run, base, measure) for measure in (KNN, LOW_SHOT)]
        if found[0]:
            values = (_value(each.get(key)) for each in (theirs, ours))
            yield key, *values, f"{results.group}/{run}", str(len(found[0])), *(emphasised(each) for each in found)


def _continues(results: Results, run: str, base: str) -> bool:
    return any((record["from"] or {}).get("run") == base for record in results.runs[run].values())


def _value(value: object) -> str:
    return "the method's" if value is None else str(value)
