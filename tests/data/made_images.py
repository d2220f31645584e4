"""Sets of images made on the spot, what a loader must yield of them, and how to compare it: for the loaders' tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from interclr.data.canvas import CANVAS_STEP
from interclr.data.loader import Order
from interclr.data.source import Source, UnreadableImage
from interclr.types import Images

CPU = torch.device("cpu")
SIZES = ((40, 30), (17, 70), (33, 33))
FIELDS = ("index", "pixels", "size", "label")
MOST_SHOWN = 20  # differences; the first tell enough


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


def check_same(got: Sequence[Images], expected: Sequence[Images]) -> None:
    """Fails with every batch and field that differs, and with what the field holds instead where that can be told."""
    assert len(got) == len(expected), f"{len(got)} batches instead of {len(expected)}"
    wrong = []
    for name in FIELDS:
        all_expected = [getattr(batch, name) for batch in expected]
        for number, batch in enumerate(got):
            text = _difference(getattr(batch, name), all_expected[number], all_expected)
            wrong += [f"batch {number}, {name}: {text}"] if text else []
    if wrong:
        raise AssertionError("\n".join([f"{len(wrong)} field(s) of {len(got)} batches differ", *wrong[:MOST_SHOWN]]))


def _difference(got: Tensor | None, expected: Tensor | None, of_all: Sequence[Tensor | None]) -> str | None:
    if got is None or expected is None:
        return None if got is expected else f"{_kind(got)} instead of {_kind(expected)}"
    if (got.shape, got.dtype, got.device) != (expected.shape, expected.dtype, expected.device):
        return f"{_kind(got)} instead of {_kind(expected)}"
    if torch.equal(got, expected):
        return None
    other = [number for number, tensor in enumerate(of_all) if tensor is not None and _equal(got, tensor)]
    differs = got != expected
    rows = differs.reshape(len(got), -1).any(1)
    text = f"rows {rows.nonzero().flatten().tolist()}, {int(differs.sum())} of {got.numel()} values"
    if other:
        return f"{text}: holds what belongs to batch {other}"
    if not got[rows].any():
        return f"{text}: zeros there, so nothing has been written yet"
    at = tuple(differs.nonzero()[0].tolist())
    return f"{text}: first at {at}, {got[at].item()} instead of {expected[at].item()}"


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left, right)
