"""Batches of a set that does not fit into memory, read when they are needed.

A streamed batch is decoded by one worker process, which lays it into one of a few slots of pinned shared memory. From
there it is copied to the GPU, one batch ahead and on a stream of its own, so that this process has next to nothing to
do for a batch and no copy stands between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from interclr import dist
from interclr.data.canvas import CANVAS_STEP, Canvas
from interclr.data.loader import Order
from interclr.data.reading import Unreadable, at_hand
from interclr.data.source import Source, UnreadableImage
from interclr.data.stream_plan import default_workers, plan
from interclr.data.to_device import pinned, to_gpu, to_host
from interclr.data.workers import Arrival, Batches, start_workers
from interclr.types import Images, UserError


class StreamLoader:
    """For a set that does not fit: worker processes decode ahead; one DataLoader serves the whole run.

    An unreadable image is replaced by the next readable one of its batch, so shapes never change and no image index
    shifts; it is counted and named. With ``fail`` it ends the run with its name instead.
    """

    def __init__(
        self, source: Source, order: Order, device: torch.device, workers: int | None = None, fail: bool = False
    ) -> None:
        self.source, self.order, self.device, self.fail = source, order, device, fail
        self.workers = default_workers() if workers is None else workers
        self.unreadable = Unreadable()
        self.report: Callable[[UnreadableImage], None] = lambda failure: None

    def iterate(self, first_step: int, last_step: int) -> Iterator[Images]:
        steps = _Steps(self.order, first_step, last_step)
        for images, failures in _stream(self.source, steps, self.device, self.workers, search=not self.fail):
            new = self.unreadable.add([UnreadableImage(name, reason) for name, reason in failures])
            if images is None or (failures and self.fail):
                name, reason = failures[0]
                what = "every image of a batch is unreadable" if images is None else "an image is unreadable"
                raise UserError(f"{what}: {name}: {reason} (find all with: interclr data check)")
            for failure in new:
                self.report(failure)
            yield images


def in_order(
    images: Canvas | Source,
    device: torch.device,
    batch: int,
    workers: int | None = None,
    unreadable: Unreadable | None = None,
) -> Iterator[Images]:
    """Every image once, in index order: to embed a whole set.

    An unreadable image is shown as the next one's pixels, and where a whole batch is unreadable as black, so that one
    broken folder does not end a run; ``unreadable`` collects their names.
    """
    parts = torch.arange(len(images)).split(batch)
    images = images if isinstance(images, Canvas) else at_hand(images)
    if isinstance(images, Canvas):
        for part in parts:
            yield images.take(part.to(images.pixels.device)).to(device)
        return
    workers = default_workers() if workers is None else workers
    asked = [part.tolist() for part in parts]
    for part, (found, failures) in zip(parts, _stream(images, asked, device, workers), strict=True):
        if unreadable is not None:
            unreadable.add([UnreadableImage(name, reason) for name, reason in failures])
        if found is None:
            found = Images(part, torch.zeros(len(part), 3, CANVAS_STEP, CANVAS_STEP, dtype=torch.uint8))
        own = replace(found, index=part, label=None if images.labels is None else images.labels[part])
        yield (pinned(own) if device.type == "cuda" else own).to(device)


class _Steps:
    def __init__(self, order: Order, first: int, last: int) -> None:
        self.order, self.steps, self.rows = order, range(first, last), dist.slice_of_rank(order.batch)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            rows: list[int] = self.order.indices(step)[self.rows].tolist()
            yield rows


def _stream(
    source: Source, batches: Batches, device: torch.device, workers: int, search: bool = False
) -> Iterator[Arrival]:
    """Every batch on ``device``. With ``search`` a wholly unreadable batch takes images from elsewhere in the set."""
    workers, slots = plan(source, batches, device, workers)
    cuda = device.type == "cuda"
    # Workers start before memory is pinned, which concerns this process only.
    arrivals = start_workers(source, batches, workers, slots, search, pin=cuda and slots is None)
    try:
        if slots is not None and cuda:
            slots.pin(device)
        yield from to_gpu(arrivals, slots, device) if cuda else to_host(arrivals, slots, device)
    finally:
        if slots is not None:
            if cuda:
                torch.cuda.synchronize(device)  # copies under way still read their slots
            slots.free(len(batches))  # a worker that waits for one is to end instead
            slots.unpin(device)
