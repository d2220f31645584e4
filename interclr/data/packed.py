"""Write a packed store (see ``packed_store``): every image is decoded once, so all that is inside can be read."""

from __future__ import annotations

import io
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image
from torch import Tensor

from interclr.data.arrays import whole_folder
from interclr.data.decode import open_image, orientation, render, to_tensor, unreadable_as
from interclr.data.packed_store import VERSION, Header, PackedArray, PackedSource, is_packed, open_packed, shard_name
from interclr.data.parallel import Progress, ordered_map
from interclr.data.source import ArraySource, Source, UnreadableImage
from interclr.types import UserError

__all__ = ["PackReport", "PackedArray", "PackedSource", "is_packed", "open_packed", "pack"]

FORMATS = ("auto", "jpeg", "raw")

# 'auto' packs raw up to this size where all images have the same: there JPEG saves little and costs quality.
RAW_SIDE = 128
PROBES = 32


@dataclass(frozen=True)
class PackReport:
    folder: Path
    format: str
    count: int
    bytes: int
    untouched: int  # JPEG files stored byte for byte
    unreadable: tuple[tuple[str, str], ...]  # name and reason; these images are left out
    seconds: float

    def __str__(self) -> str:
        kept = f", {self.untouched:,} JPEG files byte for byte" if self.untouched else ""
        if self.format == "jpeg" and self.untouched < self.count:
            kept += f", {self.count - self.untouched:,} encoded anew as JPEG, which changes pixels a little"
        lines = [f"{self.count:,} images in {self.folder} ({self.format}, {self.bytes / 1e6:,.1f} MB{kept})"]
        if self.unreadable:
            lines.append(f"{len(self.unreadable):,} unreadable images left out (pack.json names them all):")
            lines += [f"  {name}: {reason}" for name, reason in self.unreadable[:10]]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Packed:
    payload: bytes
    size: tuple[int, int]  # height, width
    untouched: bool = False


class _SizesDiffer(Exception):
    pass


def pack(
    source: Source,
    destination: Path,
    *,
    image_format: str = "auto",
    max_side: int | None = None,
    quality: int = 92,
    shard_bytes: int = 1 << 30,
    workers: int | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Pack ``source`` into the new folder ``destination``, which appears whole at the end or not at all.

    ``jpeg`` keeps plain JPEG files byte for byte where they need no shrinking and no turning; all else is encoded anew.
    ``raw`` keeps the pixels as they are and asks for images of one size. ``auto`` is raw for small images of one size.
    """
    if image_format not in FORMATS:
        raise UserError(f"there is no packed format {image_format!r}; it is one of {', '.join(FORMATS)}")
    if max_side is not None and max_side < 1:
        raise UserError(f"max_side must be at least 1, got {max_side}")
    started = time.perf_counter()
    formats = [image_format] if image_format != "auto" else ["raw", "jpeg"] if _looks_uniform(source) else ["jpeg"]
    for attempt in formats:
        try:
            with whole_folder(destination) as folder:
                writer = _Writer(folder, source, attempt, max_side, quality, shard_bytes)
                writer.run(workers, progress)
        except _SizesDiffer as error:
            if attempt != formats[-1]:
                continue
            raise UserError(f"{error}; the raw format needs images of one size, use the jpeg format") from None
        return PackReport(
            destination,
            attempt,
            len(writer.kept),
            writer.offsets[-1],
            writer.untouched,
            tuple(writer.unreadable),
            time.perf_counter() - started,
        )
    raise AssertionError("unreachable")


class _Writer:
    def __init__(
        self, folder: Path, source: Source, image_format: str, max_side: int | None, quality: int, shard_bytes: int
    ) -> None:
        self.folder, self.source, self.format = folder, source, image_format
        self.max_side, self.quality = max_side, quality
        self.shard_bytes = shard_bytes if image_format == "jpeg" else None  # raw: one array, one file
        self.kept: list[int] = []
        self.offsets = [0]
        self.shards: list[int] = []
        self.shape: tuple[int, int] | None = None
        self.untouched = 0
        self.unreadable: list[tuple[str, str]] = []
        self._file: BinaryIO | None = None

    def run(self, workers: int | None, progress: Progress | None) -> None:
        total = len(self.source)
        try:
            for index, packed in enumerate(ordered_map(self._prepare, total, workers)):
                if isinstance(packed, UnreadableImage):
                    self.unreadable.append((packed.name, packed.reason))
                else:
                    self._append(index, packed)
                if progress is not None:
                    progress(index + 1, total)
        finally:
            if self._file is not None:
                self._file.close()
        if not self.kept:
            first = f"; the first, {self.unreadable[0][0]}: {self.unreadable[0][1]}" if self.unreadable else ""
            raise UserError(f"none of the {total} images of {self.source.name} can be read{first}")
        self._describe()

    def _prepare(self, index: int) -> _Packed | UnreadableImage:
        """Runs in a thread: everything that costs time, nothing that touches the store."""
        name = self.source.name_of(index)
        try:
            with unreadable_as(name):
                data = self.source.encoded(index)
                if data is None:
                    pixels = self.source.read(index).permute(1, 2, 0).numpy()
                    return self._encode(render(Image.fromarray(pixels), self.max_side))
                image = open_image(data, name)
                plain = image.format == "JPEG" and image.mode in ("RGB", "L") and orientation(image) == 1
                fits = self.max_side is None or max(image.size) <= self.max_side
                rendered = render(image, self.max_side)  # decoded even if the bytes are kept: that is the check
                if self.format == "jpeg" and plain and fits:
                    return _Packed(data, (rendered.height, rendered.width), untouched=True)
                return self._encode(rendered)
        except UnreadableImage as error:
            return error

    def _encode(self, image: Image.Image) -> _Packed:
        size = (image.height, image.width)
        if self.format == "raw":
            return _Packed(_raw(to_tensor(image)), size)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=self.quality, subsampling=0)
        return _Packed(buffer.getvalue(), size)

    def _append(self, index: int, packed: _Packed) -> None:
        if self.format == "raw":
            if self.shape is not None and self.shape != packed.size:
                (h, w), (other_h, other_w) = self.shape, packed.size
                raise _SizesDiffer(f"{self.source.name_of(index)} is {other_w}×{other_h}, images before it {w}×{h}")
            self.shape = packed.size
        full = self.shard_bytes is not None and self.shards and self.shards[-1] >= self.shard_bytes
        if self._file is None or full:
            if self._file is not None:
                self._file.close()
            self._file = open(self.folder / shard_name(len(self.shards)), "wb")  # noqa: SIM115 - closed by run
            self.shards.append(0)
        self._file.write(packed.payload)
        self.shards[-1] += len(packed.payload)
        self.offsets.append(self.offsets[-1] + len(packed.payload))
        self.kept.append(index)
        self.untouched += packed.untouched

    def _describe(self) -> None:
        source = self.source
        with open(self.folder / "names.jsonl", "w") as file:
            file.writelines(f"{json.dumps(source.name_of(index))}\n" for index in self.kept)
        if source.labels is not None:
            np.save(self.folder / "labels.npy", source.labels[self.kept].numpy(), allow_pickle=False)
        if self.format == "jpeg":
            np.save(self.folder / "offsets.npy", np.array(self.offsets, dtype=np.int64), allow_pickle=False)
        Header(
            version=VERSION,
            format=self.format,
            count=len(self.kept),
            name=Path(source.name).name,  # of a folder not its whole path: the store may be shared
            classes=None if source.classes is None else list(source.classes),
            max_side=self.max_side,
            shape=None if self.shape is None else list(self.shape),
            shards=self.shards,
            unreadable=[list(entry) for entry in self.unreadable],
        ).save(self.folder)


def _raw(pixels: Tensor) -> bytes:
    return pixels.numpy().tobytes()


def _looks_uniform(source: Source) -> bool:
    """Whether a few images from all over the source are small and of one size."""
    if isinstance(source, ArraySource):
        return True
    sizes = set()
    for index in np.linspace(0, len(source) - 1, min(len(source), PROBES)).astype(int).tolist():
        try:
            sizes.add(tuple(source.read(index).shape))
        except UnreadableImage:
            continue
    return len(sizes) == 1 and max(sizes.pop()) <= RAW_SIDE
