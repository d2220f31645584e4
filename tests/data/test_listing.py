"""Listing: order, odd names, links, and a cache that is fast but never stale."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interclr.data import listing
from interclr.data.listing import cache_folder, list_images
from interclr.data.names import Names
from interclr.types import UserError

ODD_NAMES = ["a b.jpg", "ünïcode.png", "line\nbreak.gif", "<script>alert(1)<.jpg", "UPPER.JPG", "no.dots.in.jpg.jfif"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERCLR_CACHE", str(tmp_path / "cache"))


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def settle(folder: Path) -> None:
    """Pretend the folder was last changed long ago, so that its listing is cached."""
    for path, _, _ in os.walk(folder):
        os.utime(path, (1_000_000_000, 1_000_000_000))


def count_scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    scans: list[Path] = []
    real = listing.scan

    def scan(root: Path) -> listing.Listing:
        scans.append(root)
        return real(root)

    monkeypatch.setattr(listing, "scan", scan)
    return scans


def by_parts(name: str) -> tuple[list[str | int], str]:
    """Text and numbers in turn: what the order means."""
    parts: list[str | int] = [*re.split("([0-9]+)", name)]
    parts[1::2] = map(int, parts[1::2])
    return parts, name


NAMES = st.text(st.sampled_from("ab0129_.\x01\udcff٣"), min_size=1, max_size=8)


@given(st.lists(NAMES, max_size=12))
def test_the_key_orders_as_text_and_numbers_in_turn_do(names: list[str]) -> None:
    assert sorted(names, key=listing.natural) == sorted(names, key=by_parts)


def test_order_is_natural_and_files_come_before_subfolders(tmp_path: Path) -> None:
    root = tmp_path / "images"
    names = ["b10/x.jpg", "b2/x.jpg", "img_10.jpg", "img_2.jpg", "img_01.jpg", "img_1.jpg", "a/deep/down/y.png"]
    touch(*(root / name for name in names))
    expected = ["img_01.jpg", "img_1.jpg", "img_2.jpg", "img_10.jpg", "a/deep/down/y.png", "b2/x.jpg", "b10/x.jpg"]
    assert list(list_images(root).images) == expected


def test_odd_names_survive_and_other_files_are_counted(tmp_path: Path) -> None:
    root = tmp_path / "images"
    touch(*(root / name for name in ODD_NAMES), root / "notes.txt", root / ".hidden.jpg", root / ".git" / "x.jpg")
    with open(os.path.join(os.fsencode(root), b"not-utf8-\xff.jpg"), "wb"):
        pass
    settle(root)
    for _ in range(2):  # scanned, then from the cache
        found = list_images(root)
        assert set(found.images) == {*ODD_NAMES, os.fsdecode(b"not-utf8-\xff.jpg")}
        assert found.other == 2
        assert all((root / name).exists() for name in found.images)


def test_other_files_are_counted_by_extension_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    touch(root / "1.jpg", root / "a.HEIC", root / "a" / "b.heic", root / "a" / "notes", elsewhere / "c.heic")
    touch(root / ".hidden.heic", root / ".git" / "d.heic")
    with open(os.path.join(os.fsencode(root), b"odd.\xff"), "wb"):
        pass
    (root / "linked").symlink_to(elsewhere)
    (elsewhere / "up").symlink_to(root)
    settle(root)
    settle(elsewhere)
    scans = count_scans(monkeypatch)
    for _ in range(2):  # scanned, then from the cache
        found = list_images(root)
        assert found.kinds == {"heic": 3, "": 1, os.fsdecode(b"\xff"): 1}
        assert found.hidden == 1
        assert found.other == 6
    assert len(scans) == 1


def test_a_folder_counts_under_its_own_path_whatever_links_there_are_to_it(tmp_path: Path) -> None:
    """A link that comes first in the alphabet would take the images, and their labels, with it."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    touch(*(root / name for name in ("cat/sub/1.jpg", "cat/2.jpg", "dog/3.jpg")))
    before = list(list_images(root).images)
    (root / "best").symlink_to("cat/sub")
    (root / "zebra").symlink_to("dog")
    touch(outside / "4.jpg", outside / "more" / "5.jpg")
    (root / "bird").symlink_to(outside)
    (outside / "back").symlink_to(root / "cat")
    assert list(list_images(root).images) == ["bird/4.jpg", "bird/more/5.jpg", *before]


def test_links_are_followed_and_cycles_end(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    touch(root / "a" / "1.jpg", elsewhere / "2.jpg")
    (root / "linked").symlink_to(elsewhere)
    (root / "a" / "up").symlink_to(root)
    (root / "dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
    assert list(list_images(root).images) == ["dangling.jpg", "a/1.jpg", "linked/2.jpg"]
    (root / "a" / "self.jpg").symlink_to("self.jpg")
    (root / ".round").symlink_to(".round")
    assert list(list_images(root).images) == ["dangling.jpg", "a/1.jpg", "a/self.jpg", "linked/2.jpg"]


def test_pipes_are_no_images_not_even_through_a_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "link.jpg").symlink_to(tmp_path / "pipe.jpg")
    (tmp_path / "photo.jpg").touch()
    found = list_images(tmp_path)
    assert list(found.images) == ["photo.jpg"]
    assert found.kinds == {listing.NOT_REGULAR: 2}


def test_cache_is_used_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "images"
    touch(root / "a" / "1.jpg", root / "b" / "2.jpg")
    settle(root)
    scans = count_scans(monkeypatch)
    first = list_images(root)
    assert list(list_images(root).images) == list(first.images)
    assert len(scans) == 1
    touch(root / "b" / "3.jpg")
    assert list(list_images(root).images) == ["a/1.jpg", "b/2.jpg", "b/3.jpg"]
    assert len(scans) == 2


def test_folder_changed_a_moment_ago_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "images" / "1.jpg")
    scans = count_scans(monkeypatch)
    list_images(tmp_path / "images")
    list_images(tmp_path / "images")
    assert len(scans) == 2


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_damaged_cache_is_listed_again(tmp_path: Path, damage: bytes | None) -> None:
    root = tmp_path / "images"
    touch(root / "1.jpg")
    settle(root)
    list_images(root)
    (cache,) = cache_folder().glob("*.npz")
    content = cache.read_bytes()
    cache.write_bytes(content[: len(content) // 2] if damage is None else damage)
    assert list(list_images(root).images) == ["1.jpg"]


def test_unwritable_cache_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INTERCLR_CACHE", str(tmp_path / "file" / "cache"))
    touch(tmp_path / "images" / "1.jpg")
    settle(tmp_path / "images")
    assert len(list_images(tmp_path / "images").images) == 1


def test_missing_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot list .*nowhere"):
        list_images(tmp_path / "nowhere")


def test_names_behave_like_a_list() -> None:
    names = Names.of(["a", "", "ü", "line\nbreak"])
    assert list(names) == names.to_list() == ["a", "", "ü", "line\nbreak"]
    assert names[-1] == "line\nbreak"
    assert names[1:3] == ["", "ü"]
    with pytest.raises(IndexError):
        names[4]
    assert list(Names.of([])) == Names.of([]).to_list() == []
    with pytest.raises(ValueError, match="NUL"):
        Names(names.blob[:-1])
