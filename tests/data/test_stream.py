from __future__ import annotations

import itertools
import multiprocessing
import pickle
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_runs import write_images
from torch import Tensor

from interclr.data import stream_plan
from interclr.data import workers as workers_module
from interclr.data.folder import open_folder
from interclr.data.loader import Order, ResidentLoader
from interclr.data.reading import read_all
from interclr.data.slots import Slots
from interclr.data.source import UnreadableImage
from interclr.data.stream import StreamLoader, in_order
from interclr.data.stream_plan import SLOTS
from interclr.types import UserError

from .made_images import CPU, SIZES, Drawn, Made, check_same, plainly


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_batches_are_the_resident_ones(workers: int, tmp_path: Path) -> None:
    source = open_folder(write_images(tmp_path / "images", 22, side=12, classes=2))
    canvas, kept = read_all(source)
    assert kept == list(range(22))
    resident = ResidentLoader(canvas, Order(22, 5, seed=2))
    stream = StreamLoader(source, Order(22, 5, seed=2), CPU, workers)
    batches = list(resident.iterate(0, 10))
    assert len(batches) == 10
    check_same(list(stream.iterate(0, 10)), batches)
    for batch in batches:
        for row, index in enumerate(batch.index.tolist()):
            assert torch.equal(batch.pixels[row], source.read(index))
            assert batch.label[row] == source.labels[index]
    check_same(list(stream.iterate(7, 10)), batches[7:])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_replaced_counted_and_named_once(workers: int) -> None:
    broken = [3, 11]
    order = Order(16, 8, seed=0)
    stream = StreamLoader(Made(16, broken), order, CPU, workers)
    reported: list[str] = []
    stream.report = lambda failure: reported.append(failure.name)
    met = 0
    for step, images in enumerate(stream.iterate(0, 6)):
        wanted = order.indices(step).tolist()
        assert images.pixels.shape == (8, 3, 8, 8)
        assert images.pixels[:, 0, 0, 0].tolist() == images.index.tolist()  # pixels, index and label go together
        assert images.label.tolist() == [i % 3 for i in images.index.tolist()]
        for position, index in enumerate(wanted):
            if index in broken:
                met += 1
                following = [i for i in wanted[position + 1 :] + wanted if i not in broken]
                assert images.index[position] == following[0]
            else:
                assert images.index[position] == index
    assert met == 6  # both in each of three epochs
    assert sorted(reported) == ["image 11", "image 3"]
    assert stream.unreadable.reasons == {"image 3": "broken on purpose", "image 11": "broken on purpose"}


@pytest.mark.parametrize("workers", [0, 2])
def test_fail_policy_and_a_batch_without_any_readable_image(workers: int) -> None:
    reported: list[UnreadableImage] = []
    fails = StreamLoader(Made(8, [5]), Order(8, 4, 0), CPU, workers, fail=True)
    lost = StreamLoader(Made(8, range(8)), Order(8, 4, 0), CPU, workers)
    fails.report = lost.report = reported.append
    with pytest.raises(UserError, match=r"image 5: broken on purpose .*interclr data check"):
        list(fails.iterate(0, 2))
    with pytest.raises(UserError, match="every image of a batch is unreadable"):
        list(lost.iterate(0, 2))
    assert not reported  # nothing took their places
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wholly_unreadable_batch_takes_images_from_elsewhere(workers: int) -> None:
    """One broken folder does not end a run: shapes stay, and indices are those of the images that are shown."""
    broken = range(4, 16)
    stream = StreamLoader(Made(20, broken), Order(20, 2, 0), CPU, workers)
    batches = list(stream.iterate(0, 10))
    wholly = [step for step in range(10) if set(stream.order.indices(step).tolist()) <= set(broken)]
    assert wholly, "the order has no such batch: choose another seed"
    for batch in batches:
        assert batch.pixels.shape == (2, 3, 8, 8)
        assert not set(batch.index.tolist()) & set(broken)
        assert torch.equal(batch.pixels[:, 0, 0, 0].long(), batch.index)
    assert set(stream.unreadable.reasons) == {f"image {i}" for i in broken}


@pytest.mark.parametrize("workers", [0, 2])
def test_in_order_shows_every_image_under_its_own_index(workers: int) -> None:
    """Also when the last batch, or one in the middle, holds nothing readable: a broken folder must not end a run."""
    broken = [1, *range(6, 9), 9]
    parts = list(in_order(Made(10, broken), CPU, 3, workers))
    assert torch.cat([part.index for part in parts]).tolist() == list(range(10))
    assert torch.cat([part.label for part in parts]).tolist() == [i % 3 for i in range(10)]
    shown = list(itertools.chain.from_iterable(part.pixels[:, 0, 0, 0].tolist() for part in parts))
    assert shown == [0, 2, 2, 3, 4, 5, 0, 0, 0, 0]
    canvas, _ = read_all(Made(10))
    resident = list(in_order(canvas, CPU, 3))
    assert torch.cat([part.pixels for part in resident])[:, 0, 0, 0].tolist() == list(range(10))


@pytest.mark.parametrize("sizes", [SIZES, ((24, 24),)], ids=["several sizes", "one size"])
@pytest.mark.parametrize("kind", [Made, Drawn], ids=["planes", "interleaved"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_hand_on_what_was_decoded(kind: type[Made], workers: int, sizes: Sequence[tuple[int, int]]) -> None:
    """Over more batches than there are slots, all kept: nobody writes again into what has been handed out."""
    broken = [7, 20]
    steps = 5 * SLOTS
    source, order = kind(30, broken, sizes), Order(30, 4, seed=5)
    batches = list(StreamLoader(source, order, CPU, workers).iterate(0, steps))
    expected = plainly(source, order, steps, broken)
    check_same(batches, expected)


def test_images_larger_than_expected_and_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    source, order = Drawn(30, sizes=SIZES), Order(30, 4, seed=5)
    expected = plainly(source, order, 14)
    with monkeypatch.context() as patch:
        patch.setattr(stream_plan, "side_of_slots", lambda source: 8)
        batches = list(StreamLoader(source, order, CPU, 2).iterate(0, 14))
    check_same(batches, expected)

    def refused(count: int, size: int) -> Slots:
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.setattr(stream_plan, "Slots", refused)
    batches = list(StreamLoader(source, order, CPU, 2).iterate(0, 14))
    check_same(batches, expected)


@pytest.mark.parametrize("kind", [Made, Drawn], ids=["planes", "interleaved"])
def test_a_batch_without_a_slot_goes_through_the_pipe(kind: type[Made]) -> None:
    """A tensor would be sent by way of shared memory, and without any left a worker would never be heard of again."""
    read = workers_module._Rows(kind(4, sizes=((24, 24),)), False, None)[0, [0, 1, 2, 3]]
    values = [value for value in vars(read).values() if value is not None]
    assert not any(isinstance(value, torch.Tensor) for value in values)
    assert read.pixels is not None
    assert read.pixels.flags["C_CONTIGUOUS"]  # else it would be transposed when it is sent
    assert b"torch" not in pickle.dumps(read).replace(b"interclr.data", b"")


def test_batches_without_a_readable_image_do_not_keep_their_slots() -> None:
    count = 4 * SLOTS
    broken = range(2, 2 * count - 8)
    parts = list(in_order(Made(2 * count, broken), CPU, 2, workers=2))
    assert len(parts) == count
    assert parts[-1].pixels[:, 0, 0, 0].tolist() == [2 * count - 2, 2 * count - 1]


@pytest.mark.parametrize("taken", [0, 1, 9])
def test_workers_end_with_the_loop_that_needed_them(taken: int) -> None:
    """Also those that wait for a slot, and at once."""
    batches = StreamLoader(Drawn(30), Order(30, 4, 0), CPU, 2).iterate(0, 1_000)
    for _ in range(taken):
        next(batches)
    time.sleep(0.2)  # the slots are full
    started = time.monotonic()
    del batches
    assert time.monotonic() - started < 4  # DataLoader ends those that do not answer after 5 s
    assert not multiprocessing.active_children()


def test_on_a_cpu_batches_come_when_they_are_asked_for() -> None:
    read: list[int] = []

    class Watched(Made):
        def read(self, index: int) -> Tensor:
            read.append(index)
            return super().read(index)

    batches = StreamLoader(Watched(12), Order(12, 4, 0), CPU, workers=0).iterate(0, 3)
    for done in range(3):
        next(batches)
        assert len(read) == 4 * (done + 1)
