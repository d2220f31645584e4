"""Folders and list files as sources: layouts, labels, splits and what is said when something is wrong."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image

from interclr.data.builtin import open_source
from interclr.data.source import FileSource, UnreadableImage
from interclr.types import UserError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERCLR_CACHE", str(tmp_path_factory.mktemp("cache")))


def make(root: Path, *names: str) -> None:
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 4), (number, 0, 0)).save(path, "PNG")


def names_of(source: FileSource) -> list[str]:
    return [source.name_of(index) for index in range(len(source))]


def open_files(spec: Path, split: str = "train") -> FileSource:
    source = open_source(spec, split)
    assert isinstance(source, FileSource)
    return source


def test_flat_folder_has_no_labels(tmp_path: Path) -> None:
    make(tmp_path, "b.png", "a.png")
    source = open_files(tmp_path)
    assert names_of(source) == ["a.png", "b.png"]
    assert source.labels is None
    assert source.classes is None
    assert source.read(0).shape == (3, 4, 6)
    assert source.read(0)[0, 0, 0] == 1


@pytest.mark.parametrize("names", [("one/a.png", "one/b.png"), ("one/a.png", "two/b.png", "c.png")])
def test_one_subfolder_or_loose_images_mean_no_labels(tmp_path: Path, names: tuple[str, ...]) -> None:
    make(tmp_path, *names)
    assert open_files(tmp_path).labels is None


def test_class_folders_are_numbered_as_torchvision_does(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    make(tmp_path, "class10/a.png", "class2/deep/b.png", "class2/c.png", "class1/d.png")
    source = open_files(tmp_path)
    reference = ImageFolder(str(tmp_path))
    assert source.classes == tuple(reference.classes)
    assert source.labels is not None
    found = dict(zip(names_of(source), source.labels.tolist(), strict=True))
    assert found == {str(Path(path).relative_to(tmp_path)): label for path, label in reference.samples}


def test_splits_share_their_classes(tmp_path: Path) -> None:
    make(tmp_path, "train/a/1.png", "train/b/2.png", "train/c/3.png", "val/a/4.png", "val/c/5.png")
    train, test = open_files(tmp_path), open_files(tmp_path, "test")
    assert train.classes == test.classes == ("a", "b", "c")
    assert test.labels is not None
    assert test.labels.tolist() == [0, 2]
    assert names_of(open_files(tmp_path, "val")) == ["a/4.png", "c/5.png"]


def test_the_only_class_of_a_split_is_one_where_another_split_has_more(tmp_path: Path) -> None:
    make(tmp_path / "test", "train/a/1.png", "train/b/2.png", "train/c/3.png", "test/b/4.png")
    make(tmp_path / "train", "train/a/1.png", "train/a/2.png", "val/a/3.png", "val/b/4.png")
    for folder, split, labels, classes in (("test", "test", [1], "abc"), ("train", "train", [0, 0], "ab")):
        source = open_files(tmp_path / folder, split)
        assert source.labels is not None
        assert source.labels.tolist() == labels
        assert source.classes == tuple(classes)


@pytest.mark.parametrize("names", [("train/all/1.png", "test/all/2.png"), ("train/train/1.png", "test/test/2.png")])
def test_one_subfolder_in_each_split_is_no_class(tmp_path: Path, names: tuple[str, str]) -> None:
    make(tmp_path, *names)
    assert open_files(tmp_path).labels is None
    assert open_files(tmp_path, "test").labels is None


def test_folders_without_images_make_no_class_of_the_one_that_has_them(tmp_path: Path) -> None:
    """As detection's train/images and train/labels, or the results of somebody beside the images of a split."""
    make(tmp_path, "train/images/1.png", "train/images/2.png", "val/images/3.png")
    for name in ("train/labels", "val/labels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").touch()
    assert open_files(tmp_path).labels is None
    assert open_files(tmp_path, "test").labels is None


def test_a_test_folder_of_another_name_than_every_class_is_unlabelled(tmp_path: Path) -> None:
    make(tmp_path, "train/a/1.png", "train/b/2.png", "test/unknown/3.png")
    assert open_files(tmp_path, "test").labels is None


def test_split_that_is_not_there(tmp_path: Path) -> None:
    make(tmp_path, "a.png")
    with pytest.raises(UserError, match=r"no split 'test'.*train/ and val/ or test/"):
        open_source(tmp_path, "test")
    make(tmp_path, "train/a.png", "test/b.png")
    with pytest.raises(UserError, match="no split 'unlabelled'"):
        open_source(tmp_path, "unlabelled")


def test_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"no images in .*jpg, jpeg, png.*1 other files"):
        open_source(tmp_path)


def test_single_image_or_split_of_a_list_is_explained(tmp_path: Path) -> None:
    make(tmp_path, "a.png")
    with pytest.raises(UserError, match=r"a\.png is a single image; name a folder"):
        open_source(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png\n")
    with pytest.raises(UserError, match="one list without splits"):
        open_source(tmp_path / "list.txt", "test")


def test_one_image_is_a_source(tmp_path: Path) -> None:
    make(tmp_path, "only.png")
    assert len(open_source(tmp_path)) == 1


def test_broken_and_vanished_files_are_unreadable(tmp_path: Path) -> None:
    make(tmp_path, "a.png", "b.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    source = open_source(tmp_path)
    with pytest.raises(UnreadableImage, match=r"b\.png: not an image"):
        source.read(1)
    (tmp_path / "a.png").unlink()
    with pytest.raises(UnreadableImage, match=r"a\.png: No such file"):
        source.read(0)


def test_fingerprint_follows_names_and_labels_not_the_place(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        make(tmp_path / folder, "x/a.png", "y/b.png")
    same = open_source(tmp_path / "one").fingerprint()
    assert open_source(tmp_path / "two").fingerprint() == same
    assert pickle.loads(pickle.dumps(open_source(tmp_path / "one"))).fingerprint() == same
    make(tmp_path / "two", "y/c.png")
    assert open_source(tmp_path / "two").fingerprint() != same


@pytest.mark.parametrize(
    ("text", "labels", "classes"),
    [
        ("sub/a b.png\nc,d.png\n", None, None),
        ("sub/a b.png 3\nc,d.png 0\n", [1, 0], ("0", "3")),
        ("sub/a b.png\t3\nc,d.png\t-1\n", [0, -1], ("3",)),
        ("sub/a b.png,cat\r\nc,d.png,\r\n", [0, -1], ("cat",)),
        ('path,label\nsub/a b.png,zebra\n"c,d.png",big ape\n', [1, 0], ("big ape", "zebra")),
        ('label;extra;path\n7;x;sub/a b.png\n8;y;"c,d.png"\n', [0, 1], ("7", "8")),
        ("\ufefffiles to use\n# a comment\n\nsub/a b.png cat,0.9\n'c,d.png' dog\n", [0, 1], ("cat", "dog")),
    ],
)
def test_lists(tmp_path: Path, text: str, labels: list[int] | None, classes: tuple[str, ...] | None) -> None:
    make(tmp_path, "sub/a b.png", "c,d.png")
    (tmp_path / "list.csv").write_bytes(text.encode())
    source = open_files(tmp_path / "list.csv")
    assert names_of(source) == ["sub/a b.png", "c,d.png"]
    assert (None if source.labels is None else source.labels.tolist()) == labels
    assert source.classes == classes
    assert source.read(1)[0, 0, 0] == 1


def test_list_with_absolute_paths_keeps_its_order(tmp_path: Path) -> None:
    make(tmp_path / "images", "a.png", "b.png")
    (tmp_path / "list.txt").write_text(f"{tmp_path}/images/b.png\n{tmp_path}/images/a.png\n")
    assert torch.equal(open_source(tmp_path / "list.txt").read(0), open_source(tmp_path / "images").read(1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.png\nb.png\nnowhere/c.png\n", r"2 of the 3 files named in .* do not exist; the first is 'b\.png'"),
        ("a.png\nwhat is this\n", "line 2: no image path in 'what is this'"),
        ("a.png -3\n", "negative"),
        ("\n", "names no images"),
        ("a\0.\0p\0n\0g\0", "not plain text"),
    ],
)
def test_bad_lists(tmp_path: Path, text: str, message: str) -> None:
    make(tmp_path, "a.png")
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        open_source(tmp_path / "list.txt")


def test_identifiers_as_labels_are_numbered_densely(tmp_path: Path) -> None:
    """Labels such as 2000000007 would otherwise size tables of votes."""
    for name in ("a.png", "b.png", "c.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "list.csv").write_text("a.png,2000000007\nb.png,\nc.png,40000\n")
    source = open_source(tmp_path / "list.csv")
    assert source.labels is not None
    assert source.labels.tolist() == [1, -1, 0]
    assert source.classes == ("40000", "2000000007")


def test_a_devkit_given_as_a_folder_is_not_a_set_of_classes(tmp_path: Path) -> None:
    year = tmp_path / "VOCdevkit" / "VOC2007"
    for part in ("JPEGImages", "Annotations", "ImageSets/Main", "SegmentationClass"):
        (year / part).mkdir(parents=True)
    for name in ("000001", "000002"):
        Image.new("RGB", (8, 8)).save(year / "JPEGImages" / f"{name}.jpg")
        Image.new("RGB", (8, 8)).save(year / "SegmentationClass" / f"{name}.png")
    (year / "ImageSets" / "Main" / "trainval.txt").write_text("000001\n")
    (year / "ImageSets" / "Main" / "test.txt").write_text("000002\n")
    for folder in (tmp_path, tmp_path / "VOCdevkit", year):
        train, test = open_source(folder), open_source(folder, "test")
        assert (train.labels, test.labels) == (None, None)
        assert [train.name_of(0), test.name_of(0)] == ["VOC2007/JPEGImages/000001.jpg", "VOC2007/JPEGImages/000002.jpg"]
