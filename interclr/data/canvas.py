"""Images of several sizes in one tensor: a common canvas, padded, with the real extent of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from interclr.types import Images

Allocate = Callable[[tuple[int, ...]], Tensor]  # memory for bytes of a shape
CANVAS_STEP = 32  # streamed canvases grow in these steps, so that few distinct shapes occur


class Canvas:
    """Every image of a set in one uint8 tensor, padded to the largest; ``size`` tells the real extent of each."""

    def __init__(self, pixels: Tensor, size: Tensor | None, labels: Tensor | None) -> None:
        self.pixels, self.size, self.labels = pixels, size, labels

    def __len__(self) -> int:
        return len(self.pixels)

    def to(self, device: torch.device) -> Canvas:
        size = None if self.size is None else self.size.to(device)
        labels = None if self.labels is None else self.labels.to(device)
        return Canvas(self.pixels.to(device), size, labels)

    def rows(self, index: Tensor) -> Canvas:
        """Some of the images, renumbered. Those that follow each other are not copied: there may be no room for it."""
        first = int(index[0]) if len(index) else 0
        part = slice(first, first + len(index))
        if 0 <= first <= len(self) - len(index) and torch.equal(index.cpu(), torch.arange(first, part.stop)):
            size = None if self.size is None else self.size[part]
            return Canvas(self.pixels[part], size, None if self.labels is None else self.labels[part])
        some = self.take(index.to(self.pixels.device))
        return Canvas(some.pixels, some.size, some.label)

    def take(self, index: Tensor) -> Images:
        return Images(
            index,
            self.pixels[index],
            None if self.size is None else self.size[index],
            None if self.labels is None else self.labels[index],
        )


def fresh(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8)


def on_canvas(images: Sequence[Tensor], step: int = 1, allocate: Allocate = fresh) -> tuple[Tensor, Tensor | None]:
    """Lay images (3, h, w) of several sizes on one canvas; sizes are None when all are equal.

    Where images lie in memory pixel by pixel, as decoders leave them, so does the canvas: transposing bytes takes a CPU
    several times as long as copying them, and a GPU, which makes floats of them anyway, no time.
    """
    heights, widths = [image.shape[1] for image in images], [image.shape[2] for image in images]
    equal = len(set(heights)) == len(set(widths)) == 1
    height, width = (heights[0], widths[0]) if equal else (round_up(max(heights), step), round_up(max(widths), step))
    if any(image.stride(0) == 1 for image in images):
        canvas = allocate((len(images), height, width, 3)).permute(0, 3, 1, 2)
    else:
        canvas = allocate((len(images), 3, height, width))
    for row, image, h, w in zip(canvas, images, heights, widths, strict=True):
        row[:, :h, :w] = image
        row[:, h:] = 0
        row[:, :h, w:] = 0
    return canvas, None if equal else torch.tensor([heights, widths]).T.contiguous()


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step
