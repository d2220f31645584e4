"""Writes docs/results.md, docs/results-choices.md and their plots from the records that benchmarks/cifar10.py leaves.

python benchmarks/cifar10_page.py            rewrite the pages and their plots
python benchmarks/cifar10_page.py --check    fail if the pages are not what the records say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cifar10 import RECORDS
from cifar10_about import filled
from cifar10_asked import asked_section, short_section
from cifar10_plan import PLAN, ROOT, Group, read_plan
from cifar10_plots import (
    SHORT,
    compared,
    curves_of,
    draw_curves,
    draw_gains,
    draw_short,
    picture_of,
    with_interval,
)
from cifar10_record import Record
from cifar10_results import (
    FEW,
    INTER,
    KNN,
    LEFT_OUT,
    LINEAR,
    LOW_SHOT,
    Gain,
    Measure,
    Results,
    arranged,
    begins_as,
    chance,
    change,
    either,
    figure,
    interval,
    one_line,
    protocol,
    rows_of,
    standard_error,
)
from cifar10_runs import again_section, cost_section, failed_section, unmeasured_section
from cifar10_study import OBSERVED, curve_section, draw_study, observations

from interclr.config import CARRIED_OUT
from interclr.types import UserError

MAIN = "main"
CHOICES = "results-choices.md"
CONTEXT = (
    # method, lightly's k-NN: batch 128 for 200 epochs, batch 512 for 800; solo-learn's linear probe: 1,000 epochs
    ("MoCo v2", 83.8, 89.9, 92.94),
    ("BYOL", 86.9, 91.0, 92.58),
)
WORDS = (
    ("branch", "the inter branch: what InterCLR adds to a method. *Plain* is the method without it"),
    ("λ", "the share of the method's own loss (intra); the branch has 1 − λ"),
    ("clusters, k", "how many groups the memory bank of all images is kept in"),
    ("ω", "how much of a new feature goes into the bank: 1 replaces, less makes a mean over views"),
    ("K, pool", "negatives of an anchor; semi-hard: drawn from the nearest tenth (the pool) of the other clusters"),
    ("margin", "m of the inter loss; below 0 it forgives wrong positives"),
    ("positives right", "the share of an anchor's possible positives that are of its class, at the end"),
    ("negatives wrong", "the share of an anchor's negatives that are of its class, at the end"),
    ("purity", "the share of images whose class is the commonest of their cluster, at the end"),
    (
        "k-NN of training images",
        "of each among the others, which has less noise; it may count against a branch that ties "
        "images to their clusters",
    ),
    (
        "low-shot mAP",
        "linear SVMs on 1, 2, 4 … 96 labelled images per class: mean average precision, mean over the sizes",
    ),
)


EXACT = "engine.deterministic"
ROUNDING = f" What that does to a run: *Runs made again* in [{CHOICES}]({CHOICES})."


def conditions(results: Results) -> list[str]:
    """What the figures of a group are measured on and by, and what they should not be read as."""
    records = results.records
    places = (
        f"{record['settings']['data']['hold_out']:,} held-out training images, not the test set"
        if record["measured_on"] == "held-out"
        else "the test set"
        for record in records
    )
    k = either(record["figures"].get("knn_k") for record in records)
    temperature = either(record["figures"].get("knn_temperature") for record in records)
    epochs = either(record["settings"]["schedule"]["epochs"] for record in records)
    seeds = either(len(by_seed) for by_seed in results.runs.values())
    lines = [
        f"Measured on {either(places)}, at the last epoch of {epochs}. k-NN in percent, k = {k}, T = {temperature}. "
        f"Seeds: {seeds}; ± is the standard deviation over them."
    ]
    for run, by_seed in results.runs.items():
        others = differing([record["settings"] for record in by_seed.values()])
        others = [name for name in others if not name.startswith(CARRIED_OUT)]
        if others:
            lines.append(f"The seeds of {run} differ in {', '.join(others)}.{ROUNDING if others == [EXACT] else ''}")
    return [*lines, ""]


def differing(trees: list[Record], prefix: str = "") -> list[str]:
    """The settings that are not the same in all trees, but for the seed."""
    found: list[str] = []
    for key in dict.fromkeys(key for tree in trees for key in tree):
        values = [tree.get(key) for tree in trees]
        if all(isinstance(value, dict) for value in values):
            found += differing(values, f"{prefix}{key}.")
        elif any(value != values[0] for value in values) and key != "seed":
            found.append(f"{prefix}{key}")
    return found


# Sections.


def about(results: Results, group: Group | None, groups: dict[str, Results]) -> list[str]:
    """What the plan says of a group, and which of its runs are still to be made."""
    if group is None:
        return []
    told = []
    for name in group.runs:
        missing = [str(seed) for seed in group.seeds if seed not in results.runs.get(name, {})]
        which = "all seeds" if len(missing) == len(group.seeds) else f"seed {', '.join(missing)}"
        told += [f"{name} ({which})"] if missing else []
    lines = [*filled(group.about, results.group, groups).strip().splitlines(), ""] if group.about else []
    return lines + ([f"Planned, and without a finished record yet: {', '.join(told)}.", ""] if told else [])


def main_section(results: Results, group: Group | None, groups: dict[str, Results]) -> list[str]:
    lines = ["## With and without the inter branch", "", *about(results, group, groups), *conditions(results)]
    table = [
        (run, str(len(by_seed)), results.cell(run, KNN), results.cell(run, LINEAR))
        for run, by_seed in results.runs.items()
    ]
    lines += rows_of(("run", "seeds", "k-NN", "linear"), table)
    lines += [
        "Linear: top-1 in percent of a linear probe on frozen features; stage and learning rate are chosen on a tenth",
        "of the training images.",
        "",
    ]
    lines += _paired(results)
    lines += _parents(results)
    lines += _context()
    lines += _low_labels(results)
    return lines + _curves(results)


def _paired(results: Results) -> list[str]:
    table, seeds = [], 0
    for run, plain in results.pairs.items():
        knn, linear = (results.differences(run, plain, of) for of in (KNN, LINEAR))
        seeds = max(seeds, len(knn))
        table.append((run, str(len(knn)), change(knn), between(knn), change(linear), between(linear)))
    if not table:
        return []
    header = ("minus plain", "common seeds", "k-NN", "95 %", "linear", "95 %")
    lines = ["InterCLR minus plain, seed by seed, in points; ± is the standard error of the mean difference:", ""]
    lines += rows_of(header, table)
    return [*lines, *chance(seeds), *[""] * (seeds >= FEW)]


def between(values: Sequence[float]) -> str:
    found = interval(values)
    return "–" if found is None else f"{found[0]:+.2f} to {found[1]:+.2f}"


def _parents(results: Results) -> list[str]:
    """Which halves of the pairs above are really shared: a parent trained again may have come out as before, or not."""
    same, other = [], []
    for run, by_seed in results.runs.items():
        again = [seed for seed, record in by_seed.items() if (record["from"] or {}).get("again")]
        alike = [seed for seed in again if _as_before(by_seed[seed], results.runs)]
        for seeds, told in ((alike, same), ([seed for seed in again if seed not in alike], other)):
            if seeds:
                told.append(f"{run} (seed {', '.join(str(seed) for seed in seeds)})")
    lines = []
    if same:
        lines += [
            f"{', '.join(same)}: the plain run's first half was trained again for its checkpoint, and came out as "
            "before, epoch for epoch. The pairs share it.",
            "",
        ]
    if other:
        lines += [
            f"{', '.join(other)}: the plain run's first half was trained again for its checkpoint, and came out "
            "otherwise (other settings or another commit, see above and below). The pairs share their seed only, so "
            "a difference has the noise of two whole runs in it.",
            "",
        ]
    return lines


def _as_before(child: Record, runs: dict[str, dict[int, Record]]) -> bool:
    """Whether the epochs that ``child`` has from its parent are those of the parent's record."""
    parent = runs.get(child["from"]["run"], {}).get(child["seed"])
    return parent is not None and begins_as(child, parent)


def _context() -> list[str]:
    header = (
        *("method", "lightly k-NN, batch 128, 200 epochs", "lightly k-NN, batch 512, 800 epochs"),
        "solo-learn linear, 1,000 epochs",
    )
    return [
        "Published by others, for orientation (ResNet-18; other views and schedules). lightly's are the maximum over",
        "all epochs on the test set, ours are the last epoch's:",
        "",
        *rows_of(header, ((name, *(str(value) for value in values)) for name, *values in CONTEXT)),
    ]


def _low_labels(results: Results) -> list[str]:
    names = {
        (name, key): None
        for record in results.records
        for name in ("low-shot", "semi-supervised")
        for key in record["figures"].get("evaluate", {}).get(name, {})
        if (key.startswith("top1@") and not key.endswith("_std")) or (name, key) == ("low-shot", "mAP")
    }
    if not names:
        return []

    def order(column: tuple[str, str]) -> tuple[str, bool]:  # the mean of the sizes after the sizes
        return column[0], column[1] == "mAP"

    columns = [protocol(name, key) for name, key in sorted(names, key=order)]
    table = [(run, *(results.cell(run, column) for column in columns)) for run in results.runs]
    for run, plain in results.pairs.items():
        differences = (results.differences(run, plain, column) for column in columns)
        table.append((f"{run.removesuffix(INTER)}: difference", *(change(each) for each in differences)))
    titles = (
        "mAP of these"
        if key == "mAP"
        else f"{key.removeprefix('top1@')}{' per class' if name == 'low-shot' else ', fine-tuned'}"
        for name, key in sorted(names, key=order)
    )
    return [
        "## Few labels",
        "",
        "Top-1 in percent on the test set. Images per class: linear SVMs on frozen features, mean of five draws of",
        "images; beside them the mean average precision over all numbers of images. Shares of the training set: the",
        "whole network fine-tuned for 20 epochs, in smaller batches where a share has few images. The draws are the",
        "same for all runs and seeds, so ± is what trainings differ by, not what other images would give. Differences",
        "are InterCLR minus plain ± standard error.",
        "",
        *rows_of(("run", *titles), table),
        *_over_draws(results),
    ]


def _over_draws(results: Results) -> list[str]:
    found = {run.removesuffix(INTER): results.by_draw(run, plain) for run, plain in results.pairs.items()}
    told = [f"{name} {change(values)} ({len(values)} draws)" for name, values in found.items() if len(values) > 1]
    if not told:
        return []
    return [f"The differences in mAP draw by draw, ± the standard error over the draws: {', '.join(told)}.", ""]


def _curves(results: Results) -> list[str]:
    return [
        "## k-NN over the epochs",
        "",
        f"![k-NN over the epochs](images/{picture_of(results)})",
        "",
        "Lines are means over seeds, bands reach from the lowest to the highest. The figures above are the last",
        "epoch's. No setting was chosen by these curves, but they suggested what to try next on held-out images.",
        "",
    ]


def group_section(results: Results, group: Group | None, groups: dict[str, Results]) -> list[str]:
    """Every run of a group, and what its branch gained over the same run without one."""
    low_shot, left_out = (any(results.values(run, measure) for run in results.runs) for measure in (LOW_SHOT, LEFT_OUT))
    table = [
        (
            run,
            str(len(by_seed)),
            results.cell(run, KNN),
            *gained(results, run),
            *(results.cell(run, LEFT_OUT), gain(results, run, LEFT_OUT)) * left_out,
            *_low_shot(results, run) * low_shot,
            *(results.cell(run, figure(name), ".2f") for name in ("purity", "positives_right", "negatives_wrong")),
            either(note_of(record) for record in by_seed.values()),
        )
        for run, by_seed in results.runs.items()
    ]
    header = (
        *("run", "seeds", "k-NN", "gained by the branch", "over"),
        *("k-NN of training images", "gained") * left_out,
        *("low-shot mAP", "gained", "± s.e. over the draws") * low_shot,
        *("purity", "positives right", "negatives wrong", "note"),
    )
    lines = [f"## {results.group}", "", *about(results, group, groups), *conditions(results), *rows_of(header, table)]
    if any(not each.shared for run in results.runs for each in results.gains(run, KNN)):
        lines += [
            "† shares seed and settings only, so its difference has the noise of two whole runs in it: the branch",
            "begins at once, or the run that it continues was trained again and has no record. Others share all epochs",
            "before the branch.",
            "",
        ]
    if compared(results):
        lines += [f"![k-NN gained by the branch](images/{picture_of(results)})", ""]
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
    return f"{place}{each.over['name']}{'' if each.shared else ' †'}"


def _low_shot(results: Results, run: str) -> tuple[str, str, str]:
    """mAP, what it gained with its error over the seeds, and the latter over the draws of images."""
    error = standard_error(results.by_draw(run, results.baseline))
    told = "" if run == results.baseline else "–" if error is None else f"{error:.2f}"
    return results.cell(run, LOW_SHOT), gain(results, run, LOW_SHOT), told


def note_of(record: Record) -> str:
    start = record["from"]
    again = ", trained again up to there" if start and start.get("again") else ""
    continued = f"continues {start['run']} from epoch {start['epoch']}{again}" if start else ""
    classes = " and ".join(record.get("classes", ()))  # older records lack it
    control = f"a control: {classes} right, by labels" if classes else ""
    return "; ".join(part for part in (one_line(record["note"], 200), control, continued) if part)


# The page.


def read_records(folder: Path) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("**/*.json"))]


REPEAT = [
    "## How to repeat this",
    "",
    "`benchmarks/cifar10.yaml` lists the runs. To make those of a group that have no record yet, or more seeds of",
    "some of them, and the pages anew (a run that continues another whose checkpoint is not at hand trains that",
    "again first):",
    "",
    "    interclr data get cifar10",
    "    python benchmarks/cifar10.py GROUP [RUN …] [--seeds 3,4] [--jobs 2] [--work FOLDER]",
    "    python benchmarks/cifar10_page.py",
    "",
]
WRITTEN = "Written by `benchmarks/cifar10_page.py` from the records in `results/cifar10`"


def results_page(groups: dict[str, Results], records: list[Record], plan: dict[str, Group]) -> str:
    lines = [
        "# Results on CIFAR-10",
        "",
        f"{WRITTEN}: one for each run, with its settings,",
        "figures of every epoch, and the commit and the command that repeat it; figures within texts are put in from",
        "there as well. Runs that failed, were cut off or left no record stand at the end. How the settings were",
        f"chosen, on images held out of the training set, and what did not help: [{CHOICES}]({CHOICES}).",
        "",
    ]
    shown = [results for results in groups.values() if page_of(results.group, plan) == "results"]
    if MAIN in groups:
        lines += ["## In short", "", *short_section(groups[MAIN])]
        if any(with_interval(groups[MAIN])):
            lines += [f"![What the branch brings](images/{SHORT})", ""]
        told = plan[MAIN].short if MAIN in plan else ""
        lines += [*filled(told, MAIN, groups).strip().splitlines(), ""] if told else []
    missing = [group for group in plan if group not in groups]
    if missing:
        lines += [f"Groups of the plan without finished runs yet: {', '.join(missing)}.", ""]
    lines += asked_section(groups, MAIN) if groups else []
    for results in shown:
        section = main_section if results.group == MAIN else group_section
        lines += section(results, plan.get(results.group), groups)
    lines += unmeasured_section(records)
    lines += failed_section(records, plan)
    lines += [*_words(), *REPEAT] if groups else []
    return "\n".join(lines).rstrip() + "\n"


def choices_page(groups: dict[str, Results], plan: dict[str, Group]) -> str:
    lines = [
        "# How the CIFAR-10 settings were chosen",
        "",
        f"{WRITTEN}; the results themselves: [results.md](results.md).",
        "Settings are compared here on images held out of the training set, most with one seed or two: this says where",
        "to look, and rarely what is so. What the branch gained is told over the same run without it.",
        "",
    ]
    shown = [results for results in groups.values() if page_of(results.group, plan) == "choices"]
    lines += _words() if shown else []
    lines += again_section([record for results in groups.values() for record in results.records])
    for results in shown:
        lines += group_section(results, plan.get(results.group), groups)
    if groups:
        lines += cost_section(list(groups.values()))
    return "\n".join(lines).rstrip() + "\n"


def page_of(group: str, plan: dict[str, Group]) -> str:
    return plan[group].page if group in plan else "choices"


def _words() -> list[str]:
    return ["## Words", "", *(f"- **{word}**: {meaning}." for word, meaning in WORDS), ""]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/results.md from the records of the CIFAR-10 runs.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the pages are others")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "results.md", help="the other one, and images/, go beside it"
    )
    parser.add_argument("--plan", type=Path, default=PLAN)
    given = parser.parse_args(words)
    try:
        plan, records = read_plan(given.plan), read_records(given.records)
        whole = [record for record in records if "error" not in record and not record.get("unmeasured")]
        groups = {results.group: results for results in arranged(whole, plan)}
        texts = {
            given.page: results_page(groups, records, plan),
            given.page.parent / CHOICES: choices_page(groups, plan),
        }
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.check:
        return int(any(not path.exists() or path.read_text() != text for path, text in texts.items()))
    given.page.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text)
    if MAIN in groups:
        draw_short(groups[MAIN], given.page.parent / "images" / SHORT)
    for results in groups.values():
        draw = draw_curves if results.group == MAIN else draw_gains
        draw(results, given.page.parent / "images" / picture_of(results))
        draw_study(results, given.page.parent / "images" / curves_of(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
