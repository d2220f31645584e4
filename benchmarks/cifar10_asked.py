"""What the project asks of the CIFAR-10 runs, beside what was found: the first tables of the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from cifar10_results import (
    FEW,
    INTER,
    KNN,
    LINEAR,
    LOW_SHOT,
    Results,
    change,
    field,
    interval,
    protocol,
    rows_of,
    standard_error,
)
from cifar10_study import OBSERVED, tally

METHODS = ("npidv2", "mocov2", "byol")
GAIN_AIM = 1.5  # points of k-NN
LEAST_KNN = {
    "mocov2": (84.0, None),
    "byol": (87.0, None),
    "mocov2-interclr": (86.0, 89.0),
    "byol-interclr": (89.0, 91.0),
}
MOST_SECONDS = ("alone", "mocov2-interclr", 360.0, 180.0)
LONG = ("long", "byol-interclr", 92.94)  # solo-learn's best linear probe
GAINS = {  # what is compared, and whether it has to be clear: beyond two standard errors, not just above zero
    "k-NN": (KNN, True),
    "linear": (LINEAR, True),
    "low-shot mAP": (LOW_SHOT, False),
    "1 % fine-tuned": (protocol("semi-supervised", "top1@1%"), False),
    "10 % fine-tuned": (protocol("semi-supervised", "top1@10%"), False),
}


def short_section(results: Results) -> list[str]:
    """Which differences are clear, in one line each way."""
    clear: dict[str, list[str]] = {"More": [], "Less": [], "No difference that these seeds could tell": []}
    count = 0
    for run, plain in results.pairs.items():
        for name, (measure, _) in GAINS.items():
            values = results.differences(run, plain, measure)
            between = interval(values)
            if between is None:
                continue
            count += 1
            side = "More" if between[0] > 0 else "Less" if between[1] < 0 else list(clear)[-1]
            low, high = between
            clear[side].append(f"{run} {name} {statistics.mean(values):+.2f} [{low:+.2f}, {high:+.2f}]")
    if not count:
        return []
    return [
        "With the branch minus without, in points, with 95 % intervals (Student's t over seeds). Of "
        f"{count} comparisons {count / 20:.1f}",
        "would leave zero out by chance alone; no interval knows how much hangs on these test images.",
        "",
        *(f"- **{side}**: {'; '.join(found) or 'none'}." for side, found in clear.items()),
        "",
    ]


def asked_section(groups: dict[str, Results], main: str) -> list[str]:
    results = groups.get(main)
    header = ("with the branch minus without", "seeds", *GAINS)
    return [
        "## What was asked for",
        "",
        "Of k-NN and the linear probe: more than zero, beyond two standard errors (± here); of k-NN at best",
        f"≥ +{GAIN_AIM}. Of few labels: more than zero. Three seeds or more decide.",
        "",
        *rows_of(header, _gains(results)),
        *rows_of(
            ("measure", "asked for", "hoped for", "found", ""),
            [*_least(results), *_time(groups), *_observed(groups), _long(groups)],
        ),
    ]


def _gains(results: Results | None) -> Iterator[Sequence[str]]:
    for run, plain, told in _attempts(results):
        found = {
            name: results.differences(run, plain, measure) if results else [] for name, (measure, _) in GAINS.items()
        }
        cells = (_gain(name, values) for name, values in found.items())
        yield (told, str(max(len(values) for values in found.values())), *cells)


def _attempts(results: Results | None) -> Iterator[tuple[str, str, str]]:
    """Every run that is a method with its branch, the plain one, and what it is called."""
    for method in METHODS:
        earlier = [
            run
            for run, plain in (results.pairs if results else {}).items()
            if plain == method and run != method + INTER
        ]
        for run in earlier:
            yield run, method, f"{method}, first try ({run.removeprefix(method + '-')})"
        again = ", second try, chosen after the first was known" if earlier else ""
        yield method + INTER, method, method + again


def _gain(name: str, found: Sequence[float]) -> str:
    if not found:
        return "not run yet"
    error, mean = standard_error(found), statistics.mean(found)
    if error is None:
        return f"{change(found)}: too few seeds"
    clear = mean > 2 * error
    if not (clear if GAINS[name][1] else mean > 0):
        return f"{change(found)}: **missed**"
    told = "reached" if clear else "reached, within two standard errors"
    aimed = name == "k-NN" and mean >= GAIN_AIM
    return f"{change(found)}: {told}{', and what was hoped for' if aimed else ''}"


def _least(results: Results | None) -> Iterator[Sequence[str]]:
    for run, (bar, aim) in LEAST_KNN.items():
        found = list(results.values(run, KNN).values()) if results else []
        mean = statistics.mean(found) if found else float("nan")
        hoped = "–" if aim is None else f"≥ {aim:g}"
        verdict = _verdict(found, mean >= bar, None if aim is None else mean >= aim)
        yield f"{run}: k-NN", f"≥ {bar:g}", hoped, f"{mean:.2f}" if found else "–", verdict


def _time(groups: dict[str, Results]) -> Iterator[Sequence[str]]:
    group, run, bar, aim = MOST_SECONDS
    found = list(groups[group].values(run, field("seconds")).values()) if group in groups else []
    shown = f"{max(found):.0f} s" if found else "–"
    verdict = _verdict(found, bool(found) and max(found) <= bar, bool(found) and max(found) <= aim, least=1)
    records = groups[group].runs.get(run, {}).values() if group in groups else ()
    kinds = {record["settings"].get("engine", {}).get("deterministic") for record in records}
    run += ", engine.deterministic=false" if kinds == {False} else ""
    yield f"{run}: time of one run alone", f"≤ {bar:.0f} s", f"≤ {aim:.0f} s", shown, verdict


def _observed(groups: dict[str, Results]) -> Iterator[Sequence[str]]:
    for group in OBSERVED:
        found = tally(groups[group]) if group in groups else {}
        told = ", ".join(f"{count} {verdict}" for verdict, count in found.items())
        yield (
            f"the paper's observations, by k-NN ({group})",
            "reproduced, or not and why",
            "–",
            told or "–",
            ("see there" if told else "not run yet"),
        )


def _long(groups: dict[str, Results]) -> Sequence[str]:
    group, run, other = LONG
    found = list(groups[group].values(run, LINEAR).values()) if group in groups else []
    shown = ", ".join(f"{value:.2f}" for value in found) or "–"
    return f"{run}, {group}: linear", f"beside {other:g}", "–", shown, "" if found else "not run yet"


def _verdict(found: Sequence[float], reached: bool, hoped: bool | None, least: int = FEW) -> str:
    """``hoped`` is None where nothing beyond the bar was hoped for."""
    if not found:
        return "not run yet"
    if len(found) < least:
        return f"too few seeds ({len(found)})"
    if not reached:
        return "**missed**"
    return {None: "reached", True: "reached, and what was hoped for", False: "reached; not what was hoped for"}[hoped]
