"""Some images of a source, renumbered 0…M−1."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from interclr.data.source import Source


def readable_rows(source: Source, unreadable: Collection[str]) -> list[int]:
    """Rows of ``source`` that have none of these names."""
    return [row for row in range(len(source)) if source.name_of(row) not in unreadable]


def readable_part(source: Source, unreadable: Collection[str]) -> Source:
    """``source`` without the images of these names; itself where it has none of them."""
    if not unreadable:
        return source
    rows = readable_rows(source, unreadable)
    return source if len(rows) == len(source) else Subset(source, rows)


class Subset(Source):
    def __init__(self, source: Source, rows: Sequence[int], name: str | None = None) -> None:
        self.source = source
        self.rows = np.asarray(rows, dtype=np.int64)  # no Python objects: worker processes share it
        self.name = name or source.name
        self.classes = source.classes
        self.labels = None if source.labels is None else source.labels[torch.as_tensor(rows, dtype=torch.int64)]

    def __len__(self) -> int:
        return len(self.rows)

    def name_of(self, index: int) -> str:
        return self.source.name_of(int(self.rows[index]))

    def read(self, index: int) -> Tensor:
        return self.source.read(int(self.rows[index]))

    def whole(self) -> Tensor | None:
        pixels = self.source.whole()
        return None if pixels is None else pixels[torch.as_tensor(self.rows, dtype=torch.int64)]

    def bytes_each(self) -> int | None:
        return self.source.bytes_each()

    def encoded(self, index: int) -> bytes | None:
        return self.source.encoded(int(self.rows[index]))

    def _add_to_fingerprint(self, digest: hashlib._Hash) -> None:
        digest.update(self.source.fingerprint().encode())
        digest.update(torch.as_tensor(self.rows, dtype=torch.int64).numpy().tobytes())

    def _add_content(self, digest: hashlib._Hash, rows: Sequence[int]) -> None:
        self.source._add_content(digest, self.rows[np.asarray(rows, dtype=np.int64)].tolist())
