"""Batches as a function of the step: resident in memory where the set is small, streamed by workers where it is not.

The order of epoch e is a permutation seeded by (seed, e), so a loader needs no state: resuming means asking for the
next step. Every rank computes the same order and takes its own rows of the global batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from interclr import dist
from interclr.data.source import Source, UnreadableImage
from interclr.types import Images, UserError

Progress = Callable[[int, int], None]
Failures = list[tuple[str, str]]  # names and reasons
SEARCH = 4096  # images looked at for a readable one before a run gives up
CANVAS_STEP = 32  # streamed canvases grow in these steps, so that few distinct shapes occur


@dataclass
class Unreadable:
    """Images that could not be read, by name with the reason. Each is counted once however often it is met."""

    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, failures: Sequence[UnreadableImage]) -> list[UnreadableImage]:
        """Remember ``failures`` and return those not met before."""
        new = [failure for failure in failures if failure.name not in self.reasons]
        self.reasons.update({failure.name: failure.reason for failure in new})
        return new


class Order:
    """Which images make up which step. Epochs drop the incomplete last batch; another permutation drops others."""

    def __init__(self, count: int, batch: int, seed: int) -> None:
        assert 0 < batch <= count, f"a batch of {batch} from {count} images"
        self.count, self.batch, self.seed = count, batch, seed
        self.steps_per_epoch = count // batch
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def indices(self, step: int) -> Tensor:
        """The global batch of ``step``, (batch,) int64."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._permutation = epoch, torch.randperm(self.count, generator=generator)
        return self._permutation[position * self.batch : (position + 1) * self.batch]


class Loader(Protocol):
    unreadable: Unreadable

    def iterate(self, first_step: int, last_step: int) -> Iterator[Images]:
        """Yield this rank's rows of steps ``first_step`` … ``last_step`` − 1."""
        ...


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
        """Some of the images, renumbered."""
        index = index.to(self.pixels.device)
        some = self.take(index)
        return Canvas(some.pixels, some.size, some.label)

    def take(self, index: Tensor) -> Images:
        return Images(
            index,
            self.pixels[index],
            None if self.size is None else self.size[index],
            None if self.labels is None else self.labels[index],
        )


class ResidentLoader:
    """For a set that fits into the memory of the device: a batch is one gather."""

    def __init__(self, canvas: Canvas, order: Order) -> None:
        self.canvas, self.order, self.unreadable = canvas, order, Unreadable()

    def iterate(self, first_step: int, last_step: int) -> Iterator[Images]:
        rows = dist.slice_of_rank(self.order.batch)
        for step in range(first_step, last_step):
            yield self.canvas.take(self.order.indices(step)[rows].to(self.canvas.pixels.device, non_blocking=True))


class StreamLoader:
    """For a set that does not fit: worker processes decode ahead; one DataLoader serves the whole run.

    An unreadable image is replaced by the next readable one of its batch, so shapes never change and no image index
    shifts; it is counted and named. With ``fail`` it ends the run with its name instead.
    """

    def __init__(
        self, source: Source, order: Order, device: torch.device, workers: int | None = None, fail: bool = False
    ) -> None:
        self.source, self.order, self.device, self.fail = source, order, device, fail
        self.workers = default_workers() if workers is None else workers
        self.unreadable = Unreadable()
        self.report: Callable[[UnreadableImage], None] = lambda failure: None

    def iterate(self, first_step: int, last_step: int) -> Iterator[Images]:
        cuda = self.device.type == "cuda"
        loader = DataLoader(
            _Rows(self.source, search=not self.fail),
            batch_sampler=_Steps(self.order, first_step, last_step),
            collate_fn=_as_given,
            num_workers=self.workers,
            pin_memory=cuda,
            prefetch_factor=4 if self.workers else None,
        )
        for index, pixels, size, label, failures in loader:
            for failure in self.unreadable.add([UnreadableImage(name, reason) for name, reason in failures]):
                self.report(failure)
            if failures and (self.fail or pixels is None):
                name, reason = failures[0]
                what = "every image of a batch is unreadable" if pixels is None else "an image is unreadable"
                raise UserError(f"{what}: {name}: {reason} (find all with: interclr data check)")
            yield Images(index, pixels, size, label).to(self.device)


class _Steps(Sampler[list[int]]):
    def __init__(self, order: Order, first: int, last: int) -> None:
        self.order, self.steps, self.rows = order, range(first, last), dist.slice_of_rank(order.batch)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        # The whole batch is one item: a worker reads a batch, so failures can be replaced inside it.
        for step in self.steps:
            yield [self.order.indices(step)[self.rows].tolist()]  # type: ignore[list-item]


class _Rows(Dataset[object]):
    def __init__(self, source: Source, search: bool = False) -> None:
        self.source, self.search = source, search

    def __getitem__(self, rows: list[int]) -> object:
        batch = read_batch(self.source, rows)
        if batch[1] is not None or not self.search:
            return batch
        return self._from_elsewhere(rows, batch[-1])

    def _from_elsewhere(self, rows: list[int], failures: Failures) -> object:
        """A wholly unreadable batch takes the next readable images of the set: a broken folder does not end a run."""
        count = len(self.source)
        for start in range(1, min(count, SEARCH), len(rows)):
            others = [(rows[-1] + start + i) % count for i in range(len(rows))]
            *found, more = read_batch(self.source, others)
            failures = failures + more
            if found[1] is not None:
                return *found, failures
        return torch.tensor(rows), None, None, None, failures


def _as_given(items: list[object]) -> object:
    return items[0]


def read_batch(source: Source, rows: list[int]) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Failures]:
    """Index, pixels on a common canvas, sizes, labels, and what could not be read (replaced by the next image)."""
    images: list[Tensor | None] = []
    failures: Failures = []
    for row in rows:
        try:
            images.append(source.read(row))
        except UnreadableImage as failure:
            images.append(None)
            failures.append((failure.name, failure.reason))
    good = [i for i, image in enumerate(images) if image is not None]
    index = torch.tensor(rows)
    if not good:
        return index, None, None, None, failures
    following = [next((g for g in good if g >= i), good[0]) for i in range(len(rows))]
    pixels, size = on_canvas([image for i in following if (image := images[i]) is not None], CANVAS_STEP)
    index = index[following]
    return index, pixels, size, None if source.labels is None else source.labels[index], failures


def on_canvas(images: Sequence[Tensor], step: int = 1) -> tuple[Tensor, Tensor | None]:
    """Lay images (3, h, w) of several sizes on one canvas; sizes are None when all are equal."""
    heights, widths = [image.shape[1] for image in images], [image.shape[2] for image in images]
    if len(set(heights)) == len(set(widths)) == 1:
        return torch.stack(list(images)), None
    canvas = torch.zeros(len(images), 3, _up(max(heights), step), _up(max(widths), step), dtype=torch.uint8)
    for row, image in zip(canvas, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = image
    return canvas, torch.tensor([heights, widths]).T.contiguous()


def default_workers() -> int:
    """Every core, shared by the ranks on this machine, and at most 16."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min((os.cpu_count() or 1) // ranks, 16))


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def read_all(
    source: Source, progress: Progress | None = None, unreadable: Unreadable | None = None
) -> tuple[Canvas, list[int]]:
    """Decode a whole set into memory. Returns it with the indices kept; unreadable images are left out and noted."""
    whole: Tensor | None = getattr(source, "pixels", None)
    if whole is not None:
        return Canvas(whole, None, source.labels), list(range(len(source)))
    noted = unreadable if unreadable is not None else Unreadable()
    images: list[Tensor] = []
    kept: list[int] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # PIL decodes outside the interpreter lock
        for i, result in enumerate(pool.map(lambda row: _read(source, row), range(len(source)))):
            if isinstance(result, UnreadableImage):
                noted.add([result])
            else:
                images.append(result)
                kept.append(i)
            if progress is not None:
                progress(i + 1, len(source))
    if not images:
        raise UserError(f"no image of {source.name} could be read (find out why with: interclr data check)")
    pixels, size = on_canvas(images)
    return Canvas(pixels, size, None if source.labels is None else source.labels[kept]), kept


def _read(source: Source, row: int) -> Tensor | UnreadableImage:
    try:
        return source.read(row)
    except UnreadableImage as failure:
        return failure


def in_order(
    images: Canvas | Source,
    device: torch.device,
    batch: int,
    workers: int | None = None,
    unreadable: Unreadable | None = None,
) -> Iterator[Images]:
    """Every image once, in index order: to embed a whole set.

    An unreadable image is shown as the next one's pixels, and where a whole batch is unreadable as black, so that one
    broken folder does not end a run; ``unreadable`` collects their names.
    """
    parts = torch.arange(len(images)).split(batch)
    if isinstance(images, Canvas):
        for part in parts:
            yield images.take(part.to(images.pixels.device)).to(device)
        return
    loader = DataLoader(
        _Rows(images),
        batch_sampler=[[part.tolist()] for part in parts],
        collate_fn=_as_given,
        num_workers=default_workers() if workers is None else workers,
        pin_memory=device.type == "cuda",
    )
    for part, (_, pixels, size, _, failures) in zip(parts, loader, strict=True):
        if unreadable is not None:
            unreadable.add([UnreadableImage(name, reason) for name, reason in failures])
        if pixels is None:
            pixels = torch.zeros(len(part), 3, CANVAS_STEP, CANVAS_STEP, dtype=torch.uint8)
        label = None if images.labels is None else images.labels[part]
        yield Images(part, pixels, size, label).to(device)
