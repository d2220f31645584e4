"""The sections of docs/results.md on the runs of the main group: levels, few labels, what the pairs share, curves."""

from __future__ import annotations

from cifar10_plots import picture_of
from cifar10_record import Record
from cifar10_results import INTER, KNN, LINEAR, Results, begins_as, change, figure, protocol, rows_of

CONTEXT = (
    # method, lightly's k-NN: batch 128 for 200 epochs, batch 512 for 800; solo-learn's linear probe: 1,000 epochs
    ("MoCo v2", 83.8, 89.9, 92.94),
    ("BYOL", 86.9, 91.0, 92.58),
)


def levels(results: Results) -> list[str]:
    of_clusters = {
        name: figure(name.replace(" ", "_")) for name in ("purity", "positives right", "negatives wrong", "uniformity")
    }
    table = [
        (
            *(run, str(len(by_seed)), results.cell(run, KNN), results.cell(run, LINEAR)),
            *(results.cell(run, measure) for measure in of_clusters.values()),
        )
        for run, by_seed in results.runs.items()
    ]
    return [
        *rows_of(("run", "seeds", "k-NN", "linear", *of_clusters), table),
        "Linear: top-1 in percent of a linear probe on frozen features; stage and learning rate are chosen on a tenth",
        "of the training images.",
        "",
        *_parents(results),
        *_context(),
    ]


SHARED = {  # what a run with a branch has in common with the plain run of its seed
    "continues": "continue the plain run of their seed: the pairs share its first half.",
    "as before": "continue the plain run's first half trained again for its checkpoint, which came out as before, "
    "epoch for epoch: the pairs share it.",
    "otherwise": "continue the plain run's first half trained again for its checkpoint, which came out otherwise "
    "(other settings or another commit): the pairs share their seed only, and a difference has the noise of two whole "
    "runs in it.",
    "from the beginning": "are trained from the beginning: the pairs share their seed only, with the same noise.",
}


def _parents(results: Results) -> list[str]:
    """What the runs of each pair share."""
    told: dict[str, list[str]] = {}
    for run in results.pairs:
        kinds: dict[str, list[str]] = {}
        for seed, record in results.runs[run].items():
            kinds.setdefault(_shared(record, results.runs), []).append(str(seed))
        for kind, seeds in kinds.items():
            told.setdefault(kind, []).append(f"{run} (seed {', '.join(seeds)})")
    return [line for kind, text in SHARED.items() if kind in told for line in (f"{', '.join(told[kind])} {text}", "")]


def _shared(child: Record, runs: dict[str, dict[int, Record]]) -> str:
    """A parent that was trained again may have come out as before, or not."""
    start = child["from"]
    if start is None:
        return "from the beginning"
    if not start.get("again"):
        return "continues"
    parent = runs.get(start["run"], {}).get(child["seed"])
    return "as before" if parent is not None and begins_as(child, parent) else "otherwise"


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


def low_labels(results: Results) -> list[str]:
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
        "images; beside them the mean average precision over all numbers of images. Shares of the training set: one",
        "draw each, the whole network fine-tuned for 20 epochs, in smaller batches where a share has few images. The",
        "draws are the same for all runs and seeds: ± is what trainings differ by, not what other images would give.",
        "Differences are InterCLR minus plain ± standard error.",
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


def curves(results: Results) -> list[str]:
    return [
        f"![k-NN over the epochs, and what is gained](images/{picture_of(results)})",
        "",
        "Above: k-NN, means over seeds with bands from the lowest to the highest. Below: what is gained seed by seed,",
        "means with bands of one standard error; a dotted line is where a late branch begins. No setting was chosen by",
        "these curves, but they suggested what to try next on held-out images.",
        "",
    ]
