from __future__ import annotations

import pytest
import torch
from torch import Tensor

from interclr.data.canvas import CANVAS_STEP, Canvas, on_canvas
from interclr.data.reading import read_all
from interclr.data.view_parameters import View
from interclr.data.views import Views, centre_crop
from interclr.types import Images

from .made_images import SIZES, Drawn, Made


def test_on_canvas_of_equal_sizes_needs_no_sizes() -> None:
    images = [torch.full((3, 5, 7), i, dtype=torch.uint8) for i in range(3)]
    pixels, size = on_canvas(images, step=32)
    assert size is None
    assert torch.equal(pixels, torch.stack(images))


def test_rows_of_a_canvas() -> None:
    canvas, _ = read_all(Made(6, sizes=[(8, 8), (4, 6)]))
    some = canvas.rows(torch.tensor([5, 2]))
    assert isinstance(some, Canvas)
    assert some.pixels[:, 0, 0, 0].tolist() == [5, 2]
    assert some.size.tolist() == [[4, 6], [8, 8]]
    assert some.labels.tolist() == [2, 2]


@pytest.mark.parametrize("sizes", [[(8, 8)], [(8, 8), (4, 6)]])
def test_rows_that_follow_each_other_are_not_copied(sizes: list[tuple[int, int]]) -> None:
    canvas, _ = read_all(Made(6, sizes=sizes))
    following = [[2, 3, 4], [0, 1, 2, 3, 4, 5], [5], []]
    for rows in (*following, [2, 4], [3, 2], [2, 2], [-1], [-2, -1]):
        index = torch.tensor(rows, dtype=torch.int64)
        some, copy = canvas.rows(index), canvas.take(index)
        assert torch.equal(some.pixels, copy.pixels)
        assert some.size is copy.size is None or torch.equal(some.size, copy.size)
        assert torch.equal(some.labels, copy.label)
        shared = some.pixels.untyped_storage().data_ptr() == canvas.pixels.untyped_storage().data_ptr()
        assert shared == (rows in following)
    assert Canvas(canvas.pixels, None, None).rows(torch.arange(2)).labels is None
    with pytest.raises(IndexError):
        canvas.rows(torch.tensor([5, 6]))


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
