"""Worker processes: each reads a whole batch, lays it into a slot and sends word of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from interclr.data.canvas import Allocate, fresh
from interclr.data.reading import Failures, ReadBatch, read_batch
from interclr.data.slots import Slots
from interclr.data.source import Source
from interclr.types import Images

Arrival = tuple[Images | None, Failures]  # a batch, None where nothing of it could be read, and what could not be read
SEARCH = 4096  # images looked at for a readable one before a run gives up


class Batches(Protocol):
    """The rows of every batch, in order. (A range of steps may be too long for a list.)"""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[list[int]]: ...


def start_workers(
    source: Source, batches: Batches, workers: int, slots: Slots | None, search: bool, pin: bool
) -> Iterator[Arrival]:
    """Every batch in order, in its slot where there is one. The workers end with the iterator."""
    loader = DataLoader(
        _Rows(source, search, slots),
        batch_sampler=_Numbered(batches),
        collate_fn=_as_given,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=2 if workers else None,  # a worker that ends a batch has the rows of the next at hand
    )
    sent = iter(loader)  # starts them
    return (read.unpack(slots) for read in sent)


@dataclass(frozen=True)
class _Read:
    """A batch on its way between processes. Pixels in a slot stay there; arrays are quicker to send than tensors.

    Others are sent as an array, too, through the pipe: a tensor would ask for shared memory again, of which there may
    be too little even for the slots (64 MB in a container), and a worker that gets none falls silent.
    """

    number: int
    index: NDArray[np.int64]
    size: NDArray[np.int64] | None
    label: NDArray[np.int64] | None
    pixels: NDArray[np.uint8] | None  # as they lie in memory; None: in the slot, or there are none
    channels_last: bool
    pinned: Tensor | None
    in_slot: tuple[Sequence[int], Sequence[int]] | None  # their shape and stride
    failures: Failures

    def unpack(self, slots: Slots | None) -> Arrival:
        pixels = self._tensor() if self.pinned is None else self.pinned
        if slots is not None and self.in_slot is not None:
            pixels = slots.view(self.number, *self.in_slot)
        if pixels is None:
            return None, self.failures
        size, label = (None if values is None else torch.from_numpy(values) for values in (self.size, self.label))
        return Images(torch.from_numpy(self.index), pixels, size, label), self.failures

    def pin_memory(self) -> _Read:
        """Called by DataLoader."""
        pixels = self._tensor()
        return self if pixels is None else replace(self, pixels=None, pinned=pixels.pin_memory())

    def _tensor(self) -> Tensor | None:
        if self.pixels is None:
            return None
        pixels = torch.from_numpy(self.pixels)
        return pixels.permute(0, 3, 1, 2) if self.channels_last else pixels


class _Numbered(Sampler[list[tuple[int, list[int]]]]):
    """A whole batch is one item: a worker reads a batch, so that failures can be replaced inside it."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, list[int]]]]:
        for number, rows in enumerate(self.batches):
            yield [(number, rows)]


class _Rows(Dataset[_Read]):
    def __init__(self, source: Source, search: bool, slots: Slots | None) -> None:
        self.source, self.search, self.slots = source, search, slots

    def __getitem__(self, item: tuple[int, list[int]]) -> _Read:
        number, rows = item
        allocate = fresh if self.slots is None else partial(self.slots.allocate, number)
        index, pixels, size, label, failures = read_batch(self.source, rows, allocate)
        if pixels is None and self.search:
            index, pixels, size, label, failures = self._from_elsewhere(rows, failures, allocate)
        read = _Read(number, index.numpy(), _array(size), _array(label), None, False, None, None, failures)
        if pixels is None:
            return read
        if self.slots is not None and self.slots.hold(pixels):
            return replace(read, in_slot=(pixels.shape, pixels.stride()))
        last = pixels.stride(1) == 1
        return replace(read, pixels=(pixels.permute(0, 2, 3, 1) if last else pixels).numpy(), channels_last=last)

    def _from_elsewhere(self, rows: list[int], failures: Failures, allocate: Allocate) -> ReadBatch:
        """A wholly unreadable batch takes the next readable images of the set: a broken folder does not end a run."""
        count = len(self.source)
        for start in range(1, min(count, SEARCH), len(rows)):
            others = [(rows[-1] + start + i) % count for i in range(len(rows))]
            index, pixels, size, label, more = read_batch(self.source, others, allocate)
            failures = failures + more
            if pixels is not None:
                return index, pixels, size, label, failures
        return torch.tensor(rows), None, None, None, failures


def _as_given(items: list[_Read]) -> _Read:
    return items[0]


def _array(tensor: Tensor | None) -> NDArray[np.int64] | None:
    return None if tensor is None else tensor.numpy()
