"""The images a report shows: read once, and from that one reading embedded, shrunk and compared byte for byte."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

import torch
from PIL import Image
from torch import Tensor, nn

from interclr.config import Settings
from interclr.data.canvas import on_canvas
from interclr.data.copies import tiny
from interclr.data.source import Source, UnreadableImage
from interclr.data.views import centre_crop
from interclr.features import embed_all
from interclr.report.thumbnails import square
from interclr.screen import Screen
from interclr.types import Images

BATCH = 128


@dataclass
class Gallery:
    """Images by position 0…M−1; ``rows`` are their indices in the training set."""

    source: Source
    side: int  # of the thumbnails
    rows: list[int] = field(default_factory=list)
    squares: list[Image.Image] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the pixels: equal for exact duplicates
    tiny: list[Tensor] = field(default_factory=list)  # (3, t, t) uint8: nearly equal for near ones
    unreadable: int = 0
    features: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # (M, F), on the CPU

    def __len__(self) -> int:
        return len(self.rows)

    def names(self) -> list[str]:
        """File names as valid text: bytes that are not UTF-8 show as U+FFFD."""
        found = (self.source.name_of(row) for row in self.rows)
        return [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in found]

    def labels(self) -> Tensor | None:
        """(M,) true labels, −1 where unknown; None where none of these images has one."""
        if self.source.labels is None:
            return None
        labels = self.source.labels[torch.tensor(self.rows, dtype=torch.int64)]
        return labels if bool((labels >= 0).any()) else None


def read_gallery(
    source: Source,
    rows: list[int],
    backbone: nn.Module,
    settings: Settings,
    side: int,
    device: torch.device,
    screen: Screen,
) -> Gallery:
    """Read and embed the images ``rows``; those that cannot be read are left out and counted."""
    gallery = Gallery(source, side)
    data = settings.data

    def transform(batch: Images) -> Tensor:
        return centre_crop(batch, int(data.image_size), data.mean, data.std)

    with screen.working(f"embedding {len(rows):,} images") as progress:
        batches = _batches(gallery, rows)
        first = next(batches, None)
        if first is not None:
            gallery.features = embed_all(
                backbone.to(device),
                (images.to(device) for images in chain([first], batches)),
                transform,
                progress=lambda done: progress(done, len(rows)),
            ).cpu()
    return gallery


def _batches(gallery: Gallery, rows: list[int]) -> Iterator[Images]:
    def look(row: int) -> tuple[int, Tensor, Image.Image, bytes, Tensor] | None:
        try:
            pixels = gallery.source.read(row)
        except UnreadableImage:
            return None
        content = f"{tuple(pixels.shape)}".encode() + pixels.contiguous().numpy().tobytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        return row, pixels, square(pixels, gallery.side), digest, tiny(pixels)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # PIL decodes outside the interpreter lock
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            seen = [found for found in pool.map(look, part) if found is not None]
            gallery.unreadable += len(part) - len(seen)
            if not seen:
                continue
            part, images, squares, digests, small = (list(column) for column in zip(*seen, strict=True))
            gallery.rows += part
            gallery.squares += squares
            gallery.digests += digests
            gallery.tiny += small
            pixels, size = on_canvas(images, 32)
            yield Images(torch.tensor(part), pixels, size)
