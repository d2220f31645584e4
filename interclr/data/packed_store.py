"""A packed store: the images of a source in a few large memory-mapped files, checked once and quick to read ever after.

The folder holds ``pack.json`` (what it is), ``names.jsonl``, ``labels.npy`` (where there are labels) and shards
``images-00000.bin``. In the ``jpeg`` format a shard is one JPEG after the other and ``offsets.npy`` tells where each
begins; in the ``raw`` format all images have one size and a single shard holds their pixels, ready to use.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interclr.data.decode import decode_interleaved, jpeg_size, unreadable_as
from interclr.data.names import Names
from interclr.data.source import ArraySource, Source, UnreadableImage, about_file
from interclr.types import UserError

VERSION = 1


@dataclass(frozen=True)
class Header:
    """The contents of ``pack.json``."""

    version: int
    format: str  # 'jpeg' or 'raw'
    count: int
    name: str
    classes: list[str] | None
    max_side: int | None
    shape: list[int] | None  # raw: height and width
    shards: list[int]  # bytes of each
    unreadable: list[list[str]]  # name and reason of every image left out

    def save(self, folder: Path) -> None:
        (folder / "pack.json").write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, folder: Path) -> Header:
        try:
            values: dict[str, Any] = json.loads((folder / "pack.json").read_text())
            version = values["version"]
            if version != VERSION:
                raise UserError(f"{folder} is a packed store of version {version}; this release reads {VERSION}")
            header = cls(**values)
            for number, size in enumerate(header.shards):
                found = (folder / shard_name(number)).stat().st_size
                if found != size:
                    raise ValueError(f"{shard_name(number)} has {found} bytes instead of {size}")
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"the packed store {folder} is damaged: {error}") from None
        return header


def shard_name(number: int) -> str:
    return f"images-{number:05d}.bin"


def is_packed(folder: Path) -> bool:
    return (folder / "pack.json").is_file()


def open_packed(folder: Path, max_side: int | None = None) -> PackedSource | PackedArray:
    """Open a packed store in whichever format it is."""
    header = Header.load(folder)
    try:
        return PackedArray(folder, header) if header.format == "raw" else PackedSource(folder, header, max_side)
    except (OSError, ValueError, EOFError, AssertionError) as error:
        raise UserError(f"the packed store {folder} is damaged: {error}") from None


def _read_names(folder: Path, header: Header) -> Names:
    lines = (folder / "names.jsonl").read_text().splitlines()  # JSON, since a name may contain a line break
    names = Names.of(json.loads(f"[{','.join(lines)}]"))
    if len(names) != header.count:
        raise ValueError(f"names.jsonl holds {len(names)} names instead of {header.count}")
    return names


def _add_files(digest: hashlib._Hash, folder: Path) -> None:
    """The images of a store are as old as its files; reading them would take as long as what is to be saved."""
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode(errors="surrogateescape") + about_file(path))


def _read_labels(folder: Path, header: Header) -> Tensor | None:
    file = folder / "labels.npy"
    if not file.exists():
        return None
    labels = torch.from_numpy(np.load(file, allow_pickle=False))
    if labels.shape != (header.count,):
        raise ValueError(f"labels.npy holds {tuple(labels.shape)} labels for {header.count} images")
    return labels


class PackedArray(ArraySource):
    """The ``raw`` format: an ``ArraySource`` whose pixels are memory-mapped."""

    def __init__(self, folder: Path, header: Header) -> None:
        assert header.shape is not None
        shape = (header.count, 3, *header.shape)
        # Copy-on-write: torch wants writable memory, and the file stays as it is.
        pixels = np.memmap(folder / shard_name(0), dtype=np.uint8, mode="c", shape=shape)
        super().__init__(
            torch.from_numpy(pixels),
            _read_labels(folder, header),
            name=header.name,
            classes=None if header.classes is None else tuple(header.classes),
            names=_read_names(folder, header),
        )
        self.folder = folder

    def _add_content(self, digest: hashlib._Hash, rows: Sequence[int]) -> None:
        _add_files(digest, self.folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_packed, (self.folder,)  # another process maps the file anew instead of receiving a copy


class PackedSource(Source):
    """The ``jpeg`` format."""

    def __init__(self, folder: Path, header: Header, max_side: int | None = None) -> None:
        self.folder = folder
        self.name = header.name
        self.classes = None if header.classes is None else tuple(header.classes)
        self.labels = _read_labels(folder, header)
        self.names = _read_names(folder, header)
        self.max_side = max_side
        self.stored_bytes = sum(header.shards)
        self._largest = header.max_side  # no stored image is larger; None: not known
        self._shards = [np.memmap(folder / shard_name(i), np.uint8, "c") for i in range(len(header.shards))]
        self._shard_starts = [0, *accumulate(header.shards)][:-1]
        self._offsets = np.load(folder / "offsets.npy", allow_pickle=False)  # (N + 1,) over all shards end to end
        if self._offsets.shape != (header.count + 1,) or self._offsets[-1] != sum(header.shards):
            raise ValueError("offsets.npy does not fit the shards")

    def _add_content(self, digest: hashlib._Hash, rows: Sequence[int]) -> None:
        digest.update(f"{self.max_side};".encode())
        _add_files(digest, self.folder)

    def __len__(self) -> int:
        return len(self.names)

    def name_of(self, index: int) -> str:
        return self.names[index]

    def _stored(self, index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        position = range(len(self))[index]
        start, end = int(self._offsets[position]), int(self._offsets[position + 1])
        shard = bisect_right(self._shard_starts, start) - 1
        base = self._shard_starts[shard]
        return self._shards[shard][start - base : end - base]

    def encoded(self, index: int) -> bytes:
        return self._stored(index).tobytes()

    def read(self, index: int) -> Tensor:
        name, stored = self.names[index], self._stored(index)
        if self._too_large(stored):
            return decode_interleaved(stored.tobytes(), name, self.max_side)
        # Imported here, since it is slow and a raw store never needs it. It decodes as Pillow does, without copies.
        from torchvision.io import ImageReadMode, decode_jpeg

        with unreadable_as(name):
            image: Tensor = decode_jpeg(torch.from_numpy(stored), mode=ImageReadMode.RGB)
            if image.numel() == 0:
                raise UnreadableImage(name, "zero size")
            return image

    def _too_large(self, stored: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
        """Whether the image has to be shrunk. Asked of each: most images of a set usually need not be."""
        if self.max_side is None or (self._largest is not None and self._largest <= self.max_side):
            return False
        size = jpeg_size(stored)
        return size is None or max(size) > self.max_side  # without a header the general path says what is wrong

    def _add_to_fingerprint(self, digest: Any) -> None:
        digest.update(self.names.blob.tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return open_packed, (self.folder, self.max_side)
