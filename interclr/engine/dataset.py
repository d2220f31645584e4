"""From what the user named to a loader, and to the labelled sets the k-NN monitor looks at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from interclr.config import DataConfig
from interclr.data.builtin import open_source
from interclr.data.canvas import Canvas
from interclr.data.hold_out import HOLD_OUT_SEED, a_fifth_of_every_class, split_off
from interclr.data.loader import Loader, Order, ResidentLoader
from interclr.data.packed import is_packed
from interclr.data.reading import Unreadable, read_all
from interclr.data.source import Source, UnreadableImage
from interclr.data.stream import StreamLoader
from interclr.data.subset import Subset
from interclr.features import evenly
from interclr.screen import Screen
from interclr.types import UserError

HOST_LIMIT = 4 << 30  # bytes of pixels kept in the memory of the host
GPU_SHARE = 0.25  # of the GPU's free memory that pixels may take
MONITOR_QUERIES = 2_000  # of the images that evaluate tests on, where there is no test split
LOOKED_AT = 2_048  # images that tell whether all are the same


@dataclass(frozen=True, slots=True)
class Facts:
    """What settings marked ``auto`` are chosen from."""

    images: int
    side: int  # median shorter side, in pixels
    device: str  # cpu or cuda


@dataclass
class TrainingData:
    """A training set and, where labels exist, what k-NN is measured on: (bank rows of train, query set)."""

    source: Source
    images: Canvas | Source  # the training images: resident, or read when needed
    queries: Canvas | Source | None
    bank_rows: Tensor | None  # rows of train that serve as the k-NN bank; None: no labels, no k-NN
    unreadable: Unreadable
    fingerprint: str = ""  # of all that was found, before anything was held out or left out

    @property
    def labels(self) -> Tensor | None:
        return self.source.labels

    def loader(self, batch: int, seed: int, device: torch.device, config: DataConfig, screen: Screen) -> Loader:
        order = Order(len(self.source), batch, seed)
        if isinstance(self.images, Canvas):
            return ResidentLoader(self.images, order)
        workers = None if config.workers == "auto" else config.workers
        stream = StreamLoader(self.images, order, device, workers, config.unreadable == "fail")
        stream.report = lambda failure: screen.warn(
            f"unreadable, replaced within its batch: {failure.name}: {failure.reason}"
        )
        return stream


def open_training_source(config: DataConfig) -> Source:
    max_side = None if config.max_side == "auto" else config.max_side
    source = open_source(config.source, "train", config.root, max_side)
    if len(source) - config.hold_out < 2:
        raise UserError(
            f"data.source={config.source}: {len(source)} image(s) found"
            + (f", {config.hold_out} held out" if config.hold_out else "")
            + "; at least 2 are needed to compare images with each other"
        )
    return source


def median_side(source: Source) -> int:
    """Median shorter side of a few images spread over the set."""
    rows = sorted({round(i * (len(source) - 1) / 31) for i in range(32)})
    sides = []
    for row in rows:
        try:
            sides.append(min(source.read(row).shape[1:]))
        except UnreadableImage:
            continue
    if not sides:
        raise UserError(f"none of {len(rows)} images looked at in {source.name} can be read: interclr data check")
    return int(median(sides))


def prepare(source: Source, config: DataConfig, device: torch.device, screen: Screen) -> TrainingData:
    unreadable, fingerprint = Unreadable(), source.fingerprint()
    held: Source | None = None
    if config.hold_out:
        source, held = split_off(source, config.hold_out)
    # Drawn before unreadable images are left out, as evaluate does: afterwards it would be other images.
    tested = None if source.labels is None else a_fifth_of_every_class(source.labels)
    images: Canvas | Source = source
    if _fits(source, config, device):
        images, kept = _resident(source, config, device, screen, unreadable)
        if len(kept) < len(source):
            source, tested = Subset(source, kept), None if tested is None else tested[kept]
    queries, bank_rows = _monitor_sets(source, images, tested, held, config, device, screen)
    return TrainingData(source, images, queries, bank_rows, unreadable, fingerprint)


def _resident(
    source: Source, config: DataConfig, device: torch.device, screen: Screen, unreadable: Unreadable
) -> tuple[Canvas, list[int]]:
    """The images that can be read, and their rows."""
    with screen.working(f"reading {len(source):,} images") as progress:
        canvas, kept = read_all(source, progress, unreadable)
    if unreadable.reasons:
        text = f"{len(unreadable.reasons)} of {len(source)} images are unreadable, the first is {unreadable.first}"
        if config.unreadable == "fail":
            raise UserError(f"{text} (data.unreadable=fail; see all with: interclr data check)")
        screen.warn(f"{text}; they are left out (see all with: interclr data check)")
        if len(kept) < 2:
            raise UserError(f"{text}; at least 2 readable images are needed")
    looked_at = evenly(len(canvas), LOOKED_AT).tolist()
    if all(torch.equal(canvas.pixels[row], canvas.pixels[0]) for row in looked_at):  # most sets: ends at the second
        screen.warn(f"all {len(looked_at):,} images looked at are the same: interclr data check")
    return canvas.to(device), kept


def _fits(source: Source, config: DataConfig, device: torch.device) -> bool:
    if config.resident != "auto":
        return config.resident
    side = config.max_side if isinstance(config.max_side, int) else 512
    each = source.bytes_each() or 3 * side * side
    limit = HOST_LIMIT if device.type == "cpu" else int(GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    return each * len(source) <= limit


def _monitor_sets(
    source: Source,
    images: Canvas | Source,
    tested: Tensor | None,
    held: Source | None,
    config: DataConfig,
    device: torch.device,
    screen: Screen,
) -> tuple[Canvas | Source | None, Tensor | None]:
    """Queries: the held-out images, else the test split, else those of the training images that evaluate tests on.

    The latter are not in the bank, none of them, also where there are so many that only some are asked for.
    """
    labels = source.labels
    if labels is None or tested is None or bool((labels < 0).all()):
        return None, None
    known = (labels >= 0).nonzero().flatten()
    _tell_classes(source, labels[known], screen)
    test = held if held is not None else _test_split(config)
    if test is not None and test.labels is not None and bool((test.labels >= 0).any()):
        return _labelled_queries(test, config, device, screen), known
    rows = tested.nonzero().flatten()
    if len(labels[rows].unique()) < min(2, len(labels[known].unique())):  # evaluate refuses these, too
        return None, None
    others = (~tested & (labels >= 0)).nonzero().flatten()
    which = "those"
    if len(rows) > MONITOR_QUERIES:
        which = f"some of the {len(rows):,}"
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(HOLD_OUT_SEED))
        rows = rows[order[:MONITOR_QUERIES]].sort().values
    screen.say(
        f"no test split: k-NN is measured on {len(rows):,} of the {len(known):,} labelled images, {which} that "
        f"interclr evaluate tests on (a fifth of every class), against the other {len(others):,}"
    )
    queries = images.rows(rows) if isinstance(images, Canvas) else Subset(images, rows.tolist())
    return queries, others


def _tell_classes(source: Source, labels: Tensor, screen: Screen) -> None:
    """Folders may be albums and not classes: what figures by labels mean then is for the reader to judge."""
    counts = labels.bincount()
    most = int(counts.argmax())
    name = source.classes[most] if source.classes is not None else f"number {most}"
    screen.say(
        f"labels: {int((counts > 0).sum()):,} classes of {len(labels):,} images, the commonest ({name}) is "
        f"{100 * counts[most] / len(labels):.0f} % of them; they are used to measure, never to train"
    )


def _labelled_queries(test: Source, config: DataConfig, device: torch.device, screen: Screen) -> Canvas | Source:
    assert test.labels is not None
    if bool((test.labels < 0).any()):
        test = Subset(test, (test.labels >= 0).nonzero().flatten().tolist())
    if not _fits(test, config, device):
        return test
    unreadable = Unreadable()
    canvas, _ = read_all(test, unreadable=unreadable)
    if unreadable.reasons:
        count = len(unreadable.reasons)
        screen.warn(f"{count} images for k-NN are unreadable and left out, the first is {unreadable.first}")
    return canvas.to(device)


def _test_split(config: DataConfig) -> Source | None:
    if Path(config.source).is_file() or is_packed(Path(config.source)):
        return None  # a list and a packed store are one set each
    try:
        max_side = None if config.max_side == "auto" else config.max_side
        return open_source(config.source, "test", config.root, max_side)
    except UserError:
        return None
