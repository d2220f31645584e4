from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tiny_runs import write_images
from torch import Tensor

from interclr.data import loader as loader_module
from interclr.data.folder import open_folder
from interclr.data.loader import (
    CANVAS_STEP,
    SLOTS,
    Canvas,
    Order,
    ResidentLoader,
    Slots,
    StreamLoader,
    Unreadable,
    in_order,
    on_canvas,
    read_all,
    read_batch,
)
from interclr.data.source import Source, UnreadableImage
from interclr.data.subset import Subset
from interclr.data.views import View, Views, centre_crop
from interclr.types import Images, UserError

CPU = torch.device("cpu")
SIZES = ((40, 30), (17, 70), (33, 33))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Made(Source):
    """Image i is filled with i; its size follows ``sizes``; those in ``broken`` cannot be read."""

    def __init__(self, count: int, broken: Sequence[int] = (), sizes: Sequence[tuple[int, int]] = ((8, 8),)) -> None:
        self.name, self.classes, self.labels = "made", None, torch.arange(count) % 3
        self.count, self.broken, self.sizes = count, set(broken), sizes

    def __len__(self) -> int:
        return self.count

    def name_of(self, index: int) -> str:
        return f"image {index}"

    def read(self, index: int) -> Tensor:
        if index in self.broken:
            raise UnreadableImage(self.name_of(index), "broken on purpose")
        return torch.full((3, *self.sizes[index % len(self.sizes)]), index, dtype=torch.uint8)

    def _add_to_fingerprint(self, digest: object) -> None: ...


def equal(left: Images, right: Images) -> bool:
    assert (left.size is None) == (right.size is None)
    return (
        torch.equal(left.index, right.index)
        and torch.equal(left.pixels, right.pixels)
        and torch.equal(left.label, right.label)
        and (left.size is None or torch.equal(left.size, right.size))
    )


# Order.


def test_every_epoch_is_another_permutation() -> None:
    order = Order(20, 5, seed=3)
    assert order.steps_per_epoch == 4
    epochs = [torch.cat([order.indices(4 * e + s) for s in range(4)]) for e in range(5)]
    assert all(epoch.sort().values.tolist() == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 5
    other = Order(20, 5, seed=4)
    assert not torch.equal(torch.cat([other.indices(s) for s in range(4)]), epochs[0])


def test_an_incomplete_batch_is_dropped_and_others_are_dropped_next_time() -> None:
    order = Order(10, 4, seed=0)
    assert order.steps_per_epoch == 2
    left_out = []
    for epoch in range(12):
        shown = torch.cat([order.indices(2 * epoch), order.indices(2 * epoch + 1)]).tolist()
        assert len(set(shown)) == 8
        left_out.append(frozenset(range(10)) - set(shown))
    assert set().union(*left_out) == set(range(10))


def test_a_step_depends_on_nothing_before_it() -> None:
    through = Order(23, 4, seed=1)
    batches = [through.indices(step).tolist() for step in range(30)]
    for step in (29, 0, 17, 5, 4, 12):
        assert Order(23, 4, seed=1).indices(step).tolist() == batches[step]
        assert through.indices(step).tolist() == batches[step]


# Loaders.


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_batches_are_the_resident_ones(workers: int, tmp_path: Path) -> None:
    source = open_folder(write_images(tmp_path / "images", 22, side=12, classes=2))
    canvas, kept = read_all(source)
    assert kept == list(range(22))
    resident = ResidentLoader(canvas, Order(22, 5, seed=2))
    stream = StreamLoader(source, Order(22, 5, seed=2), CPU, workers)
    pairs = list(zip(resident.iterate(0, 10), stream.iterate(0, 10), strict=True))
    assert len(pairs) == 10
    for left, right in pairs:
        assert equal(left, right)
        for row, index in enumerate(left.index.tolist()):
            assert torch.equal(left.pixels[row], source.read(index))
            assert left.label[row] == source.labels[index]
    later = list(stream.iterate(7, 10))
    assert all(equal(a, pair[0]) for a, pair in zip(later, pairs[7:], strict=True))


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
    with pytest.raises(UserError, match=r"image 5: broken on purpose .*interclr data check"):
        list(StreamLoader(Made(8, [5]), Order(8, 4, 0), CPU, workers, fail=True).iterate(0, 2))
    with pytest.raises(UserError, match="every image of a batch is unreadable"):
        list(StreamLoader(Made(8, range(8)), Order(8, 4, 0), CPU, workers).iterate(0, 2))
    assert not multiprocessing.active_children()


def test_images_of_several_sizes_share_a_canvas() -> None:
    source = Made(6, sizes=[(8, 40), (33, 10), (5, 5)])
    index, pixels, size, label, failures = read_batch(source, [0, 1, 2, 4])
    assert not failures
    assert index.tolist() == [0, 1, 2, 4]
    assert label.tolist() == [0, 1, 2, 1]
    assert pixels.shape == (4, 3, 2 * CANVAS_STEP, 2 * CANVAS_STEP)
    assert size.tolist() == [[8, 40], [33, 10], [5, 5], [33, 10]]
    for row, (height, width) in enumerate(size.tolist()):
        assert (pixels[row, :, :height, :width] == index[row]).all()
        assert pixels[row].sum() == 3 * height * width * index[row]  # and nothing beside
    canvas, _ = read_all(source)
    assert canvas.pixels.shape == (6, 3, 33, 40)
    taken = canvas.take(torch.tensor([1, 4]))
    assert taken.size.tolist() == [[33, 10], [33, 10]]


def test_on_canvas_of_equal_sizes_needs_no_sizes() -> None:
    images = [torch.full((3, 5, 7), i, dtype=torch.uint8) for i in range(3)]
    pixels, size = on_canvas(images, step=32)
    assert size is None
    assert torch.equal(pixels, torch.stack(images))


def test_read_all_leaves_unreadable_images_out_and_says_which() -> None:
    noted, calls = Unreadable(), []
    canvas, kept = read_all(Made(7, [0, 4]), lambda done, total: calls.append((done, total)), noted)
    assert kept == [1, 2, 3, 5, 6]
    assert canvas.pixels[:, 0, 0, 0].tolist() == kept
    assert canvas.labels.tolist() == [1, 2, 0, 2, 0]
    assert list(noted.reasons) == ["image 0", "image 4"]
    assert calls == [(i, 7) for i in range(1, 8)]
    with pytest.raises(UserError, match="no image of made could be read"):
        read_all(Made(3, range(3)))


def test_rows_of_a_canvas() -> None:
    canvas, _ = read_all(Made(6, sizes=[(8, 8), (4, 6)]))
    some = canvas.rows(torch.tensor([5, 2]))
    assert isinstance(some, Canvas)
    assert some.pixels[:, 0, 0, 0].tolist() == [5, 2]
    assert some.size.tolist() == [[4, 6], [8, 8]]
    assert some.labels.tolist() == [2, 2]


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


def test_a_subset_renumbers() -> None:
    source = Made(9)
    subset = Subset(source, [7, 2, 5], "some")
    assert (len(subset), subset.name, subset.name_of(1)) == (3, "some", "image 2")
    assert subset.labels.tolist() == [1, 2, 2]
    assert subset.read(0)[0, 0, 0] == 7
    assert subset.fingerprint() != Subset(source, [7, 5, 2]).fingerprint()
    assert subset.fingerprint() == Subset(source, [7, 2, 5]).fingerprint()


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


# Slots: what workers and this process share.


class Drawn(Made):
    """As decoders leave them, pixel by pixel: image i is noise of its own."""

    def read(self, index: int) -> Tensor:
        if index in self.broken:
            raise UnreadableImage(self.name_of(index), "broken on purpose")
        height, width = self.sizes[index % len(self.sizes)]
        random = torch.Generator().manual_seed(index)
        return torch.randint(256, (height, width, 3), generator=random, dtype=torch.uint8).permute(2, 0, 1)


def plainly(source: Source, order: Order, steps: int, broken: Sequence[int] = ()) -> list[Images]:
    """What a loader must yield, made with nothing but torch."""
    batches = []
    for step in range(steps):
        wanted = order.indices(step).tolist()
        shown = [next(i for i in wanted[at:] + wanted if i not in broken) for at in range(len(wanted))]
        images = [source.read(i).contiguous() for i in shown]
        sizes = torch.tensor([image.shape[1:] for image in images])
        if bool((sizes == sizes[0]).all()):
            pixels = torch.stack(images)
        else:
            height, width = (-(-int(side) // CANVAS_STEP) * CANVAS_STEP for side in sizes.amax(0))
            pixels = torch.zeros(len(images), 3, height, width, dtype=torch.uint8)
            for row, image in zip(pixels, images, strict=True):
                row[:, : image.shape[1], : image.shape[2]] = image
        same = pixels.shape[2:] == tuple(sizes[0]) and bool((sizes == sizes[0]).all())
        batches.append(Images(torch.tensor(shown), pixels, None if same else sizes, source.labels[shown]))
    return batches


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
    assert all(equal(left, right) for left, right in zip(batches, expected, strict=True))


def test_images_larger_than_expected_and_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    source, order = Drawn(30, sizes=SIZES), Order(30, 4, seed=5)
    expected = plainly(source, order, 14)
    with monkeypatch.context() as patch:
        patch.setattr(loader_module, "_side_of_slots", lambda source: 8)
        batches = list(StreamLoader(source, order, CPU, 2).iterate(0, 14))
    assert all(equal(left, right) for left, right in zip(batches, expected, strict=True))

    def refused(count: int, size: int) -> Slots:
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.setattr(loader_module, "Slots", refused)
    batches = list(StreamLoader(source, order, CPU, 2).iterate(0, 14))
    assert all(equal(left, right) for left, right in zip(batches, expected, strict=True))


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
    workers, slots = loader_module._plan(source, batches, CPU, 16)
    assert workers == 16
    assert slots.memory.shape == (SLOTS, each)
    assert loader_module._plan(source, batches[:2], CPU, 16)[0] == 2
    assert loader_module._plan(source, batches, CPU, 0) == (0, None)
    assert loader_module._plan(source, [], CPU, 2) == (2, None)
    monkeypatch.setattr(loader_module, "SLOTS_BYTES", 5 * each)
    assert len(loader_module._plan(source, batches, CPU, 16)[1].memory) == 5
    monkeypatch.setattr(loader_module, "SLOTS_BYTES", 1)
    assert len(loader_module._plan(source, batches, CPU, 16)[1].memory) == loader_module.SLOTS_LEAST
    monkeypatch.setattr(loader_module, "WORKERS_SHARE", 1e-15)
    assert loader_module._plan(source, batches, CPU, 16)[0] == 1


def test_slots_are_no_larger_than_images_can_be() -> None:
    source = Made(200, sizes=[(500, 375)])
    assert loader_module._side_of_slots(source) == 640
    source.max_side = 512
    assert loader_module._side_of_slots(source) == 512
    assert loader_module._side_of_slots(Subset(source, range(9))) == 512
    source.max_side = 96  # images that come without having been shrunk
    assert loader_module._side_of_slots(source) == 512
    assert loader_module._side_of_slots(Made(5, range(5))) > 0


def test_canvas_in_memory_as_the_images_are() -> None:
    """And clean whatever lay there before."""
    interleaved = [Drawn(3, sizes=SIZES).read(i) for i in range(3)]
    planes = [image.contiguous() for image in interleaved]

    def dirty(shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, 77, dtype=torch.uint8)

    left, sizes = on_canvas(interleaved, CANVAS_STEP, dirty)
    right, same_sizes = on_canvas(planes, CANVAS_STEP, dirty)
    mixed, _ = on_canvas([planes[0], interleaved[1], planes[2]], CANVAS_STEP, dirty)
    assert left.permute(0, 2, 3, 1).is_contiguous()
    assert right.is_contiguous()
    assert torch.equal(left, right)
    assert torch.equal(left, mixed)
    assert torch.equal(sizes, same_sizes)
    for pixels, (height, width) in zip(left, SIZES, strict=True):
        assert pixels[:, height:].sum() == pixels[:, :, width:].sum() == 0


def test_views_do_not_depend_on_how_pixels_lie_in_memory() -> None:
    interleaved, size = on_canvas([Drawn(3, sizes=SIZES).read(i) for i in range(3)], CANVAS_STEP)
    images = Images(torch.arange(3), interleaved, size)
    planes = Images(torch.arange(3), interleaved.contiguous(), size)
    view = View(jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grey=0.2, blur=0.5, solarise=0.2)
    views = Views([view, view], 24, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    left, right = (views(some, torch.Generator().manual_seed(3)) for some in (images, planes))
    assert all(torch.equal(a, b) for a, b in zip(left.views, right.views, strict=True))
    left, right = (centre_crop(some, 24, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)) for some in (images, planes))
    assert torch.equal(left, right)
    canvas = Canvas(interleaved, size, None)
    assert torch.equal(canvas.rows(torch.tensor([2, 0])).pixels, planes.pixels[[2, 0]])


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


# On a GPU: copies beside the steps.


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
    monkeypatch.setattr(loader_module, "_pinned", lambda images: images)
    monkeypatch.setattr(loader_module, "_hand_over", lambda images, failures, event, device: (images, failures))
    slots = Slots(4, 8)

    def arrivals() -> Iterator[tuple[Images | None, list[tuple[str, str]]]]:
        for number in range(5):
            # Before it is waited for, its slot and the next are free: the batch in them four earlier is copied.
            assert int(slots.freed) == max(0, number - 2)
            happened.append(f"came {number}")
            yield (None if number == 3 else Images(torch.tensor([number]), torch.zeros(1, 3, 1, 1))), []

    for images, _ in loader_module._to_gpu(arrivals(), slots, CPU):
        happened.append("step" if images is None else f"step {int(images.index)}")
    text = "came 0, came 1, step 0, came 2, copied 0, step 1, came 3, copied 1, step 2, came 4, copied 2, step, step 4"
    assert ", ".join(happened) == text


@needs_gpu
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_gpu_gets_what_was_decoded(workers: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is busy when a batch is handed over, and without the host ever waiting for the steps."""
    if not shared:
        monkeypatch.setattr(loader_module.Slots, "__init__", _refuse)
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
    expected = plainly(source, order, steps, [7, 20])
    assert all(equal(left.to(CPU), right) for left, right in zip(seen, expected, strict=True))


def _refuse(self: Slots, count: int, size: int) -> None:
    raise RuntimeError("unable to allocate shared memory(shm)")


@needs_gpu
def test_memory_that_cannot_be_pinned_is_used_all_the_same() -> None:
    device = torch.device("cuda")
    slots = Slots(4, 1 << 20)
    slots.pin(device)
    assert slots.is_pinned
    pageable = Slots.__new__(Slots)
    pageable.memory, pageable.freed = slots.memory, slots.freed
    pageable.pin(device)  # a second time: refused
    assert not pageable.is_pinned
    assert torch.ones(3, device=device).sum() == 3  # the refusal is not reported by whoever comes next
    slots.unpin(device)
    assert not slots.is_pinned
    pageable.pin(device)
    assert pageable.is_pinned
    pageable.unpin(device)


@needs_gpu
def test_in_order_on_a_gpu() -> None:
    parts = list(in_order(Drawn(10, range(6, 9), SIZES), torch.device("cuda"), 3, workers=2))
    assert torch.cat([part.index for part in parts]).tolist() == list(range(10))
    host = list(in_order(Drawn(10, range(6, 9), SIZES), CPU, 3, workers=0))
    assert all(equal(left.to(CPU), right) for left, right in zip(parts, host, strict=True))
