"""What the branch gains by how long is trained: k-NN at every measured epoch, short trainings beside long."""

from __future__ import annotations

from cifar10_results import Results, at_epoch, change, rows_of, start_of

RUNS = (  # of each method the same branch, trained for longer and longer
    "choices-npidv2-seeds/at-once",
    "choices-npidv2-200/interclr",
    "main/npidv2-at-once",
    "choices-npidv2-seeds/start-50",
    "choices-npidv2-200/start-100",
    "study-mocov2/interclr",
    "choices-mocov2-200/interclr",
    "main/mocov2-interclr",
    "choices-byol-seeds/interclr",
    "choices-byol-200/interclr",
    "main/byol-interclr",
)


def lengths_section(groups: dict[str, Results]) -> list[str]:
    table = [row for run in RUNS if (row := _row(*run.split("/"), groups)) is not None]
    if not table:
        return []
    return [
        "## What is gained along the way",
        "",
        "k-NN with the branch minus without at the same epoch, in points: every seed where there are fewer than three,",
        "else mean ± standard error. The groups that are not main are measured on held-out images.",
        "",
        *rows_of(("group", "run", "epochs in all", "branch from", "gained by epoch"), table),
    ]


def _row(group: str, run: str, groups: dict[str, Results]) -> tuple[str, ...] | None:
    if group not in groups or run not in groups[group].runs:
        return None
    results = groups[group]
    one = next(iter(results.runs[run].values()))
    start, epochs = start_of(one), int(one["settings"]["schedule"]["epochs"])
    measured = sorted({row["epoch"] for row in one["epochs"] if "knn" in row and row["epoch"] > start})
    found = {epoch: [gain.value for gain in results.gains(run, at_epoch(epoch))] for epoch in measured}
    told = "; ".join(f"{epoch}: {change(values)}" for epoch, values in found.items() if values)
    return (group, run, str(epochs), str(start), told) if told else None
