"""Writes docs/results.md, docs/results-choices.md, their plots and README.md's figures from the records.

python benchmarks/cifar10_page.py            rewrite the pages and their plots
python benchmarks/cifar10_page.py --check    fail if the pages are not what the records say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cifar10_about import filled
from cifar10_asked import asked_section, for_readme, short_section
from cifar10_groups import group_table, settings_section
from cifar10_lengths import lengths_section
from cifar10_main import curves, levels, low_labels
from cifar10_plan import PLAN, RECORDS, ROOT, Group, read_plan
from cifar10_plots import SHORT, curves_of, draw_curves, draw_gains, draw_short, picture_of, with_interval
from cifar10_record import Record
from cifar10_results import Results, arranged, completed, either, rows_of
from cifar10_runs import again_section, cost_section, failed_section, unmeasured_section
from cifar10_study import draw_study

from interclr.config import CARRIED_OUT
from interclr.types import UserError

MAIN = "main"
PAGE, CHOICES = ROOT / "docs" / "results.md", "results-choices.md"
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
        others = differing([completed(record) for record in by_seed.values()])
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
    """What the plan says of a group."""
    if group is None or not group.about:
        return []
    return [*filled(group.about, results.group, groups).strip().splitlines(), ""]


def planned(results: Results | None, group: Group) -> str:
    """The runs of a group that are still to be made."""
    told = []
    for name in group.runs:
        missing = [str(seed) for seed in group.seeds if results is None or seed not in results.runs.get(name, {})]
        which = "" if len(missing) == len(group.seeds) else f" (seed {', '.join(missing)})"
        told += [f"{name}{which}"] if missing else []
    return ", ".join(told)


def planned_section(groups: dict[str, Results], plan: dict[str, Group]) -> list[str]:
    table = [
        (name, told)
        for name, group in plan.items()
        if not group.superseded and (told := planned(groups.get(name), group))
    ]
    if not table:
        return []
    return [
        "## Planned, and without a finished record yet",
        "",
        "All seeds of a run where none is named.",
        "",
        *rows_of(("group", "runs"), table),
    ]


def main_sections(results: Results, group: Group | None, groups: dict[str, Results]) -> list[str]:
    lines = ["## With and without the inter branch", "", *conditions(results), *levels(results)]
    lines += about(results, group, groups)
    lines += low_labels(results)
    lines += lengths_section(groups)
    return lines + curves(results)


def group_section(results: Results, group: Group | None, groups: dict[str, Results]) -> list[str]:
    return [f"## {results.group}", "", *about(results, group, groups), *conditions(results), *group_table(results)]


# The page.


def read_records(folder: Path) -> list[Record]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("**/*.json"))]


def without_apart(record: Record, plan: dict[str, Group]) -> None:
    """Without the figures that the plan says are not to be compared with others'."""
    group = plan.get(record["group"])
    for name in group.apart.get(f"{record['name']}@{record['seed']}", ()) if group else ():
        record["figures"]["evaluate"].pop(name, None)


REPEAT = [
    "## How to repeat this",
    "",
    "`benchmarks/cifar10.yaml` lists the runs; `results/cifar10/GROUP/RUN-sSEED.json` is the record of one, with its",
    "commit and its command. To train and measure one again beside its record (on a GPU; a run that continues another",
    "comes with that one):",
    "",
    "    interclr data get cifar10",
    "    git checkout COMMIT",
    "    python benchmarks/cifar10.py main mocov2-interclr --seeds 2 --out again --work again-runs",
    "",
    "Without `--out`, runs that have a finished record are not made again. To make those that have none, or more",
    "seeds of some, and the pages anew:",
    "",
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
    if MAIN in groups:
        lines += ["## In short", "", *short_section(groups[MAIN])]
        if any(with_interval(groups[MAIN])):
            lines += [f"![What the branch brings](images/{SHORT})", ""]
        told = plan[MAIN].short if MAIN in plan else ""
        lines += [*filled(told, MAIN, groups).strip().splitlines(), ""] if told else []
    lines += asked_section(groups, MAIN) if groups else []
    shown = [results for results in groups.values() if page_of(results.group, plan) == "results"]
    for results in shown:
        section = main_sections if results.group == MAIN else group_section
        lines += section(results, plan.get(results.group), groups)
    timed = [results for results in groups.values() if page_of(results.group, plan) in ("results", "time")]
    lines += cost_section(timed) if timed else []
    lines += planned_section(groups, plan)
    lines += unmeasured_section(records)
    lines += failed_section(records, plan)
    lines += ["## Words", "", *(f"- **{word}**: {meaning}." for word, meaning in WORDS), "", *REPEAT] if groups else []
    return "\n".join(lines).rstrip() + "\n"


def in_short(groups: dict[str, Results], plan: dict[str, Group]) -> list[str]:
    """What all the choices came to, as the plan has it."""
    if MAIN not in plan or not plan[MAIN].choices:
        return []
    return ["## In short", "", *filled(plan[MAIN].choices, MAIN, groups).strip().splitlines(), ""]


def choices_page(groups: dict[str, Results], plan: dict[str, Group]) -> str:
    shown = [results for results in groups.values() if page_of(results.group, plan) == "choices"]
    shown.sort(key=lambda results: -max(record["settings"]["schedule"]["epochs"] for record in results.records))
    before = [results for results in shown if results.group in plan and plan[results.group].superseded]
    lines = [
        "# How the CIFAR-10 settings were chosen",
        "",
        f"{WRITTEN}; the results themselves, and what the words mean:",
        "[results.md](results.md#words).",
        "Settings are compared here on images held out of the training set, most with one seed or two: this says where",
        "to look, and rarely what is so. What the branch gained is told over the same run without it. The longest",
        "trainings come first.",
        "",
        *in_short(groups, plan),
        *settings_section(shown),
        *again_section([record for results in groups.values() for record in results.records]),
    ]
    for results in [*(each for each in shown if each not in before), *before]:
        lines += group_section(results, plan.get(results.group), groups)
    return "\n".join(lines).rstrip() + "\n"


def page_of(group: str, plan: dict[str, Group]) -> str:
    return plan[group].page if group in plan else "choices"


README = ROOT / "README.md"
BEGIN, END = "<!-- written by benchmarks/cifar10_page.py -->\n", "<!-- end -->\n"


def in_readme(text: str, groups: dict[str, Results]) -> str:
    """README.md with its table of figures made anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"README.md has no place for figures, between {BEGIN.strip()} and {END.strip()}")
    lines = for_readme(groups[MAIN]) if MAIN in groups else []
    return before + begin + "".join(f"{line}\n" for line in lines) + end + after


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the pages on CIFAR-10 from the records of its runs.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the pages are others")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="the other one, and images/, go beside it; README.md only with this one"
    )
    parser.add_argument("--plan", type=Path, default=PLAN)
    given = parser.parse_args(words)
    try:
        plan, records = read_plan(given.plan), read_records(given.records)
        whole = [record for record in records if "error" not in record and not record.get("unmeasured")]
        for record in whole:
            without_apart(record, plan)
        groups = {results.group: results for results in arranged(whole, plan)}
        texts = {
            given.page: results_page(groups, records, plan),
            given.page.parent / CHOICES: choices_page(groups, plan),
        }
        if given.page == PAGE:
            texts[README] = in_readme(README.read_text(), groups)
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
    for results in (each for each in groups.values() if page_of(each.group, plan) != "time"):
        draw = draw_curves if results.group == MAIN else draw_gains
        draw(results, given.page.parent / "images" / picture_of(results))
        draw_study(results, given.page.parent / "images" / curves_of(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
