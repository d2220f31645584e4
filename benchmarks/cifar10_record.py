"""The record of a run, results/cifar10/GROUP/NAME-sSEED.json: what is read from the run's folder for it, its text."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import yaml
from cifar10_plan import Job

from interclr.config import load_settings
from interclr.evaluate.requested import Request
from interclr.evaluate.session import place_of

NOT_TERMS = ("step", "epoch", "event", "lr", "images_per_second", "data_wait", "unreadable")
Record = dict[str, Any]


def settings_of(job: Job, folder: Path) -> Record:
    """The whole tree as carried out, or as far as it was known, without this machine's paths."""
    resolved = folder / "resolved.yaml"
    if resolved.exists():
        tree: Record = yaml.safe_load(resolved.read_text())
    else:
        tree = load_settings(job.entry.recipe, [*job.overrides, f"seed={job.seed}"]).model_dump(mode="json")
    gone = {"root"} | ({"source"} if Path(tree["data"]["source"]).is_absolute() else set())
    return tree | {"data": {key: value for key, value in tree["data"].items() if key not in gone}}


def figures_of(folder: Path, result: Record, metrics: list[Record], held_out: bool) -> Record:
    """The last epoch's figures, and under ``evaluate`` those of each protocol."""
    last = [line for line in metrics if line.get("event") == "monitor"][-1]
    names = ["knn_k", "knn_temperature", "knn_pixels", "knn_before", *(name for name in last if name not in NOT_TERMS)]
    figures: Record = {name: result[name] for name in names if name in result}
    measured: Record = {}
    for path in sorted(place_of(Request(str(folder), held_out=held_out)).glob("*/result.json")):
        found = json.loads(path.read_text())
        told = {key: found[key] for key in ("preset", "selected_on", "best_stage") if key in found}
        measured[path.parent.name] = {key: short(value) for key, value in found["figures"].items()} | told
        if "draws" in found:  # low-shot: how much of a difference between two runs hangs on the images drawn
            by_size = [row["mAP"] for row in found["draws"]]
            measured[path.parent.name]["mAP_of_draws"] = [
                short(statistics.mean(each)) for each in zip(*by_size, strict=True)
            ]
    return figures | ({"evaluate": measured} if measured else {})


def by_epoch(metrics: list[Record]) -> list[Record]:
    """For each epoch the mean of its logged loss terms, and the figures where they were measured."""
    epochs: dict[int, dict[str, list[float]]] = {}
    for line in metrics:
        row = epochs.setdefault(math.ceil(line["epoch"]), {})  # an interval counts for the epoch it ends in
        for name in line.keys() - set(NOT_TERMS):
            if math.isfinite(line[name]):
                row.setdefault(name, []).append(line[name])
    return [
        {"epoch": epoch, **{name: short(statistics.mean(row[name])) for name in sorted(row)}}
        for epoch, row in sorted(epochs.items())
        if row
    ]


def failures_of(record: Record | None) -> list[Record]:
    """All that went wrong with a run so far: a try that succeeds does not wipe it out."""
    if record is None:
        return []
    latest = [{key: record[key] for key in ("date", "commit", "error")}] if "error" in record else []
    return [*record.get("failed_before", []), *latest]


def failures_before(record: Record | None) -> list[Record]:
    """Those that stay when it is tried again: a run that was cut off has not failed, it goes on."""
    if record is None or not record.get("cut_off"):
        return failures_of(record)
    return list(record["failed_before"])


def so_far(metrics: list[Record], start: int) -> str | None:
    """Where a training is that has measured itself since epoch ``start``, and by what; None where it has not."""
    measured = [line for line in metrics if line.get("event") == "monitor" and line["epoch"] > start]
    if not measured:
        return None
    last = measured[-1]
    told = f", k-NN {last['knn']:.2f} % at epoch {last['epoch']:.0f}" if "knn" in last else ""
    return f"cut off at epoch {metrics[-1]['epoch']:.1f}{told}"


def says_more(record: Record | None, metrics: list[Record]) -> bool:
    """Whether a record is of a finished run, or of one that was cut off later than these metrics end."""
    if record is None:
        return False
    if "error" not in record:
        return True
    return bool(record.get("cut_off")) and record["epochs"][-1]["epoch"] > math.ceil(metrics[-1]["epoch"])


def short(value: float) -> float:
    return float(f"{value:.6g}")


def as_json(record: Record) -> str:
    """Indented, but with one line for each epoch."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["epochs"])
    last = {"epochs": []}
    whole = json.dumps({key: record[key] for key in record if key not in last} | last, indent=1, ensure_ascii=False)
    return whole.removesuffix("[]\n}") + f"[\n{rows}\n ]\n}}\n"


def line_of(record: Record) -> str:
    speed = record["images_per_second"]
    tail = f"{record['seconds']:.0f} s" + (f", {speed:,.0f} images/s" if speed else "")
    if "error" in record:
        ended = "not finished" if record.get("cut_off") else "FAILED"
        return f"{ended} after {tail}: {' '.join(record['error'].split())[-200:]}"
    knn = record["figures"].get("knn")
    missing = f"; to be measured: {', '.join(record['unmeasured'])}" if record.get("unmeasured") else ""
    return ("no labels" if knn is None else f"k-NN {knn:.2f} %") + f", {tail}{missing}"
