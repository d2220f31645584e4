"""``check`` finds every kind of odd file and survives all of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from interclr.data import listing
from interclr.data.check import CheckReport, check
from interclr.data.decode import ORIENTATION_TAG
from interclr.data.parallel import Progress
from interclr.data.source import ArraySource


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERCLR_CACHE", str(tmp_path_factory.mktemp("cache")))


def noise(seed: int, mode: str = "RGB") -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((64, 48), Image.Resampling.BICUBIC).convert(mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    root.mkdir()
    noise(0).save(root / "good.jpg")
    noise(1).save(root / "also good.png")
    (root / "empty.jpg").touch()
    (root / "empty too.jpg").touch()
    (root / "text.jpg").write_text("<html>not found</html>")
    noise(2).save(root / "whole.jpg")
    (root / "half.jpg").write_bytes((root / "whole.jpg").read_bytes()[:-300])
    noise(3).save(root / "half.png")
    (root / "half.png").write_bytes((root / "half.png").read_bytes()[:-300])
    noise(4).save(root / "moving.gif", save_all=True, append_images=[noise(5)])
    noise(6, "CMYK").save(root / "cmyk.jpg")
    Image.fromarray(np.random.default_rng(0).integers(0, 65536, (40, 40), dtype=np.uint16)).save(root / "deep.png")
    noise(7, "RGBA").save(root / "alpha.png")
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 3
    noise(8).save(root / "turned.jpg", exif=exif)
    noise(9).resize((8, 9)).save(root / "<tiny>.png")
    shutil.copy(root / "good.jpg", root / "good copy.jpg")
    noise(1).save(root / "also good.bmp")  # the same pixels in another file
    (root / "dangling.jpg").symlink_to(root / "nowhere")
    return root


class Bars:
    """What each bar was told, under its name; there is one at a time."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[int, int]]] = {}
        self.shown = 0

    @contextmanager
    def working(self, what: str) -> Iterator[Progress]:
        assert not self.shown
        assert what not in self.told
        calls = self.told[what] = []
        self.shown += 1
        yield lambda done, total: calls.append((done, total))
        self.shown -= 1


def names(report: CheckReport, kind: str) -> list[str]:
    return [name for name, _ in report.findings[kind]]


@pytest.mark.parametrize("workers", [1, 3])
def test_every_kind_is_found(folder: Path, workers: int) -> None:
    bars = Bars()
    report = check(folder, workers=workers, working=bars.working)
    assert names(report, "zero size") == ["empty too.jpg", "empty.jpg"]
    assert names(report, "unreadable") == ["dangling.jpg", "text.jpg"]
    assert names(report, "truncated") == ["half.jpg", "half.png"]
    assert names(report, "animated") == ["moving.gif"]
    assert names(report, "CMYK") == ["cmyk.jpg"]
    assert names(report, "16-bit") == ["deep.png"]
    assert names(report, "alpha") == ["alpha.png"]
    assert names(report, "turned") == ["turned.jpg"]
    assert names(report, "small") == ["<tiny>.png"]
    assert report.duplicate_files == [["good copy.jpg", "good.jpg"]]
    assert report.duplicate_pixels == [["also good.bmp", "also good.png"]]
    assert report.unreadable == 6
    assert report.count == 17
    assert list(bars.told) == ["checking", "comparing pictures"]
    assert bars.told["checking"] == [(done, 17) for done in range(1, 18)]
    assert bars.told["comparing pictures"] == [(17, 17)]  # so few are compared at once


def test_summary_and_json(folder: Path) -> None:
    report = check(folder)
    rows = {kind: (count, examples) for kind, count, examples in report.summary()}
    assert rows["duplicate files, surplus"] == (1, "good copy.jpg = good.jpg")
    assert rows["small"] == (1, "<tiny>.png (8×9)")
    assert rows["zero size"][0] == 2
    assert json.loads(report.to_json())["findings"]["CMYK"][0]["name"] == "cmyk.jpg"


def test_files_that_are_not_read_are_counted_by_kind(tmp_path: Path) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    (tmp_path / "more").mkdir()
    for name in ("b.HEIC", "more/c.heic", "more/notes", ".hidden.heic"):
        (tmp_path / name).write_bytes(b"x")
    report = check(tmp_path)
    assert report.summary() == [("not read", 3, "2 .heic, 1 without extension")]
    assert json.loads(report.to_json())["other_files"] == {".heic": 2, "without extension": 1}


def test_the_folder_is_walked_once_and_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    noise(0).save(root / "a.png")
    (elsewhere / "b.heic").touch()
    (root / "linked").symlink_to(elsewhere)
    (elsewhere / "up").symlink_to(root)
    scans: list[Path] = []
    monkeypatch.setattr(listing, "scan", lambda folder, real=listing.scan: scans.append(folder) or real(folder))
    monkeypatch.setattr("os.walk", lambda *_: pytest.fail("walked again"))
    assert check(root).other == {".heic": 1}
    assert scans == [root.resolve()]


def test_a_webp_that_is_cut_off_is_told_from_junk(tmp_path: Path) -> None:
    noise(0).save(tmp_path / "whole.webp")
    content = (tmp_path / "whole.webp").read_bytes()
    (tmp_path / "half.webp").write_bytes(content[: len(content) // 2])
    (tmp_path / "junk.webp").write_bytes(content[:16] + bytes(len(content) - 16))
    (tmp_path / "text.webp").write_text("<html>not found</html>")
    report = check(tmp_path)
    assert names(report, "truncated") == ["half.webp"]
    assert names(report, "unreadable") == ["junk.webp", "text.webp"]
    assert report.unreadable == 3


def test_deep_colour_is_found_though_pillow_hides_it(tmp_path: Path) -> None:
    import struct
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = b"".join(b"\0" + bytes(40 * 6) for _ in range(40))
    header = struct.pack(">IIBBBBB", 40, 40, 16, 2, 0, 0, 0)  # 16 bits, RGB
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    (tmp_path / "deep.ppm").write_bytes(b"P6 # 8\n# 9 9 9\n40 40\n65535\n" + bytes(40 * 40 * 6))
    (tmp_path / "flat.ppm").write_bytes(b"P6\n40 40\n255\n" + b"4096 " * 960)
    assert names(check(tmp_path), "16-bit") == ["deep.png", "deep.ppm"]


def test_sixteen_bits_that_hold_less_are_nearly_black(tmp_path: Path) -> None:
    values = np.linspace(0, 4095, 40 * 40).reshape(40, 40)
    Image.fromarray(values.astype(np.uint16)).save(tmp_path / "twelve.png")
    Image.fromarray((values * 16).astype(np.uint16)).save(tmp_path / "sixteen.png")
    found = check(tmp_path).findings
    assert [name for name, _ in found["16-bit"]] == ["sixteen.png", "twelve.png"]
    assert [name for name, _ in found["16-bit, nearly black"]] == ["twelve.png"]


def test_near_duplicates_are_found_and_exact_ones_are_not_among_them(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(4):
        scene = Image.fromarray(random.integers(0, 200, (6, 6, 3), dtype=np.uint8)).resize((60, 60))
        scene.save(tmp_path / f"{number}.png")
    with Image.open(tmp_path / "2.png") as scene:
        scene.resize((48, 40)).save(tmp_path / "smaller.jpg", quality=70)
        scene.save(tmp_path / "same.bmp")
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    report = check(tmp_path)
    assert report.near_duplicates is not None
    assert [pair[:2] for pair in report.near_duplicates] == [("2.png", "smaller.jpg")]  # for its exact copy as well
    assert report.duplicate_pixels == [["2.png", "same.bmp"]]
    (row,) = (row for row in report.summary() if row[0] == "near duplicates, pairs")
    assert row[1] == 1
    assert " ≈ smaller.jpg (0.9" in row[2]
    told = json.loads(report.to_json())["near_duplicates"]
    assert [pair["images"] for pair in told] == [["2.png", "smaller.jpg"]]


def test_that_too_many_images_are_not_compared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interclr.data.check.MOST_COMPARED", 2)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 200, (6, 6, 3), dtype=np.uint8)).resize((60, 60))
    for number in range(3):
        picture.resize((60 + number, 60)).save(tmp_path / f"{number}.png")
    report = check(tmp_path)
    assert report.near_duplicates is None
    assert json.loads(report.to_json())["near_duplicates"] is None
    assert ("near duplicates", 0, "not looked for among more than 2 images") in report.summary()


def test_near_duplicates_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 200, (6, 6, 3), dtype=np.uint8)).resize((60, 60))
    for number in range(2):
        picture.resize((60 + number, 60)).save(tmp_path / f"{number}.png")
    assert check(tmp_path).near_duplicates
    monkeypatch.setattr("interclr.data.check.near_copies", lambda *_: pytest.fail("compared"))
    monkeypatch.setattr("interclr.data.check.tiny", lambda *_: pytest.fail("made to be compared"))
    bars = Bars()
    report = check(tmp_path, working=bars.working, copies=False)
    assert list(bars.told) == ["checking"]
    assert report.near_duplicates is None
    assert report.summary() == [("near duplicates", 0, "not looked for")]


def test_how_to_leave_a_long_comparison_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interclr.data.check.LONG", 2)
    for number in range(2):
        noise(number).save(tmp_path / f"{number}.png")
    bars = Bars()
    check(tmp_path, working=bars.working)
    assert list(bars.told) == ["checking", "comparing pictures (skip: --no-copies)"]


def test_floats_are_named_as_such(tmp_path: Path) -> None:
    values = np.linspace(0, 1, 40 * 40, dtype=np.float32).reshape(40, 40)
    Image.fromarray(values).save(tmp_path / "float.tif")
    Image.fromarray(values / 20).save(tmp_path / "dark.tif")
    Image.fromarray((values * 65535).astype(np.uint16)).save(tmp_path / "integers.tif")
    report = check(tmp_path)
    assert names(report, "float") == ["dark.tif", "float.tif"]
    assert names(report, "float, nearly black") == ["dark.tif"]
    assert names(report, "16-bit") == ["integers.tif"]


def test_what_is_no_file_is_told_from_files_that_are_not_read(tmp_path: Path) -> None:
    noise(0).save(tmp_path / "photo.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "notes.txt").touch()
    assert check(tmp_path).summary() == [("not read", 2, "1 .txt, 1 not a regular file")]


def test_a_pipe_in_a_list_is_not_waited_for(tmp_path: Path) -> None:
    noise(0).save(tmp_path / "photo.jfif", "JPEG")
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "list.txt").write_text("photo.jfif\npipe.jpg\n")
    report = check(tmp_path / "list.txt")
    assert report.findings == {"unreadable": [("pipe.jpg", "not a regular file")]}


def test_all_splits_are_checked(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        noise(0).save(tmp_path / split / "same.png")
    assert check(tmp_path).duplicate_files == [["train/same.png", "val/same.png"]]


def test_an_image_beside_class_folders_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(("train/a/0.png", "train/b/0.png", "train/b/1.png", "val/a/0.png", "val/b/0.png")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        noise(number).save(tmp_path / name)
    assert check(tmp_path).summary() == []
    noise(9).save(tmp_path / "train" / "stray.png")
    assert names(check(tmp_path), "outside the class folders") == ["train/stray.png"]
    for number in range(10, 14):  # rather a folder of photographs with albums in it
        noise(number).save(tmp_path / "train" / f"{number}.png")
    assert check(tmp_path).findings == {}


def test_clean_folder_has_nothing_to_say(tmp_path: Path) -> None:
    noise(0).save(tmp_path / "a.jpg")
    noise(1).save(tmp_path / "b.jpg")
    report = check(tmp_path)
    assert report.summary() == []
    assert report.unreadable == 0


def test_arrays_are_checked_for_equal_pixels() -> None:
    pixels = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    pixels[4] = pixels[1]
    report = check(ArraySource(pixels, name="numbers train"))
    assert report.duplicate_pixels == [["numbers/train/00001", "numbers/train/00004"]]
    assert report.duplicate_files == []
