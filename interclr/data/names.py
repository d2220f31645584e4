"""A million names in one array of bytes: far less memory than a list of strings, and saved and loaded at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Names(Sequence[str]):
    """An immutable sequence of file names. Each ends with a NUL byte, the one byte no file name can contain."""

    def __init__(self, blob: Bytes) -> None:
        if blob.size and blob[-1] != 0:
            raise ValueError("the names do not end with a NUL byte")
        self.blob = blob
        self.ends = np.flatnonzero(blob == 0)  # (N,) int64

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        # fsencode keeps names that are not valid UTF-8, as Linux allows them, readable again
        return cls(np.frombuffer(os.fsencode("".join(f"{name}\0" for name in names)), dtype=np.uint8))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        start = int(self.ends[position - 1]) + 1 if position else 0
        return os.fsdecode(self.blob[start : int(self.ends[position])].tobytes())

    def to_list(self) -> list[str]:
        """All names at once, much faster than one after the other."""
        return os.fsdecode(self.blob.tobytes()).split("\0")[:-1]
