"""Batches on their way to a GPU: copies beside the steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from interclr.data import to_device
from interclr.data.loader import Order
from interclr.data.slots import Slots
from interclr.data.stream import StreamLoader, in_order
from interclr.data.stream_plan import SLOTS
from interclr.types import Images

from .made_images import CPU, SIZES, Drawn, check_same, plainly

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_copies_run_one_ahead_and_slots_are_freed_when_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU in name only: what is started, waited for and freed, and when."""
    happened: list[str] = []

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            happened.append(f"copied {self.number}")

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.copies = itertools.count()

        def record_event(self) -> Event:
            return Event(next(self.copies))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(to_device, "pinned", lambda images: images)
    monkeypatch.setattr(to_device, "_hand_over", lambda images, failures, event, device: (images, failures))
    slots = Slots(4, 8)

    def arrivals() -> Iterator[tuple[Images | None, list[tuple[str, str]]]]:
        for number in range(5):
            # Before it is waited for, its slot and the next are free: the batch in them four earlier is copied.
            assert int(slots.freed) == max(0, number - 2)
            happened.append(f"came {number}")
            yield (None if number == 3 else Images(torch.tensor([number]), torch.zeros(1, 3, 1, 1))), []

    for images, _ in to_device.to_gpu(arrivals(), slots, CPU):
        happened.append("step" if images is None else f"step {int(images.index)}")
    text = "came 0, came 1, step 0, came 2, copied 0, step 1, came 3, copied 1, step 2, came 4, copied 2, step, step 4"
    assert ", ".join(happened) == text


def test_what_is_on_the_gpu_already_is_not_pinned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses to. It is so when a whole set of several sizes is shown in order: only the index is replaced."""
    pinned: list[torch.Tensor] = []

    def pin(self: torch.Tensor) -> torch.Tensor:
        assert self.is_cpu, "cannot pin: only dense CPU tensors can be pinned"
        pinned.append(self)
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    index, label = torch.arange(2), torch.zeros(2)
    elsewhere = torch.zeros(2, 2, device="meta")  # as good as a GPU: not the CPU
    to_device.pinned(Images(index, torch.zeros(2, 3, 1, 1, device="meta"), elsewhere, label))
    assert [id(tensor) for tensor in pinned] == [id(index), id(label)]
    pinned.clear()
    to_device.pinned(Images(index, torch.zeros(2, 3, 1, 1), torch.zeros(2, 2), label))
    assert len(pinned) == 3  # all but the pixels


def test_a_difference_says_where_it_is_and_what_is_there_instead() -> None:
    """The time on a GPU is scarce: one failure must tell the cause."""
    expected = plainly(Drawn(30, sizes=SIZES), Order(30, 4, seed=5), 3)
    check_same(expected, expected)
    early = replace(expected[1], pixels=torch.zeros_like(expected[1].pixels))
    late = replace(expected[0], label=expected[2].label)
    odd = replace(expected[2], index=expected[2].index + torch.tensor([0, 0, 100, 0]), size=None)
    with pytest.raises(AssertionError) as failure:
        check_same([late, early, odd], expected)
    first, *lines = str(failure.value).splitlines()
    assert first == "4 field(s) of 3 batches differ"
    assert lines[0].startswith("batch 2, index: rows [2], 1 of 4 values: first at (2,), 1")
    assert lines[1].startswith("batch 1, pixels: rows [0, 1, 2, 3], ")
    assert lines[1].endswith(": zeros there, so nothing has been written yet")
    assert lines[2] == "batch 2, size: None instead of torch.int64 (4, 2) on cpu"
    assert lines[3].endswith(": holds what belongs to batch [2]")


@needs_gpu
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_gpu_gets_what_was_decoded(workers: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is busy when a batch is handed over, and without the host ever waiting for the steps."""
    if not shared:
        monkeypatch.setattr(Slots, "__init__", _refuse)
    device, steps = torch.device("cuda"), 4 * SLOTS
    source, order = Drawn(30, [7, 20], SIZES), Order(30, 4, seed=5)
    batches = StreamLoader(source, order, device, workers).iterate(0, steps + 2)
    seen = [next(batches)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps - 1):
            torch.cuda._sleep(5_000_000)
            seen.append(next(batches).each(lambda tensor: tensor + 0))  # read late, by the stream that computes
    finally:
        torch.cuda.set_sync_debug_mode("default")
    del batches
    torch.cuda.synchronize()
    check_same([batch.to(CPU) for batch in seen], plainly(source, order, steps, [7, 20]))


def _refuse(self: Slots, count: int, size: int) -> None:
    raise RuntimeError("unable to allocate shared memory(shm)")


@needs_gpu
def test_in_order_on_a_gpu() -> None:
    parts = list(in_order(Drawn(10, range(6, 9), SIZES), torch.device("cuda"), 3, workers=2))
    assert torch.cat([part.index for part in parts]).tolist() == list(range(10))
    host = list(in_order(Drawn(10, range(6, 9), SIZES), CPU, 3, workers=0))
    torch.cuda.synchronize()
    check_same([part.to(CPU) for part in parts], host)
