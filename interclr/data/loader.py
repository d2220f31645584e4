"""Batches as a function of the step: resident in memory where the set is small, streamed by workers where it is not.

The order of epoch e is a permutation seeded by (seed, e), so a loader needs no state: resuming means asking for the
next step. Every rank computes the same order and takes its own rows of the global batch.

A streamed batch is decoded by one worker process, which lays it into one of a few slots of pinned shared memory. From
there it is copied to the GPU, one batch ahead and on a stream of its own, so that this process has next to nothing to
do for a batch and no copy stands between two steps.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from interclr import dist
from interclr.data.source import Source, UnreadableImage
from interclr.types import Images, UserError

Progress = Callable[[int, int], None]
Failures = list[tuple[str, str]]  # names and reasons
Allocate = Callable[[tuple[int, ...]], Tensor]  # memory for bytes of a shape
Arrival = tuple[Images | None, Failures]  # a batch, None where nothing of it could be read, and what could not be read
SEARCH = 4096  # images looked at for a readable one before a run gives up
CANVAS_STEP = 32  # streamed canvases grow in these steps, so that few distinct shapes occur
SLOTS, SLOTS_LEAST = 6, 4  # batches that lie ready: two of them are being copied, the others bridge a slow batch
SLOTS_BYTES = 4 << 30  # fewer slots where they would take more than this
WORKERS_SHARE = 0.25  # of the host's memory, for the one decoded batch in each worker: fewer where they would take more
PROBES, PROBE_MARGIN = 32, 1.25  # images looked at to tell how large a slot must be; the largest is hardly among them
POLL_SECONDS = 0.005  # between two looks of a worker whether its slot is free


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
        steps = _Steps(self.order, first_step, last_step)
        for images, failures in _stream(self.source, steps, self.device, self.workers, search=not self.fail):
            for failure in self.unreadable.add([UnreadableImage(name, reason) for name, reason in failures]):
                self.report(failure)
            if images is None or (failures and self.fail):
                name, reason = failures[0]
                what = "every image of a batch is unreadable" if images is None else "an image is unreadable"
                raise UserError(f"{what}: {name}: {reason} (find all with: interclr data check)")
            yield images


class _Batches(Protocol):
    """The rows of every batch, in order. (A range of steps may be too long for a list.)"""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[list[int]]: ...


class _Steps:
    def __init__(self, order: Order, first: int, last: int) -> None:
        self.order, self.steps, self.rows = order, range(first, last), dist.slice_of_rank(order.batch)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            rows: list[int] = self.order.indices(step)[self.rows].tolist()
            yield rows


def _stream(
    source: Source, batches: _Batches, device: torch.device, workers: int, search: bool = False
) -> Iterator[Arrival]:
    """Every batch on ``device``. With ``search`` a wholly unreadable batch takes images from elsewhere in the set."""
    workers, slots = _plan(source, batches, device, workers)
    loader = DataLoader(
        _Rows(source, search, slots),
        batch_sampler=_Numbered(batches),
        collate_fn=_as_given,
        num_workers=workers,
        pin_memory=device.type == "cuda" and slots is None,
        prefetch_factor=2 if workers else None,  # a worker that ends a batch has the rows of the next at hand
    )
    arrivals = iter(loader)  # starts the workers: before memory is pinned, which concerns this process only
    try:
        if slots is not None and device.type == "cuda":
            slots.pin(device)
        read = (arrival.unpack(slots) for arrival in arrivals)
        yield from _to_gpu(read, slots, device) if device.type == "cuda" else _to_host(read, slots, device)
    finally:
        if slots is not None:
            slots.free(len(batches))  # a worker that waits for one is to end instead
            slots.unpin(device)


def _to_host(arrivals: Iterable[Arrival], slots: Slots | None, device: torch.device) -> Iterator[Arrival]:
    """Batches in memory of their own: the slots are written again."""
    for number, (images, failures) in enumerate(arrivals):
        if slots is not None:
            images = None if images is None else replace(images, pixels=images.pixels.clone())
            slots.free(number + 1)
        yield None if images is None else images.to(device), failures


def _to_gpu(arrivals: Iterable[Arrival], slots: Slots | None, device: torch.device) -> Iterator[Arrival]:
    """Batches copied one ahead and beside the steps: each is handed out when the copy of the next has been started."""
    beside = torch.cuda.Stream(device)
    copies: deque[torch.cuda.Event] = deque()
    waiting: tuple[Images | None, Failures, torch.cuda.Event] | None = None
    for number, (images, failures) in enumerate(arrivals):
        with torch.cuda.stream(beside):
            moved = None if images is None else _pinned(images).to(device)
            copies.append(beside.record_event())
        if len(copies) == 3:
            copies.popleft().synchronize()  # started two steps ago: it is over
            if slots is not None:
                slots.free(number - 1)
        if waiting is not None:
            yield _hand_over(*waiting, device)
        waiting = moved, failures, copies[-1]
    if waiting is not None:
        yield _hand_over(*waiting, device)


def _pinned(images: Images) -> Images:
    """With all but the pixels in pinned memory, from where a copy lets nobody wait."""
    return images.each(lambda tensor: tensor if tensor is images.pixels else tensor.pin_memory())


def _hand_over(images: Images | None, failures: Failures, copied: torch.cuda.Event, device: torch.device) -> Arrival:
    """To the stream that computes: it waits for the copy, and nobody else gets the memory before it has come past."""
    compute = torch.cuda.current_stream(device)
    compute.wait_event(copied)
    if images is not None:
        for tensor in (images.index, images.pixels, images.size, images.label):
            if tensor is not None:
                tensor.record_stream(compute)
    return images, failures


def _plan(source: Source, batches: _Batches, device: torch.device, workers: int) -> tuple[int, Slots | None]:
    """How many workers there is memory and work for, and the slots they lay their batches into."""
    largest = len(next(iter(batches), ()))
    if workers == 0 or largest == 0:
        return workers, None
    size = largest * 3 * _side_of_slots(source) ** 2
    limit = int(WORKERS_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // _ranks_on_this_machine()
    workers = max(1, min(workers, len(batches), limit // size))
    if device.type not in ("cpu", "cuda"):  # elsewhere we cannot tell when a copy is over
        return workers, None
    try:
        return workers, Slots(min(len(batches), max(SLOTS_LEAST, min(SLOTS, SLOTS_BYTES // size))), size)
    except RuntimeError:  # too little shared memory: each batch comes in memory of its own
        return workers, None


def _side_of_slots(source: Source) -> int:
    """The side of a canvas for all but unusually large images. A batch that has one comes in memory of its own."""
    rows = {round(i * (len(source) - 1) / (PROBES - 1)) for i in range(PROBES)}
    shapes = [image.shape[1:] for row in rows if isinstance(image := _read(source, row), Tensor)]
    largest = max((side for shape in shapes for side in shape), default=CANVAS_STEP)
    inner: Any = source
    while hasattr(inner, "source"):  # a subset
        inner = inner.source
    bound = getattr(inner, "max_side", None) or math.inf
    return _up(max(largest, math.ceil(min(largest * PROBE_MARGIN, bound))), CANVAS_STEP)


class Slots:
    """Shared memory that workers lay batches into, batch ``k`` into slot ``k`` modulo their number once that is free.

    It is allocated and pinned once. Fresh memory for each batch would cost a page fault for every 4 kB, in the worker
    and again in this process, and this process a copy into pinned memory.
    """

    def __init__(self, count: int, size: int) -> None:
        shared = torch.UntypedStorage._new_shared(count * size)
        self.memory = torch.empty(0, dtype=torch.uint8).set_(shared).view(count, size)
        self.freed = torch.zeros(1, dtype=torch.int64).share_memory_()  # so many batches need their slot no longer
        self.is_pinned = False

    def allocate(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """In a worker: memory for batch ``number``, inside its slot where that is large enough."""
        count, size = self.memory.shape
        needed = math.prod(shape)
        if needed > size:
            return torch.empty(shape, dtype=torch.uint8)
        main = multiprocessing.parent_process()
        while number - count >= int(self.freed) and (main is None or main.is_alive()):
            time.sleep(POLL_SECONDS)
        return self.memory[number % count, :needed].view(shape)

    def hold(self, pixels: Tensor) -> bool:
        return pixels.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()

    def view(self, number: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        return self.memory[number % len(self.memory)].as_strided(shape, stride)

    def free(self, count: int) -> None:
        """The first ``count`` batches need their slot no longer."""
        self.freed.fill_(count)

    def pin(self, device: torch.device) -> None:
        """Let the GPU copy from here by itself. Where that is refused, copies are slower and nothing else changes."""
        with torch.cuda.device(device):
            refused = int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 0))
            self.is_pinned = not refused
            if refused:
                with contextlib.suppress(RuntimeError):  # CUDA reports it once more, with the next kernel
                    torch.zeros(1, device=device)

    def unpin(self, device: torch.device) -> None:
        if self.is_pinned:
            torch.cuda.synchronize(device)  # the last copies
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            self.is_pinned = False


@dataclass(frozen=True)
class _Read:
    """A batch on its way between processes. Pixels in a slot stay there; arrays are quicker to send than tensors."""

    number: int
    index: NDArray[np.int64]
    size: NDArray[np.int64] | None
    label: NDArray[np.int64] | None
    pixels: Tensor | None  # None: they lie in the slot, or there are none
    in_slot: tuple[Sequence[int], Sequence[int]] | None  # their shape and stride
    failures: Failures

    def unpack(self, slots: Slots | None) -> Arrival:
        pixels = self.pixels
        if slots is not None and self.in_slot is not None:
            pixels = slots.view(self.number, *self.in_slot)
        if pixels is None:
            return None, self.failures
        size, label = (None if values is None else torch.from_numpy(values) for values in (self.size, self.label))
        return Images(torch.from_numpy(self.index), pixels, size, label), self.failures

    def pin_memory(self) -> _Read:
        """Called by DataLoader."""
        return self if self.pixels is None else replace(self, pixels=self.pixels.pin_memory())


class _Numbered(Sampler[list[tuple[int, list[int]]]]):
    """A whole batch is one item: a worker reads a batch, so that failures can be replaced inside it."""

    def __init__(self, batches: _Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, list[int]]]]:
        for number, rows in enumerate(self.batches):
            yield [(number, rows)]


class _Rows(Dataset[_Read]):
    def __init__(self, source: Source, search: bool, slots: Slots | None) -> None:
        self.source, self.search, self.slots = source, search, slots

    def __getitem__(self, item: tuple[int, list[int]]) -> _Read:
        number, rows = item
        allocate = _fresh if self.slots is None else partial(self.slots.allocate, number)
        index, pixels, size, label, failures = read_batch(self.source, rows, allocate)
        if pixels is None and self.search:
            index, pixels, size, label, failures = self._from_elsewhere(rows, failures, allocate)
        read = _Read(number, index.numpy(), _array(size), _array(label), pixels, None, failures)
        if pixels is not None and self.slots is not None and self.slots.hold(pixels):
            return replace(read, pixels=None, in_slot=(pixels.shape, pixels.stride()))
        return read

    def _from_elsewhere(self, rows: list[int], failures: Failures, allocate: Allocate) -> ReadBatch:
        """A wholly unreadable batch takes the next readable images of the set: a broken folder does not end a run."""
        count = len(self.source)
        for start in range(1, min(count, SEARCH), len(rows)):
            others = [(rows[-1] + start + i) % count for i in range(len(rows))]
            index, pixels, size, label, more = read_batch(self.source, others, allocate)
            failures = failures + more
            if pixels is not None:
                return index, pixels, size, label, failures
        return torch.tensor(rows), None, None, None, failures


def _as_given(items: list[_Read]) -> _Read:
    return items[0]


def _array(tensor: Tensor | None) -> NDArray[np.int64] | None:
    return None if tensor is None else tensor.numpy()


def _fresh(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8)


ReadBatch = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Failures]


def read_batch(source: Source, rows: list[int], allocate: Allocate = _fresh) -> ReadBatch:
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
    following = [good[bisect_left(good, i) % len(good)] for i in range(len(rows))]  # after the last comes the first
    pixels, size = on_canvas([image for i in following if (image := images[i]) is not None], CANVAS_STEP, allocate)
    index = index[following]
    return index, pixels, size, None if source.labels is None else source.labels[index], failures


def on_canvas(images: Sequence[Tensor], step: int = 1, allocate: Allocate = _fresh) -> tuple[Tensor, Tensor | None]:
    """Lay images (3, h, w) of several sizes on one canvas; sizes are None when all are equal.

    Where images lie in memory pixel by pixel, as decoders leave them, so does the canvas: transposing bytes takes a CPU
    several times as long as copying them, and a GPU, which makes floats of them anyway, no time.
    """
    heights, widths = [image.shape[1] for image in images], [image.shape[2] for image in images]
    equal = len(set(heights)) == len(set(widths)) == 1
    height, width = (heights[0], widths[0]) if equal else (_up(max(heights), step), _up(max(widths), step))
    if any(image.stride(0) == 1 for image in images):
        canvas = allocate((len(images), height, width, 3)).permute(0, 3, 1, 2)
    else:
        canvas = allocate((len(images), 3, height, width))
    for row, image, h, w in zip(canvas, images, heights, widths, strict=True):
        row[:, :h, :w] = image
        row[:, h:] = 0
        row[:, :h, w:] = 0
    return canvas, None if equal else torch.tensor([heights, widths]).T.contiguous()


def default_workers() -> int:
    """Every core, shared by the ranks on this machine, and at most 16."""
    return max(1, min((os.cpu_count() or 1) // _ranks_on_this_machine(), 16))


def _ranks_on_this_machine() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


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
        return failure.with_traceback(None)  # which would keep the callers' frames alive, and workers with them


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
    workers = default_workers() if workers is None else workers
    asked = [part.tolist() for part in parts]
    for part, (found, failures) in zip(parts, _stream(images, asked, device, workers), strict=True):
        if unreadable is not None:
            unreadable.add([UnreadableImage(name, reason) for name, reason in failures])
        if found is None:
            found = Images(part, torch.zeros(len(part), 3, CANVAS_STEP, CANVAS_STEP, dtype=torch.uint8))
        own = replace(found, index=part, label=None if images.labels is None else images.labels[part])
        yield (_pinned(own) if device.type == "cuda" else own).to(device)
