"""What every set of images looks like to the rest of the package: a length, names, labels and ``read(index)``."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from interclr.data.decode import UnreadableImage, decode_interleaved, read_bytes
from interclr.data.names import Names

HASHED_AT_ONCE = 4096  # images
__all__ = ["ArraySource", "FileSource", "Source", "UnreadableImage"]


class Source(ABC):
    """Images with stable indices 0..N-1: the memory bank depends on them."""

    name: str  # for people: 'cifar10 train', the folder's path
    labels: Tensor | None  # (N,) int64, -1 where unknown; None when there are no labels at all
    classes: tuple[str, ...] | None
    # Pictures beside these of kinds that are not read, by extension: somebody may expect their .heic to be seen.
    not_read: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name_of(self, index: int) -> str:
        """The stable identifier of an image: its relative path, or for instance ``cifar10/train/00017``."""

    @abstractmethod
    def read(self, index: int) -> Tensor:
        """The image as (3, h, w) uint8 RGB, in memory as it comes. Raises ``UnreadableImage``."""

    def encoded(self, index: int) -> bytes | None:
        """The bytes of the image's file, or None where there is no file. Raises ``UnreadableImage``."""
        return None

    def whole(self) -> Tensor | None:
        """All images as one (N, 3, H, W) uint8 tensor where they are one already, so that nobody reads them singly."""
        return None

    def bytes_each(self) -> int | None:
        """Of one image where all are of one size and lie in memory; None: nobody knows before they are read."""
        return None

    def fingerprint(self) -> str:
        """A cheap hash that tells on resume whether the data are still the same. Pixels of files are not read."""
        digest = hashlib.sha256(f"{len(self)}\n".encode())
        self._add_to_fingerprint(digest)
        if self.labels is not None:
            digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()[:32]

    @abstractmethod
    def _add_to_fingerprint(self, digest: hashlib._Hash) -> None: ...

    def content(self) -> str:
        """A hash that changes with the images themselves: what was computed from them may be kept under it."""
        digest = hashlib.sha256(self.fingerprint().encode())
        self._add_content(digest, range(len(self)))
        return digest.hexdigest()

    def _add_content(self, digest: hashlib._Hash, rows: Sequence[int]) -> None:
        digest.update(os.urandom(16))  # a source that cannot tell is never the same


class ArraySource(Source):
    """All images in one uint8 tensor, in memory or memory-mapped."""

    def __init__(
        self,
        pixels: Tensor,  # (N, 3, H, W) uint8
        labels: Tensor | None = None,
        *,
        name: str,
        classes: tuple[str, ...] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        assert pixels.ndim == 4, pixels.shape
        assert pixels.shape[1] == 3, pixels.shape
        assert pixels.dtype == torch.uint8, pixels.dtype
        assert labels is None or labels.shape == pixels.shape[:1], labels.shape
        self.pixels = pixels
        self.labels = None if labels is None else labels.to(torch.int64)
        self.name = name
        self.classes = classes
        self._names = names

    def __len__(self) -> int:
        return self.pixels.shape[0]

    def name_of(self, index: int) -> str:
        if self._names is not None:
            return self._names[index]
        return f"{self.name.replace(' ', '/')}/{range(len(self))[index]:05d}"

    def read(self, index: int) -> Tensor:
        return self.pixels[index]

    def whole(self) -> Tensor:
        return self.pixels

    def bytes_each(self) -> int:
        return self.pixels.shape[1:].numel()

    def _add_to_fingerprint(self, digest: hashlib._Hash) -> None:
        digest.update(str(tuple(self.pixels.shape)).encode())
        # A few images stand for all: reading everything would cost more than it tells.
        for index in np.linspace(0, len(self) - 1, min(len(self), 64)).astype(int).tolist():
            digest.update(self.name_of(index).encode(errors="surrogateescape"))
            digest.update(self.pixels[index].numpy().tobytes())

    def _add_content(self, digest: hashlib._Hash, rows: Sequence[int]) -> None:
        for part in torch.as_tensor(rows, dtype=torch.int64).split(HASHED_AT_ONCE):
            digest.update(self.pixels[part].numpy().tobytes())


class FileSource(Source):
    """One image file for each name, relative to ``folder``; files are decoded when they are read."""

    def __init__(
        self,
        folder: Path,
        names: Names,
        labels: Tensor | None = None,
        *,
        name: str | None = None,
        classes: tuple[str, ...] | None = None,
        max_side: int | None = None,
    ) -> None:
        assert labels is None or labels.shape == (len(names),), labels.shape
        self.folder = folder
        self.names = names
        self.labels = labels
        self.name = name or str(folder)
        self.classes = classes
        self.max_side = max_side

    def __len__(self) -> int:
        return len(self.names)

    def name_of(self, index: int) -> str:
        return self.names[index]

    def path_of(self, index: int) -> str:
        return os.path.join(self.folder, self.names[index])

    def encoded(self, index: int) -> bytes:
        return read_bytes(self.path_of(index), self.names[index])

    def read(self, index: int) -> Tensor:
        return decode_interleaved(self.encoded(index), self.names[index], self.max_side)

    def _add_to_fingerprint(self, digest: hashlib._Hash) -> None:
        digest.update(self.names.blob.tobytes())

    def _add_content(self, digest: hashlib._Hash, rows: Sequence[int]) -> None:
        digest.update(f"{self.max_side};".encode())
        for row in rows:
            digest.update(about_file(self.path_of(row)))


def about_file(path: str | Path) -> bytes:
    """Size and time of a file, which change with what is in it."""
    try:
        about = os.stat(path)
    except OSError:
        return b"missing;"
    return f"{about.st_size},{about.st_mtime_ns};".encode()
