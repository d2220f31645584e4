"""What a run has logged, as headline figures and curves."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interclr.config import Settings
from interclr.run import checkpoint
from interclr.screen import duration

MOST = 600  # points of one curve
Records = list[dict[str, Any]]

# title, unit, what it tells, the logged names with what to call them
CURVES: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("Loss", "", "what is minimised", {"loss": "total", "intra_loss": "intra", "inter_loss": "inter"}),
    ("k-NN accuracy", "%", "higher is better", {"knn": "k-NN"}),
    ("Learning rate", "", "", {"lr": "learning rate"}),
    ("Effective rank", "", "RankMe; near 1 is collapse", {"rank_me": "rank"}),
    ("Uniformity", "", "0: collapse, −4: spread out", {"uniformity": "uniformity"}),
    ("Alignment", "", "0: two views agree, 2: unrelated", {"alignment": "alignment"}),
    (
        "Cluster sizes",
        "images",
        "",
        {"cluster_max": "largest", "cluster_median": "median", "cluster_min": "smallest"},
    ),
    ("Cluster balance", "", "1: all equal", {"cluster_entropy": "entropy", "labels_changed": "labels changed"}),
    ("Agreement with labels", "", "of the clusters", {"purity": "purity", "nmi": "NMI"}),
    (
        "Pairs across images",
        "",
        "share of the anchor's class",
        {"positives_right": "positives", "negatives_wrong": "negatives"},
    ),
    ("Speed", "images/s", "", {"images_per_second": "training"}),
)


def curves(records: Records) -> list[dict[str, Any]]:
    """Every curve of which something has been logged; x is the epoch."""
    found = []
    start = next((record for record in records if record.get("event") == "start"), {})
    for title, unit, note, names in CURVES:
        series = []
        for key, name in names.items():
            points = [(record["epoch"], record[key]) for record in records if key in record and "epoch" in record]
            if key == "knn" and "knn_before" in start:
                points.insert(0, (0.0, start["knn_before"]))
            points = [(x, y) for x, y in points if _finite(x) and _finite(y)]
            if points:
                thin = _thinned(points)
                series.append({"name": name, "x": [_short(x) for x, _ in thin], "y": [_short(y) for _, y in thin]})
        if series:
            has_level = title == "k-NN accuracy" and "knn_pixels" in start  # large images have none
            level = {"name": "raw pixels", "y": _short(start["knn_pixels"])} if has_level else None
            found.append({"title": title, "unit": unit, "note": note, "series": series, "level": level})
    return found


def headline(settings: Settings, state: checkpoint.State | None, result: dict[str, Any], records: Records) -> Records:
    """The figures people ask for first, as (label, value, detail)."""
    latest = {key: value for record in records for key, value in record.items() if record.get("event") == "monitor"}
    measured = (state or {}).get("measured", {})
    figures = {key: value for key, value in {**measured, **latest, **result}.items() if _finite(value)}
    shown: Records = []

    def add(label: str, value: str, detail: str = "") -> None:
        shown.append({"label": label, "value": value, "detail": detail})

    if "knn" in figures:
        before = f"{figures['knn_before']:.1f} % before" if "knn_before" in figures else ""
        pixels = f"{figures['knn_pixels']:.1f} % raw pixels" if "knn_pixels" in figures else ""
        guessing = f"{figures['knn_guessing']:.1f} % always the commonest class" if "knn_guessing" in figures else ""
        add("k-NN accuracy", f"{figures['knn']:.1f} %", ", ".join(filter(None, (before, pixels, guessing))))
    if "purity" in figures:
        add("Cluster purity", f"{100 * figures['purity']:.0f} %", f"NMI {figures['nmi']:.2f}")
    if "rank_me" in figures:
        add("Effective rank", f"{figures['rank_me']:.1f}", f"uniformity {figures['uniformity']:.2f}".replace("-", "−"))
    if "cluster_median" in figures:
        clusters = settings.inter.clusters if settings.inter is not None else "?"
        sizes = f"{figures['cluster_min']:.0f} to {figures['cluster_max']:.0f} images each"
        add("Clusters in training", f"{clusters}", f"{sizes}, in the memory bank")
    logged = [record["epoch"] for record in records if "epoch" in record]
    epochs = settings.schedule.epochs
    if result.get("finished"):
        add("Epochs", f"{epochs}", f"{result['steps']:,} steps of {settings.data.batch} images")
    else:
        add("Epochs", f"{max(logged, default=0):.3g} of {epochs}", "unfinished")
    seconds = result.get("seconds", (state or {}).get("seconds"))
    if isinstance(seconds, int | float):
        add("Training time", duration(float(seconds)), str(result.get("machine", "")))
    return shown


def title(settings: Settings, data: str) -> str:
    branch = "" if settings.branch is None else " + InterCLR"
    return f"{settings.method.title or settings.method.name}{branch} on {data}"


def describe(settings: Settings, images: int | None) -> str:
    """The run in a line."""
    parts = [f"{settings.model.backbone}, views of {settings.data.image_size} pixels"]
    parts += [] if images is None else [f"{images:,} images"]
    parts += [] if settings.inter is None else [f"λ = {settings.inter.intra_weight:g}"]
    return ", ".join([*parts, f"seed {settings.seed}"])


def commands(folder: Path, state: checkpoint.State | None, result: dict[str, Any]) -> Records:
    """How to make this run again: from the settings as they were carried out, where all of it had them, and as it was
    typed. Runs of before do not tell whether something was changed on the way, nor how many processes they had."""
    told = {**(state or {}), **result}
    typed = [result["command"], *result.get("continued_by", [])] if "command" in result else told.get("commands", [])
    started, shown, changes = "As it was started", [], told.get("changes")
    if changes:
        started += f"; continued with other settings ({'; '.join(changes)}), so no single command repeats it"
    else:
        several = ["torchrun", "--nproc-per-node", str(told.get("processes")), "-m", "interclr.cli"]
        words = several if told.get("processes", 1) > 1 else ["interclr"]
        again = shlex.join([*words, "pretrain", str(folder / "resolved.yaml"), "--out", f"{folder}-again"])
        exactly = "" if changes is None else " exactly"
        shown.append({"label": f"Repeat this run{exactly}, from its resolved settings", "text": again})
    labels = (started, *["Then continued by"] * len(typed))
    return shown + [{"label": label, "text": text} for label, text in zip(labels, typed, strict=False) if text]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``MOST`` points: means of equal stretches, with the first and the last as they are."""
    if len(points) <= MOST:
        return list(points)
    inner, size = points[1:-1], MOST - 2
    parts = [inner[i * len(inner) // size : (i + 1) * len(inner) // size] for i in range(size)]
    means = [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
    return [points[0], *means, points[-1]]


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: float) -> float:
    return float(f"{value:.6g}")
