"""Batches on their way from the workers to the device, and when a slot may be written again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from interclr.data.reading import Failures
from interclr.data.slots import Slots
from interclr.data.workers import Arrival
from interclr.types import Images


def to_host(arrivals: Iterable[Arrival], slots: Slots | None, device: torch.device) -> Iterator[Arrival]:
    """Batches in memory of their own: the slots are written again."""
    for number, (images, failures) in enumerate(arrivals):
        if slots is not None:
            images = None if images is None else replace(images, pixels=images.pixels.clone())
            slots.free(number + 1)
        yield None if images is None else images.to(device), failures


def to_gpu(arrivals: Iterable[Arrival], slots: Slots | None, device: torch.device) -> Iterator[Arrival]:
    """Batches copied one ahead and beside the steps: each is handed out when the copy of the next has been started."""
    beside = torch.cuda.Stream(device)
    copies: deque[torch.cuda.Event] = deque()
    waiting: tuple[Images | None, Failures, torch.cuda.Event] | None = None
    for number, (images, failures) in enumerate(arrivals):
        with torch.cuda.stream(beside):
            moved = None if images is None else pinned(images).to(device)
            copies.append(beside.record_event())
        if len(copies) == 3:
            copies.popleft().synchronize()  # started two steps ago: it is over
            if slots is not None:
                slots.free(number - 1)
        if waiting is not None:
            yield _hand_over(*waiting, device)
        waiting = moved, failures, copies[-1]
    if waiting is not None:
        yield _hand_over(*waiting, device)


def pinned(images: Images) -> Images:
    """With all but the pixels, and what is on the GPU already, in pinned memory: from there a copy lets nobody wait."""
    return images.each(lambda tensor: tensor.pin_memory() if tensor.is_cpu and tensor is not images.pixels else tensor)


def _hand_over(images: Images | None, failures: Failures, copied: torch.cuda.Event, device: torch.device) -> Arrival:
    """To the stream that computes: it waits for the copy, and nobody else gets the memory before it has come past."""
    compute = torch.cuda.current_stream(device)
    compute.wait_event(copied)
    if images is not None:
        for tensor in (images.index, images.pixels, images.size, images.label):
            if tensor is not None:
                tensor.record_stream(compute)
    return images, failures
