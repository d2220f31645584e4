"""How many workers and slots a streamed set gets: as many as help, as far as memory allows."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from interclr.data.canvas import CANVAS_STEP, round_up
from interclr.data.reading import read_or_reason
from interclr.data.slots import Slots
from interclr.data.source import Source
from interclr.data.workers import Batches

SLOTS, SLOTS_LEAST = 6, 4  # batches that lie ready: two of them are being copied, the others bridge a slow batch
SLOTS_BYTES = 4 << 30  # fewer slots where they would take more than this
WORKERS_SHARE = 0.25  # of the host's memory, for the one decoded batch in each worker: fewer where they would take more
PROBES, PROBE_MARGIN = 32, 1.25  # images looked at to tell how large a slot must be; the largest is hardly among them


def default_workers() -> int:
    """Every core, shared by the ranks on this machine, and at most 16."""
    return max(1, min((os.cpu_count() or 1) // ranks_on_this_machine(), 16))


def plan(source: Source, batches: Batches, device: torch.device, workers: int) -> tuple[int, Slots | None]:
    """How many workers there is memory and work for, and the slots they lay their batches into."""
    largest = len(next(iter(batches), ()))
    if workers == 0 or largest == 0:
        return workers, None
    size = largest * 3 * side_of_slots(source) ** 2
    limit = int(WORKERS_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // ranks_on_this_machine()
    workers = max(1, min(workers, len(batches), limit // size))
    if device.type not in ("cpu", "cuda"):  # elsewhere we cannot tell when a copy is over
        return workers, None
    try:
        return workers, Slots(min(len(batches), max(SLOTS_LEAST, min(SLOTS, SLOTS_BYTES // size))), size)
    except RuntimeError:  # too little shared memory: each batch comes in memory of its own
        return workers, None


def side_of_slots(source: Source) -> int:
    """The side of a canvas for all but unusually large images. A batch that has one comes in memory of its own."""
    rows = {round(i * (len(source) - 1) / (PROBES - 1)) for i in range(PROBES)}
    shapes = [image.shape[1:] for row in rows if isinstance(image := read_or_reason(source, row), Tensor)]
    largest = max((side for shape in shapes for side in shape), default=CANVAS_STEP)
    inner: Any = source
    while hasattr(inner, "source"):  # a subset
        inner = inner.source
    bound = getattr(inner, "max_side", None) or math.inf
    return round_up(max(largest, math.ceil(min(largest * PROBE_MARGIN, bound))), CANVAS_STEP)


def ranks_on_this_machine() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
