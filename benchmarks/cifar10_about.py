"""What the plan says of a group, with the figures it speaks of put in from the records: none of them is typed.

{k-NN: plain}                  the mean over the seeds with a record
{k-NN: interclr − plain}       seed by seed: mean ± standard error, fewer than three seeds one by one
{k-NN: interclr@0 − plain@0}   of one seed
{k-NN gained: clusters-100}    over the run that it is but for the branch, as in the tables
{k-NN at 120: byol}            at an epoch
{mAP: main/byol}               of another group
"""

from __future__ import annotations

import re
import statistics

from cifar10_results import (
    KNN,
    LEFT_OUT,
    LINEAR,
    LOW_SHOT,
    Measure,
    Results,
    at_epoch,
    change,
    figure,
    in_last_epoch,
    protocol,
    standard_error,
)

from interclr.types import UserError

MEASURES: dict[str, tuple[Measure, str]] = {
    "k-NN": (KNN, ".2f"),
    "k-NN of training images": (LEFT_OUT, ".2f"),
    "linear": (LINEAR, ".2f"),
    "mAP": (LOW_SHOT, ".2f"),
    "purity": (figure("purity"), ".2f"),
    "positives right": (figure("positives_right"), ".2f"),
    "negatives wrong": (figure("negatives_wrong"), ".2f"),
    "uniformity": (figure("uniformity"), ".2f"),
    "rank": (figure("rank_me"), ".1f"),
    "labels changed": (in_last_epoch("labels_changed"), ".2f"),
    **{f"{count} per class": (protocol("low-shot", f"top1@{count}"), ".2f") for count in (1, 2, 4, 8, 16, 32, 64, 96)},
    **{f"{share} fine-tuned": (protocol("semi-supervised", f"top1@{share}"), ".2f") for share in ("1%", "10%")},
}
PLACE = re.compile(r"\{([^{}:]+): ([^{}]+)\}")


def filled(text: str, here: str, groups: dict[str, Results]) -> str:
    """``text`` of the group ``here`` with its places filled in."""

    def fill(place: re.Match[str]) -> str:
        try:
            return _figure(place[1].strip(), place[2], here, groups)
        except KeyError as error:
            raise UserError(f"{here}: about: {place[0]}: {error.args[0]}") from None

    return PLACE.sub(fill, text)


def _figure(asked: str, runs: str, here: str, groups: dict[str, Results]) -> str:
    asked, _, epoch = asked.partition(" at ")
    gained = asked.removesuffix(" gained")
    if gained not in MEASURES:
        raise KeyError(f"no measure {gained!r}; there are {', '.join(MEASURES)}")
    measure, form = MEASURES[gained]
    if epoch and gained != "k-NN":
        raise KeyError("only k-NN is known at an epoch")
    if epoch:
        measure = at_epoch(int(epoch))
    run, minus, other = (part.strip() for part in runs.partition("−"))
    if minus and gained != asked:
        raise KeyError("what is gained is a difference already")
    results, name, seed = _named(run, here, groups)
    if gained != asked:
        return change(_some([gain.value for gain in results.gains(name, measure) if seed in (None, gain.seed)]))
    mine = _values(results, name, seed, measure)
    if not minus:
        values = _some(list(mine.values()))
        error = standard_error(values)
        return (
            ", ".join(f"{value:{form}}" for value in values) if error is None else f"{statistics.mean(values):{form}}"
        )
    theirs = _values(*_named(other, here, groups), measure)
    return change(_some([mine[common] - theirs[common] for common in sorted(mine.keys() & theirs.keys())]))


def _named(run: str, here: str, groups: dict[str, Results]) -> tuple[Results, str, int | None]:
    group, _, name = run.rpartition("/")
    name, _, seed = name.partition("@")
    if (group or here) not in groups or name not in groups[group or here].runs:
        raise KeyError(f"no finished run {run}")
    return groups[group or here], name, int(seed) if seed else None


def _values(results: Results, name: str, seed: int | None, measure: Measure) -> dict[int, float]:
    return {each: value for each, value in results.values(name, measure).items() if seed in (None, each)}


def _some(values: list[float]) -> list[float]:
    if not values:
        raise KeyError("no record has it")
    return values
