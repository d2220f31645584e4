"""From a source to pixels: a batch, or a whole set, with a note of every image that could not be read."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from interclr.data.canvas import CANVAS_STEP, Allocate, Canvas, fresh, on_canvas
from interclr.data.source import ArraySource, Source, UnreadableImage
from interclr.types import UserError

COPIED = 2**31  # bytes of a part of an array that are copied, at most; more are read by workers
Progress = Callable[[int, int], None]
Failures = list[tuple[str, str]]  # names and reasons
ReadBatch = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Failures]


@dataclass
class Unreadable:
    """Images that could not be read, by name with the reason. Each is counted once however often it is met."""

    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, failures: Sequence[UnreadableImage]) -> list[UnreadableImage]:
        """Remember ``failures`` and return those not met before."""
        new = [failure for failure in failures if failure.name not in self.reasons]
        self.reasons.update({failure.name: failure.reason for failure in new})
        return new

    @property
    def first(self) -> str:
        """One of them with its reason, for messages."""
        return next((f"{name}: {reason}" for name, reason in self.reasons.items()), "none")


def read_or_reason(source: Source, row: int) -> Tensor | UnreadableImage:
    try:
        return source.read(row)
    except UnreadableImage as failure:
        return failure.with_traceback(None)  # which would keep the callers' frames alive, and workers with them


def read_batch(source: Source, rows: list[int], allocate: Allocate = fresh) -> ReadBatch:
    """Index, pixels on a common canvas, sizes, labels, and what could not be read (replaced by the next image)."""
    images: list[Tensor | None] = []
    failures: Failures = []
    for row in rows:
        try:
            images.append(source.read(row))
        except UnreadableImage as failure:
            images.append(None)
            failures.append((failure.name, failure.reason))
    good = [i for i, image in enumerate(images) if image is not None]
    index = torch.tensor(rows)
    if not good:
        return index, None, None, None, failures
    following = [good[bisect_left(good, i) % len(good)] for i in range(len(rows))]  # after the last comes the first
    pixels, size = on_canvas([image for i in following if (image := images[i]) is not None], CANVAS_STEP, allocate)
    index = index[following]
    return index, pixels, size, None if source.labels is None else source.labels[index], failures


def read_all(
    source: Source, progress: Progress | None = None, unreadable: Unreadable | None = None
) -> tuple[Canvas, list[int]]:
    """Decode a whole set into memory. Returns it with the indices kept; unreadable images are left out and noted."""
    whole = source.whole()
    if whole is not None:
        return Canvas(whole, None, source.labels), list(range(len(source)))
    noted = unreadable if unreadable is not None else Unreadable()
    images: list[Tensor] = []
    kept: list[int] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # PIL decodes outside the interpreter lock
        for i, result in enumerate(pool.map(lambda row: _planes(read_or_reason(source, row)), range(len(source)))):
            if isinstance(result, UnreadableImage):
                noted.add([result])
            else:
                images.append(result)
                kept.append(i)
            if progress is not None:
                progress(i + 1, len(source))
    if not images:
        raise UserError(f"no image of {source.name} could be read (find out why with: interclr data check)")
    pixels, size = on_canvas(images)
    return Canvas(pixels, size, None if source.labels is None else source.labels[kept]), kept


def at_hand(source: Source) -> Canvas | Source:
    """Images that lie in memory already need no workers, which would take longer to start than most sets take."""
    each = source.bytes_each()
    if each is None or (each * len(source) > COPIED and not isinstance(source, ArraySource)):  # a part is a copy
        return source
    return read_all(source)[0]


def _planes(image: Tensor | UnreadableImage) -> Tensor | UnreadableImage:
    """Colour by colour in memory: worth it for what is looked at every epoch, since views on a CPU are made faster."""
    if isinstance(image, UnreadableImage):
        return image
    return torch.from_numpy(np.ascontiguousarray(image.numpy()))  # torch would wake a pool of its own in every thread
