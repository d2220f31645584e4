"""The memory that workers and this process share, and how much of it there is."""

from __future__ import annotations

import threading

import pytest
import torch

from interclr.data import stream_plan
from interclr.data.slots import Slots
from interclr.data.stream_plan import SLOTS, plan, side_of_slots
from interclr.data.subset import Subset

from .made_images import CPU, Made

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_slot_is_written_when_it_is_free() -> None:
    slots = Slots(3, 100)
    for number in range(3):
        slots.allocate(number, (10, 10)).fill_(number)
    written = threading.Event()

    def write() -> None:
        slots.allocate(3, (5, 20)).fill_(9)
        written.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not written.wait(0.1)
    assert slots.view(0, (10, 10), (10, 1)).tolist() == [[0] * 10] * 10
    slots.free(1)
    assert written.wait(5)
    thread.join()
    assert slots.view(3, (5, 20), (20, 1)).tolist() == [[9] * 20] * 5
    assert slots.view(1, (100,), (1,)).unique().tolist() == [1]
    assert not slots.hold(slots.allocate(99, (101,)))  # too large: no slot and no waiting
    assert slots.hold(slots.allocate(2, (100,)))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [list(range(8))] * 100
    source = Made(200, sizes=[(64, 64)])
    each = 8 * 3 * 96 * 96  # 64 pixels, a margin, and a whole step of the canvas
    workers, slots = plan(source, batches, CPU, 16)
    assert workers == 16
    assert slots.memory.shape == (SLOTS, each)
    assert plan(source, batches[:2], CPU, 16)[0] == 2
    assert plan(source, batches, CPU, 0) == (0, None)
    assert plan(source, [], CPU, 2) == (2, None)
    monkeypatch.setattr(stream_plan, "SLOTS_BYTES", 5 * each)
    assert len(plan(source, batches, CPU, 16)[1].memory) == 5
    monkeypatch.setattr(stream_plan, "SLOTS_BYTES", 1)
    assert len(plan(source, batches, CPU, 16)[1].memory) == stream_plan.SLOTS_LEAST
    monkeypatch.setattr(stream_plan, "WORKERS_SHARE", 1e-15)
    assert plan(source, batches, CPU, 16)[0] == 1


def test_slots_are_no_larger_than_images_can_be() -> None:
    source = Made(200, sizes=[(500, 375)])
    assert side_of_slots(source) == 640
    source.max_side = 512
    assert side_of_slots(source) == 512
    assert side_of_slots(Subset(source, range(9))) == 512
    source.max_side = 96  # images that come without having been shrunk
    assert side_of_slots(source) == 512
    assert side_of_slots(Made(5, range(5))) > 0


@needs_gpu
def test_memory_that_cannot_be_pinned_is_used_all_the_same() -> None:
    device = torch.device("cuda")
    slots = Slots(4, 1 << 20)
    slots.pin(device)
    assert slots.is_pinned, "the first time is refused"
    pageable = Slots.__new__(Slots)
    pageable.memory, pageable.freed = slots.memory, slots.freed
    pageable.pin(device)  # a second time: refused
    assert not pageable.is_pinned, "the second time is not refused"
    assert torch.ones(3, device=device).sum() == 3, "the refusal is reported by whoever comes next"
    slots.unpin(device)
    assert not slots.is_pinned
    pageable.pin(device)
    assert pageable.is_pinned, "it stays pinned when it is unpinned"
    pageable.unpin(device)
