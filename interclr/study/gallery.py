"""The paper's galleries: nearest neighbours of queries, and negatives by strategy. PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from interclr.bank import MemoryBank
from interclr.data.canvas import Canvas, on_canvas
from interclr.data.source import Source, UnreadableImage
from interclr.data.views import centre_crop
from interclr.engine.dataset import TrainingData
from interclr.evaluate.plots import draw_tile, figure
from interclr.health import false_negatives
from interclr.knn import nearest_rows
from interclr.labels import clustered_bank
from interclr.samplers import Sampler, every_strategy
from interclr.study.subjects import (
    CPU,
    Subject,
    check_runs,
    choose,
    names_of,
    open_run,
    state_of_run,
    training_data,
)
from interclr.types import Images, UserError

TILE = 96  # largest side of a picture, pixels
POOL_FRACTION = 0.1  # of a run whose sampler has none
GREEN, RED, GREY = "#1a9641", "#d7191c", "0.45"


def plot_retrieval(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    queries: int = 6,
    neighbours: int = 10,
    data: str | None = None,
    seed: int = 0,
    device: torch.device = CPU,
) -> None:
    """The nearest training images of some queries, one row for each run, with the cosine above each.

    A hit has a green frame, a miss a red one; without labels there are no frames. Queries are those the run's k-NN is
    measured on, or without labels training images, which are then not found themselves.
    """
    check_runs(runs)
    subjects = [open_run(run, device) for run in runs]
    held = training_data(subjects[0].settings, data)
    labels, bank = held.labels, held.images
    asked, truth, own = _queries(held, queries, seed)
    rows = torch.arange(len(bank)) if held.bank_rows is None else held.bank_rows
    found = []
    for subject in subjects:
        features = subject.embed(bank)
        cosine, near = nearest_rows(features[rows.to(features.device)], subject.embed(asked), neighbours + 1)
        found.append((cosine.cpu(), rows[near.cpu()]))
    names = names_of(subjects) if len(subjects) > 1 else [""]
    columns, lines = neighbours + 1, len(asked) * len(subjects)
    gap = 0.32
    with figure(Path(out), width=0.86 * columns + 0.4, height=0.86 * (1 + gap) * lines + 0.7) as (axes,):
        for query in range(len(asked)):
            for which, name in enumerate(names):
                y = (query * len(subjects) + which) * (1 + gap)
                draw_tile(axes, _picture(asked, query), 0, y, "query" if which == 0 else "")
                if name:
                    axes.text(-0.12, y + 0.5, name, rotation=90, ha="center", va="center", fontsize=6.5, color=GREY)
                cosine, near = found[which]
                pairs = [
                    (float(c), int(r))
                    for c, r in zip(cosine[query], near[query], strict=True)
                    if own is None or int(r) != int(own[query])
                ]
                for place, (similarity, row) in enumerate(pairs[:neighbours]):
                    frame = None
                    if truth is not None and labels is not None:
                        frame = GREEN if labels[row] == truth[query] else RED
                    draw_tile(axes, _picture(bank, row), place + 1.25, y, f"{similarity:.2f}", frame)
        _frame_gallery(axes, columns + 0.25, lines * (1 + gap))
        subject = subjects[0]
        title = f"nearest of {len(rows):,} images by cosine" + (f", {subject.folder.name}" if len(runs) == 1 else "")
        axes.set_title(title, loc="left", fontsize=10)


def _queries(held: TrainingData, count: int, seed: int) -> tuple[Canvas, Tensor | None, Tensor | None]:
    """Pictures, their labels, and their rows in the bank where they are in it; of different classes first."""
    pool = held.queries if held.queries is not None else held.images
    truth = pool.labels if held.queries is not None else None
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    if truth is not None:
        first = {int(truth[row]): row for row in reversed(order.tolist())}  # the first in order of each class
        leaders = set(first.values())
        order = torch.tensor(sorted(order.tolist(), key=lambda row: row not in leaders))
    rows = order[:count]
    picked = pool.rows(rows) if isinstance(pool, Canvas) else _canvas(pool, rows.tolist())
    return picked, None if truth is None else truth[rows], rows if held.queries is None else None


def _canvas(source: Source, rows: list[int]) -> Canvas:
    pixels, size = on_canvas([_read(source, row) for row in rows])
    return Canvas(pixels, size, None)


def plot_negatives(
    run: str | Path,
    out: str | Path,
    *,
    anchors: int = 3,
    negatives: int = 10,
    pool_fraction: float | None = None,
    seed: int = 0,
    device: torch.device = CPU,
) -> None:
    """What each strategy draws for some anchors from the run's memory bank, nearest first; false negatives framed red.

    A run without clusters (λ = 1) gets them here, by k-means of its backbone's features. ``pool_fraction`` is that of
    the run's sampler where it has one. With labels, each row says how much of what the strategy draws is false, over up
    to 512 anchors and as many negatives for all strategies.
    """
    subject = open_run(run, device)
    if pool_fraction is None:
        inter = subject.settings.inter
        pool_fraction = getattr(inter.sampler, "pool_fraction", POOL_FRACTION) if inter is not None else POOL_FRACTION
    held = training_data(subject.settings)
    bank, whose = _bank_of(subject, held)
    labels = held.labels
    strategies = every_strategy(negatives, pool_fraction)
    groups = choose(held.source, anchors, anchors if labels is None else 1, seed)
    chosen = torch.tensor([row for group in groups for row in group][:anchors])
    drawn = {name: _draw(sampler, bank, chosen, seed) for name, sampler in strategies.items()}
    false, counted = {}, min(negatives, *(s.pool_size(bank.size - int(bank.counts.max())) for s in strategies.values()))
    if labels is not None and bool((labels >= 0).any()):
        counting = every_strategy(counted, pool_fraction)
        false = {name: _false_share(sampler, bank, labels, seed) for name, sampler in counting.items()}
    gap, lines = 0.3, len(chosen) * len(strategies)
    with figure(Path(out), width=0.86 * (negatives + 3), height=0.86 * (1 + gap) * lines + 0.6) as (axes,):
        for number, anchor in enumerate(chosen.tolist()):
            top = number * len(strategies) * (1 + gap) + 0.25 * number
            draw_tile(axes, _picture(held.images, anchor), 0, top, "anchor")
            for line, (name, rows) in enumerate(drawn.items()):
                y = top + line * (1 + gap)
                share = f"\n{100 * false[name]:.0f} % false" if name in false else ""
                axes.text(1.95, y + 0.5, name + share, ha="right", va="center", fontsize=9)
                cosines = (bank.features[rows[number].clamp_min(0)].float() @ bank.features[anchor].float()).tolist()
                pairs = sorted(
                    ((c, int(r)) for c, r in zip(cosines, rows[number], strict=True) if int(r) >= 0), reverse=True
                )
                for place, (cosine, row) in enumerate(pairs):
                    wrong = labels is not None and int(labels[row]) == int(labels[anchor]) >= 0
                    draw_tile(axes, _picture(held.images, row), 2.1 + place, y, f"{cosine:.2f}", RED if wrong else None)
        _frame_gallery(axes, 2.1 + negatives, lines * (1 + gap) + 0.25 * (len(chosen) - 1))
        note = f", red: of the anchor's own class; shares of {counted} an anchor" if false else ""
        pools = f"semi-hard and semi-easy: of the nearest and farthest {100 * pool_fraction:g} %"
        title = f"negatives from {whose}, cosine to the anchor above each\n{pools}{note}"
        axes.set_title(title, loc="left", fontsize=10)


def _bank_of(subject: Subject, held: TrainingData) -> tuple[MemoryBank, str]:
    whole = state_of_run(subject.folder)
    if "bank.features" in whole["learner"] and whole["clusters_started"]:
        if whole["data"] != held.source.fingerprint():
            raise UserError(
                f"the data of {subject.folder} have changed since it was trained: its bank belongs to other images. "
                "Restore them"
            )
        return MemoryBank.of_state(whole["learner"]), f"the memory bank of {subject.folder.name}"
    bank = clustered_bank(subject.embed(held.images).cpu())
    return bank, f"the features of {subject.folder.name}, clustered here"


def _draw(sampler: Sampler, bank: MemoryBank, rows: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return sampler.draw(bank.features[rows].float(), rows, bank, generator).negative


def _false_share(sampler: Sampler, bank: MemoryBank, labels: Tensor, seed: int) -> float:
    known = (labels >= 0).nonzero().flatten()
    anchors = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))[:512]]
    return false_negatives(bank, sampler, labels, anchors, torch.Generator().manual_seed(seed)) or 0.0


def _read(source: Source, row: int) -> Tensor:
    """An image that cannot be read is shown as a grey square."""
    try:
        return source.read(row)
    except UnreadableImage:
        return torch.full((3, TILE, TILE), 128, dtype=torch.uint8)


def _picture(images: Canvas | Source, row: int) -> np.ndarray[Any, Any]:
    """The whole central square, (S, S, 3) in 0…1."""
    if isinstance(images, Canvas):
        one = images.take(torch.tensor([row]))
    else:
        one = Images(torch.tensor([row]), _read(images, row)[None])
    height, width = one.pixels.shape[2:] if one.size is None else one.size[0].tolist()
    square = centre_crop(one, min(TILE, height, width), (0, 0, 0), (1, 1, 1), resize_ratio=1)
    return square[0].permute(1, 2, 0).clamp(0, 1).cpu().numpy()


def _frame_gallery(axes: Axes, width: float, height: float) -> None:
    axes.set_xlim(-0.25, width + 0.05)
    axes.set_ylim(height - 0.25, -0.3)
    axes.set_aspect("equal")
    axes.axis("off")
