"""Batches as a function of the step, for a set that is resident in memory; ``stream.py`` serves those that are not.

The order of epoch e is a permutation seeded by (seed, e), so a loader needs no state: resuming means asking for the
next step. Every rank computes the same order and takes its own rows of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from interclr import dist
from interclr.data.canvas import Canvas
from interclr.data.reading import Unreadable
from interclr.types import Images


class Order:
    """Which images make up which step. Epochs drop the incomplete last batch; another permutation drops others."""

    def __init__(self, count: int, batch: int, seed: int) -> None:
        assert 0 < batch <= count, f"a batch of {batch} from {count} images"
        self.count, self.batch, self.seed = count, batch, seed
        self.steps_per_epoch = count // batch
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def permutation(self, epoch: int) -> Tensor:
        """Every image once, (count,) int64. The latest is kept: steps mostly follow each other."""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self.count, generator=generator)
        return self._permutation

    def part(self, step: int) -> slice:
        """Where the global batch of ``step`` lies in the permutation of its epoch."""
        start = step % self.steps_per_epoch * self.batch
        return slice(start, start + self.batch)

    def indices(self, step: int) -> Tensor:
        """The global batch of ``step``, (batch,) int64."""
        return self.permutation(self.epoch_of(step))[self.part(step)]


class Loader(Protocol):
    unreadable: Unreadable

    def iterate(self, first_step: int, last_step: int) -> Iterator[Images]:
        """Yield this rank's rows of steps ``first_step`` … ``last_step`` − 1."""
        ...


class ResidentLoader:
    """For a set that fits into the memory of the device: a batch is one gather, with indices that are there as well."""

    def __init__(self, canvas: Canvas, order: Order) -> None:
        self.canvas, self.order, self.unreadable = canvas, order, Unreadable()

    def iterate(self, first_step: int, last_step: int) -> Iterator[Images]:
        rows = dist.slice_of_rank(self.order.batch)
        for epoch, steps in groupby(range(first_step, last_step), self.order.epoch_of):
            permutation = self._on_device(self.order.permutation(epoch))
            for step in steps:
                yield self.canvas.take(permutation[self.order.part(step)][rows])

    def _on_device(self, permutation: Tensor) -> Tensor:
        """Copied once an epoch, and without waiting for the steps before it: from pinned memory."""
        device = self.canvas.pixels.device
        if device.type == "cuda":
            permutation = permutation.pin_memory()
        return permutation.to(device, non_blocking=True)
