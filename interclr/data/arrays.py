"""Small built-in sets on disk: plain uint8 and int64 ``.npy`` files in one folder, memory-mapped when opened."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from interclr.data.source import ArraySource
from interclr.types import UserError

Split = tuple[NDArray[np.uint8], NDArray[np.int64]]  # pixels (N, 3, H, W), labels (N,)


@contextmanager
def whole_folder(destination: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``destination`` at the end, or vanishes: the real name never stands for half."""
    try:
        if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
            raise UserError(f"{destination} exists and is not empty; remove it or choose another place")
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.partial")
        temporary.mkdir()
    except OSError as error:
        raise UserError(f"cannot write {destination}: {error.strerror}") from None
    try:
        yield temporary
        for file in temporary.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        os.replace(temporary, destination)  # replaces an empty folder
    except OSError as error:
        raise UserError(f"cannot write {destination}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_arrays(folder: Path, splits: dict[str, Split], classes: tuple[str, ...]) -> None:
    with whole_folder(folder) as temporary:
        for split, (pixels, labels) in splits.items():
            np.save(temporary / f"{split}-pixels.npy", pixels, allow_pickle=False)
            np.save(temporary / f"{split}-labels.npy", labels, allow_pickle=False)
        (temporary / "classes.json").write_text(json.dumps(classes))


def open_arrays(folder: Path, split: str, name: str) -> ArraySource:
    try:
        # Copy-on-write: torch wants writable memory, and the file stays as it is.
        pixels = np.load(folder / f"{split}-pixels.npy", mmap_mode="c", allow_pickle=False)
        labels = np.load(folder / f"{split}-labels.npy", allow_pickle=False)
        classes = tuple(json.loads((folder / "classes.json").read_text()))
        if pixels.ndim != 4 or pixels.dtype != np.uint8 or labels.shape != pixels.shape[:1]:
            raise ValueError("unexpected shapes")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{folder} is damaged ({error}); remove it and get it again") from None
    return ArraySource(torch.from_numpy(pixels), torch.from_numpy(labels), name=f"{name} {split}", classes=classes)
