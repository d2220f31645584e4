"""Gather all a report shows, as plain values for JSON."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interclr.bank import MemoryBank
from interclr.config import DataConfig, Settings, dump
from interclr.data.builtin import images_of_a_run
from interclr.data.copies import Pairs, near_copies
from interclr.data.hold_out import split_off
from interclr.data.source import Source, UnreadableImage
from interclr.data.subset import readable_part
from interclr.engine.dataset import median_side, open_training_source
from interclr.labels import clustered_bank
from interclr.report import findings
from interclr.report.embedding_map import flatten
from interclr.report.gallery import Gallery, read_gallery
from interclr.report.history import commands, curves, describe, headline, title
from interclr.report.thumbnails import SINGLE_SIDE, data_uri, sheets, side_for, square
from interclr.run import checkpoint
from interclr.run.folder import Run, load
from interclr.screen import Screen
from interclr.types import UserError

SAMPLE_SEED = 0
Content = dict[str, Any]


@dataclass
class Clustered:
    """A memory bank with clusters, and which image of the training set each of its entries is.

    The page shows k-means clusters of the features it maps and compares by. The run's own bank is made of random views,
    so even two copies of a picture may lie in different clusters: training averages over that, a person cannot. It is
    what negatives are drawn from, and shown there.
    """

    bank: MemoryBank
    rows: list[int]


def collect(folder: Path, points: int, device: torch.device, screen: Screen, data: str | None = None) -> Content:
    """``data`` is where the images lie, if not where the run had them."""
    run = Run(folder)
    settings, result = run.settings, run.result
    records = run.metrics if (folder / "metrics.jsonl").is_file() else []
    notes: list[str] = []
    state: checkpoint.State | None = None
    try:
        found = checkpoint.load_latest(folder / "checkpoint")
        state = None if found is None else found[0]
    except UserError as error:  # all are damaged; the finished backbone may still be there
        notes.append(str(error))
    if not run.finished:
        step = f"its checkpoint at step {state['step']:,}" if state is not None else "no checkpoint yet"
        notes.append(f"This run is not finished: the page shows {step}.")
    if result.get("unreadable"):
        notes.append(f"{len(result['unreadable']):,} images could not be read in training: result.json names them.")
    images = None
    try:
        now = settings.model_copy(update={"data": settings.data.at(data)})
        images = _images(folder, now, state, points, device, screen, notes)
    except UserError as error:
        if data is not None:  # asked for
            raise
        notes.append(f"The images cannot be shown: {error}")
        screen.warn(f"the report has no images: {error}")
    count = result.get("images", None if images is None else images["total"])
    return {
        "title": title(settings, str(result.get("data", settings.data.source))),
        "subtitle": describe(settings, count),
        "notes": notes,
        "figures": headline(settings, state, result, records),
        "curves": curves(records),
        "images": images,
        "config": dump(settings),
        "commands": commands(folder.resolve(), state, result),
        "environment": {
            key: str(result[key])
            for key in ("machine", "torch", "torchvision", "python", "commit")
            if result.get(key) is not None
        },
        "version": version("interclr"),
    }


def training_source(run: Run, config: DataConfig, state: checkpoint.State | None) -> tuple[Source, bool]:
    """The images as the run numbered them, and whether they are still those its checkpoint was trained on."""
    with images_of_a_run():
        source: Source = open_training_source(config)
    if config.hold_out:
        source, _ = split_off(source, config.hold_out)
    if state is None or state["data"] == source.fingerprint():
        return source, True
    readable = readable_part(source, run.unreadable(state))  # all that a run in memory has
    same = state["data"] == readable.fingerprint()
    return readable if same else source, same


def _images(
    folder: Path,
    settings: Settings,
    state: checkpoint.State | None,
    points: int,
    device: torch.device,
    screen: Screen,
    notes: list[str],
) -> Content:
    source, same = training_source(Run(folder), settings.data, state)
    if not same:
        notes.append("The data have changed since the run: the page shows the images as they are now.")
    total = len(source)
    chosen = sampled(total, points)
    if total > points:
        notes.append(f"{points:,} of {total:,} images, drawn at random, are compared and shown on the map.")
    own = _own_bank(settings, state, source) if same else None
    labels = source.labels if source.labels is not None and bool((source.labels >= 0).any()) else None
    fraction = getattr(settings.inter.sampler, "pool_fraction", 0.1) if settings.inter is not None else 0.1
    negatives = None
    if own is not None:  # the whole bank is at hand, so look at all of it and read what is to be shown
        negatives = _negatives(own, labels, chosen, fraction)
    rows = sorted({*chosen, *_rows_of(negatives)})
    gallery = open_gallery(folder, source, rows, settings, device, screen)
    if gallery.unreadable:
        notes.append(f"{gallery.unreadable} images could not be read and are left out.")
    clustered = Clustered(clustered_bank(gallery.features), gallery.rows)
    if own is None:
        negatives = _negatives(clustered, labels, gallery.rows, fraction)
    content = _content(gallery, clustered, negatives, set(chosen), total, screen)
    return content | {"ownBank": own is not None}


def sampled(total: int, points: int, seed: int = SAMPLE_SEED) -> list[int]:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:points].sort().values.tolist()


def open_gallery(
    folder: Path, source: Source, rows: list[int], settings: Settings, device: torch.device, screen: Screen
) -> Gallery:
    """Images ``rows`` as the run in ``folder`` sees them; an error where there is nothing to compare."""
    side = min(side_for(len(rows)), median_side(source))
    gallery = read_gallery(source, rows, load(folder), settings, side, device, screen)
    if len(gallery) < 2:
        raise UserError(f"{len(gallery)} of {len(rows)} images could be read")
    if not bool(gallery.features.isfinite().all()):
        raise UserError("the features of the network are NaN or infinite: training has diverged")
    return gallery


def _own_bank(settings: Settings, state: checkpoint.State | None, source: Source) -> Clustered | None:
    """The memory bank of the checkpoint, where the inter branch has run and it is of these images."""
    if settings.inter is None or state is None or not state["clusters_started"]:
        return None
    features, labels = (state["learner"].get(f"bank.{name}") for name in ("features", "labels"))
    if features is None or labels is None or len(labels) != len(source) or bool((labels < 0).any()):
        return None
    return Clustered(MemoryBank.of_state(state["learner"]), list(range(len(source))))


def _negatives(clustered: Clustered, labels: Tensor | None, chosen: list[int], fraction: float) -> Content | None:
    """What is drawn for a few anchors of ``chosen``, by rows of the training set."""
    bank, rows = clustered.bank, clustered.rows
    own_labels = None if labels is None else labels[torch.tensor(rows)]
    place = {row: position for position, row in enumerate(rows)}
    candidates = None if labels is None else labels[torch.tensor(chosen)]
    picked = findings.spread_over_classes(findings.ANCHORS, candidates, len(chosen), 2)
    negatives = findings.negatives(bank, own_labels, [place[chosen[position]] for position in picked], fraction)
    for anchor in [] if negatives is None else negatives["anchors"]:
        anchor["image"], anchor["positive"] = rows[anchor["image"]], rows[anchor["positive"]]
        anchor["draws"] = {name: [[rows[i], c] for i, c in drawn] for name, drawn in anchor["draws"].items()}
    return negatives


def _rows_of(negatives: Content | None) -> set[int]:
    """All images shown there."""
    used: set[int] = set()
    for anchor in [] if negatives is None else negatives["anchors"]:
        used.update([anchor["image"], anchor["positive"], *(i for drawn in anchor["draws"].values() for i, _ in drawn)])
    return used


def _content(
    gallery: Gallery, clustered: Clustered, negatives: Content | None, chosen: set[int], total: int, screen: Screen
) -> Content:
    """Everything by position in the gallery. ``chosen`` are the rows on the map; others are shown elsewhere."""
    position = {row: i for i, row in enumerate(gallery.rows)}
    labels = gallery.labels()
    mapped = [i for i, row in enumerate(gallery.rows) if row in chosen]
    layout, method = flatten(gallery.features[mapped].numpy(), screen)
    with screen.working("comparing images"):
        cosine, nearest = findings.neighbours(gallery.features)
        tiny = torch.stack(gallery.tiny)
        alike = findings.alike_pairs(cosine, nearest, tiny)
    with screen.working("comparing pictures") as progress:
        near = near_copies(tiny, gallery.digests, progress)
    content: Content = {
        "total": total,
        "count": len(gallery),
        "names": gallery.names(),
        "classes": list(gallery.source.classes or ()),
        "label": None if labels is None else packed(labels.numpy(), np.int32),
        "cluster": packed(clustered.bank.labels.numpy(), np.int32),
        "thumbnails": sheets(gallery.squares, gallery.side),
        "map": {"method": method, "image": packed(mapped, np.int32), "position": packed(layout, np.float32)},
        "neighbours": {
            "k": nearest.shape[1],
            "image": packed(nearest.numpy(), np.int32),
            "cosine": packed(cosine.numpy(), np.float32),
        },
        "queries": findings.spread_over_classes(findings.QUERIES, labels, len(gallery), 1),
        "exact": findings.exact_duplicates(gallery.digests),
        "near": findings.closest(near),
        "alike": findings.closest(alike),
        "outliers": findings.outliers(cosine),
        "clusters": findings.clusters(clustered.bank, labels),
        "negatives": _positions_of_negatives(negatives, position),
    }
    content["large"] = _large(gallery, content, nearest)
    content["duplicates"] = _duplicates(gallery, near, alike)
    return content


def _duplicates(gallery: Gallery, near: Pairs, alike: Pairs) -> list[tuple[str, str, str, str]]:
    """All pairs, for a table beside the page: copies, near copies, and what the network finds alike."""
    names = [gallery.source.name_of(row) for row in gallery.rows]  # to find the files by, whatever bytes they have
    rows = [
        ("exact", "1.0000", names[first], names[copy])
        for first, *copies in findings.equal_groups(gallery.digests)
        for copy in copies
    ]
    for kind, pairs in (("near", near), ("alike", alike)):
        rows += [(kind, f"{value:.4f}", names[one], names[other]) for (one, other), value in pairs.items()]
    return rows


def _positions_of_negatives(negatives: Content | None, position: dict[int, int]) -> Content | None:
    """An image that could not be read is left out, and with it an anchor."""
    if negatives is None:
        return None
    negatives["anchors"] = [anchor for anchor in negatives["anchors"] if anchor["image"] in position]
    for anchor in negatives["anchors"]:
        anchor["image"], anchor["positive"] = position[anchor["image"]], position.get(anchor["positive"])
        for name, drawn in anchor["draws"].items():
            anchor["draws"][name] = [[position[row], value] for row, value in drawn if row in position]
    return negatives


def _large(gallery: Gallery, content: Content, nearest: Tensor) -> dict[str, str]:
    """Larger pictures of the images people look at closely, read again; none where thumbnails are as large."""
    if gallery.side >= min(SINGLE_SIDE, median_side(gallery.source)):
        return {}
    wanted: set[int] = {*content["queries"], *(entry["image"] for entry in content["outliers"])}
    wanted.update(nearest[content["queries"]].flatten().tolist())
    wanted.update(i for name in ("near", "alike") for pair in content[name]["shown"] for i in pair["images"])
    wanted.update(i for group in content["exact"]["shown"] for i in group["images"])
    wanted.update(i for entry in content["clusters"]["shown"].values() for i in entry["members"])
    for anchor in (content["negatives"] or {"anchors": []})["anchors"]:
        wanted.update(i for i in (anchor["image"], anchor["positive"]) if i is not None)
        wanted.update(i for drawn in anchor["draws"].values() for i, _ in drawn)
    pictures: dict[str, str] = {}
    for i in sorted(wanted):
        try:
            pixels = gallery.source.read(gallery.rows[i])
        except UnreadableImage:
            continue
        pictures[str(i)] = data_uri(square(pixels, min(SINGLE_SIDE, *pixels.shape[1:])))
    return pictures


def packed(values: Any, kind: Any) -> str:
    """Numbers as base64 of little-endian bytes: what a typed array in the page is made from."""
    array = np.ascontiguousarray(values, dtype=np.dtype(kind).newbyteorder("<"))
    return base64.b64encode(array.tobytes()).decode()
