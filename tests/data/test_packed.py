"""Packing and reading back: nothing changes on the way, nothing half is left behind, nothing is overwritten."""

from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from interclr.data import packed as pack_module
from interclr.data.builtin import open_source
from interclr.data.decode import ORIENTATION_TAG, decode
from interclr.data.packed import PackedArray, PackedSource, open_packed, pack
from interclr.data.source import ArraySource, UnreadableImage
from interclr.types import UserError

ODD_NAMES = ["a/space here.jpg", "a/ünï.jpg", "b/line\nbreak.jpg", "b/<script>.jpg"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERCLR_CACHE", str(tmp_path_factory.mktemp("cache")))


def noise(seed: int, width: int, height: int, mode: str = "RGB") -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def save(image: Image.Image, path: Path, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    folder = tmp_path / "photographs"
    for number, name in enumerate(ODD_NAMES):
        save(noise(number, 60 + 10 * number, 50), folder / name, quality=90)
    save(noise(9, 40, 30, "L"), folder / "b" / "zz grey.jpg")
    return folder


def test_plain_jpegs_are_kept_byte_for_byte(photographs: Path, tmp_path: Path) -> None:
    source = open_source(photographs)
    calls: list[tuple[int, int]] = []
    report = pack(source, tmp_path / "packed", progress=lambda done, total: calls.append((done, total)))
    assert (report.format, report.count, report.untouched, report.unreadable) == ("jpeg", 5, 5, ())
    assert calls == [(done, 5) for done in range(1, 6)]
    packed = open_source(tmp_path / "packed")
    assert isinstance(packed, PackedSource)
    assert packed.fingerprint() == source.fingerprint()
    assert (packed.classes, packed.name) == (source.classes, "photographs")
    assert packed.labels is not None
    assert source.labels is not None
    assert torch.equal(packed.labels, source.labels)
    for index in range(5):
        assert packed.name_of(index) == source.name_of(index)
        assert packed.encoded(index) == source.encoded(index)
        assert torch.equal(packed.read(index), source.read(index))
    copy = pickle.loads(pickle.dumps(packed))
    assert torch.equal(copy.read(4), source.read(4))
    assert len(pickle.dumps(packed)) < 1000  # another process opens the files, it is not sent their contents


def test_packed_splits_in_one_folder(photographs: Path, tmp_path: Path) -> None:
    pack(open_source(photographs), tmp_path / "packed" / "train")
    pack(open_source(photographs / "b"), tmp_path / "packed" / "val")
    assert len(open_source(tmp_path / "packed")) == 5
    assert len(open_source(tmp_path / "packed", "test")) == 3
    with pytest.raises(UserError, match="without splits"):
        open_source(tmp_path / "packed" / "train", "test")


def test_shards_are_cut_between_images(photographs: Path, tmp_path: Path) -> None:
    source = open_source(photographs)
    pack(source, tmp_path / "packed", shard_bytes=1, workers=1)
    assert len(list((tmp_path / "packed").glob("images-*.bin"))) == 5
    packed = open_packed(tmp_path / "packed")
    assert all(torch.equal(packed.read(index), source.read(index)) for index in range(-5, 5))
    with pytest.raises(IndexError):
        packed.read(5)


def test_all_else_is_encoded_anew_and_close(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 6
    save(noise(0, 200, 140), folder / "turned.jpg", exif=exif, quality=95)
    save(noise(1, 200, 140, "CMYK"), folder / "cmyk.jpg", quality=95)
    save(noise(2, 200, 140, "RGBA"), folder / "alpha.png")
    save(noise(3, 900, 300), folder / "large.jpg", quality=95)
    source = open_source(folder)
    report = pack(source, tmp_path / "packed", max_side=300, image_format="jpeg", quality=95)
    assert report.untouched == 0
    for shrunk in (None, 100):
        packed, direct = open_source(tmp_path / "packed", max_side=shrunk), open_source(folder, max_side=shrunk or 300)
        for index in range(4):
            assert packed.read(index).shape == direct.read(index).shape
            assert (packed.read(index).float() - direct.read(index).float()).abs().mean() < 3


def test_raw_is_exact_and_memory_mapped(tmp_path: Path) -> None:
    for number in range(6):
        save(noise(number, 20, 16), tmp_path / "images" / f"{number % 2}" / f"{number}.png")
    source = open_source(tmp_path / "images")
    assert pack(source, tmp_path / "packed").format == "raw"
    packed = open_source(tmp_path / "packed")
    assert isinstance(packed, PackedArray)
    assert isinstance(packed, ArraySource)
    assert packed.pixels.shape == (6, 3, 16, 20)
    assert all(torch.equal(packed.read(index), source.read(index)) for index in range(6))
    assert [packed.name_of(index) for index in range(6)] == [source.name_of(index) for index in range(6)]
    copy = pickle.loads(pickle.dumps(packed))
    assert torch.equal(copy.pixels, packed.pixels)
    assert len(pickle.dumps(packed)) < 1000


def test_array_source_packs_raw(tmp_path: Path) -> None:
    source = open_source("synthetic:20")
    pack(source, tmp_path / "packed")
    packed = open_packed(tmp_path / "packed")
    assert isinstance(packed, PackedArray)
    assert isinstance(source, ArraySource)
    assert torch.equal(packed.pixels, source.pixels)
    assert packed.fingerprint() == source.fingerprint()


def test_sizes_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        save(noise(number, 20, 16 + (number == 1)), tmp_path / "images" / f"{number}.png")
    source = open_source(tmp_path / "images")
    with pytest.raises(UserError, match=r"1\.png is 20×17, images before it 20×16.*use the jpeg format"):
        pack(source, tmp_path / "packed", image_format="raw")
    assert not (tmp_path / "packed").exists()
    monkeypatch.setattr(pack_module, "PROBES", 2)  # the odd one out is not among those looked at first
    assert pack(source, tmp_path / "packed").format == "jpeg"


def test_unreadable_images_are_named_and_left_out(photographs: Path, tmp_path: Path) -> None:
    (photographs / "a" / "broken.jpg").write_bytes((photographs / ODD_NAMES[0]).read_bytes()[:500])
    (photographs / "b" / "empty.jpg").touch()
    report = pack(open_source(photographs), tmp_path / "packed")
    assert report.count == 5
    assert [name for name, _ in report.unreadable] == ["a/broken.jpg", "b/empty.jpg"]
    assert "5 images in" in str(report)
    assert "2 unreadable images left out" in str(report)
    assert "  b/empty.jpg: the file is empty" in str(report)
    listed = json.loads((tmp_path / "packed" / "pack.json").read_text())["unreadable"]
    assert listed == [list(entry) for entry in report.unreadable]
    packed = open_packed(tmp_path / "packed")
    assert packed.labels is not None
    assert packed.labels.tolist() == [0, 0, 1, 1, 1]
    assert all(packed.read(index).numel() for index in range(5))


def test_impossible_options(photographs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no packed format 'webp'; it is one of auto, jpeg, raw"):
        pack(open_source(photographs), tmp_path / "packed", image_format="webp")
    with pytest.raises(UserError, match="max_side"):
        pack(open_source(photographs), tmp_path / "packed", max_side=0)


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "x.jpg").touch()
    with pytest.raises(UserError, match=r"none of the 1 images.*x\.jpg: the file is empty"):
        pack(open_source(tmp_path / "images"), tmp_path / "packed")


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupted_pack_leaves_nothing(photographs: Path, tmp_path: Path, workers: int) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(open_source(photographs), tmp_path / "out" / "packed", workers=workers, progress=interrupt)
    assert list((tmp_path / "out").iterdir()) == []


def test_destination_in_use_is_refused_and_an_empty_one_is_taken(photographs: Path, tmp_path: Path) -> None:
    destination = tmp_path / "packed"
    destination.mkdir()
    pack(open_source(photographs), destination)
    before = sorted(path.name for path in destination.iterdir())
    with pytest.raises(UserError, match="not empty"):
        pack(open_source(photographs), destination)
    assert sorted(path.name for path in destination.iterdir()) == before
    with pytest.raises(UserError, match="not empty"):
        pack(open_source(photographs), destination / "pack.json")


def test_full_disk_and_no_permission(photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="cannot write"):
        pack(open_source(photographs), photographs / ODD_NAMES[0] / "below a file")

    def full(writer: object, index: int, packed: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack_module._Writer, "_append", full)
    with pytest.raises(UserError, match=r"cannot write .*packed: No space left on device"):
        pack(open_source(photographs), tmp_path / "out" / "packed")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("file", ["pack.json", "names.jsonl", "offsets.npy", "images-00000.bin", "labels.npy"])
def test_damaged_store_says_so(photographs: Path, tmp_path: Path, file: str) -> None:
    pack(open_source(photographs), tmp_path / "packed")
    path = tmp_path / "packed" / file
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="damaged"):
        open_packed(tmp_path / "packed")


@pytest.mark.parametrize("image_format", ["jpeg", "raw"])
def test_labels_of_another_number_of_images_are_damage(tmp_path: Path, image_format: str) -> None:
    folder = tmp_path / "images"
    for number in range(4):
        (folder / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"class{number % 2}" / f"{number}.png")
    pack(open_source(folder), tmp_path / "packed", image_format=image_format)
    np.save(tmp_path / "packed" / "labels.npy", np.zeros(3, np.int64))
    with pytest.raises(UserError, match=r"damaged: labels\.npy holds \(3,\) labels for 4 images"):
        open_packed(tmp_path / "packed")


def test_store_of_another_version(photographs: Path, tmp_path: Path) -> None:
    pack(open_source(photographs), tmp_path / "packed")
    path = tmp_path / "packed" / "pack.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 99'))
    with pytest.raises(UserError, match="version 99"):
        open_packed(tmp_path / "packed")


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_torchvision_decodes_jpeg_as_pillow_does(
    tmp_path: Path, mode: str, subsampling: int, progressive: bool
) -> None:
    """The store reads with torchvision, folders with Pillow. With other libjpeg versions they may differ by a level."""
    folder = tmp_path / "images"
    save(noise(5, 501, 375, mode), folder / "x.jpg", subsampling=subsampling, progressive=progressive, quality=85)
    pack(open_source(folder), tmp_path / "packed", image_format="jpeg")
    difference = open_packed(tmp_path / "packed").read(0).int() - decode((folder / "x.jpg").read_bytes()).int()
    assert difference.abs().max() <= 2


@pytest.mark.parametrize("packed_side", [None, 100])
@pytest.mark.parametrize("max_side", [None, 64, 100, 200])
def test_only_larger_images_are_shrunk_when_read(tmp_path: Path, packed_side: int | None, max_side: int | None) -> None:
    """Each image is what decoding its bytes plainly gives, whichever way it was read (see the test above)."""
    folder = tmp_path / "images"
    for number, (width, height) in enumerate([(64, 64), (65, 30), (30, 65), (100, 20), (20, 101), (300, 150), (1, 1)]):
        save(noise(number, width, height), folder / f"{number}.jpg", quality=90, progressive=number % 2 == 1)
    save(noise(8, 80, 60, "L"), folder / "grey.jpg")
    pack(open_source(folder), tmp_path / "packed", image_format="jpeg", max_side=packed_side)
    packed = open_packed(tmp_path / "packed", max_side)
    assert isinstance(packed, PackedSource)
    for index in range(len(packed)):
        image = packed.read(index)
        plainly = decode(packed.encoded(index), max_side=max_side)
        assert image.shape == plainly.shape
        assert (image.int() - plainly.int()).abs().max() <= 2
        assert image.permute(1, 2, 0).is_contiguous()  # as the loader lays it on its canvas without transposing
        assert max_side is None or max(image.shape) <= max_side


@pytest.mark.parametrize("max_side", [None, 40])
def test_bytes_that_have_changed_are_an_unreadable_image(
    photographs: Path, tmp_path: Path, max_side: int | None
) -> None:
    pack(open_source(photographs), tmp_path / "packed")
    shard = tmp_path / "packed" / "images-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    packed = open_packed(tmp_path / "packed", max_side)
    with pytest.raises(UnreadableImage, match="space here"):
        packed.read(0)
