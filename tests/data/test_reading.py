from __future__ import annotations

import pytest
import torch

from interclr.data.canvas import CANVAS_STEP
from interclr.data.reading import Unreadable, read_all, read_batch
from interclr.data.source import ArraySource
from interclr.data.subset import Subset
from interclr.types import UserError

from .made_images import SIZES, Drawn, Made


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


def test_a_resident_set_lies_colour_by_colour() -> None:
    """Whichever way its images come: views on a CPU are made faster from there."""
    source = Drawn(7, [2], SIZES)
    canvas, kept = read_all(source)
    assert canvas.pixels.is_contiguous()
    for row, index in enumerate(kept):
        image = source.read(index)
        assert not image.is_contiguous()
        assert torch.equal(canvas.pixels[row, :, : image.shape[1], : image.shape[2]], image)
        assert canvas.size[row].tolist() == list(image.shape[1:])


def test_a_subset_renumbers() -> None:
    source = Made(9)
    subset = Subset(source, [7, 2, 5], "some")
    assert (len(subset), subset.name, subset.name_of(1)) == (3, "some", "image 2")
    assert subset.labels.tolist() == [1, 2, 2]
    assert subset.read(0)[0, 0, 0] == 7
    assert subset.fingerprint() != Subset(source, [7, 5, 2]).fingerprint()
    assert subset.fingerprint() == Subset(source, [7, 2, 5]).fingerprint()


def test_some_of_an_array_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ArraySource(torch.randint(256, (9, 3, 4, 5), dtype=torch.uint8), torch.arange(9), name="array")
    subset = Subset(Subset(source, [8, 7, 2, 5]), [3, 0, 1])  # of a subset
    singly = torch.stack([subset.read(row) for row in range(3)])
    monkeypatch.setattr(ArraySource, "read", lambda self, index: pytest.fail("read one by one"))
    canvas, kept = read_all(subset)
    assert torch.equal(canvas.pixels, singly)
    assert canvas.size is None
    assert canvas.labels.tolist() == [5, 8, 7]
    assert kept == [0, 1, 2]
