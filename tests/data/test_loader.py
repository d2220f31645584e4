from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_runs import write_images
from torch import Tensor

from interclr.data.folder import open_folder
from interclr.data.loader import (
    CANVAS_STEP,
    Canvas,
    Order,
    ResidentLoader,
    StreamLoader,
    Unreadable,
    in_order,
    on_canvas,
    read_all,
    read_batch,
)
from interclr.data.source import Source, UnreadableImage
from interclr.data.subset import Subset
from interclr.types import Images, UserError

CPU = torch.device("cpu")


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
