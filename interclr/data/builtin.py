"""The sets known by name, and ``open_source``: one way to open whatever the user names."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from interclr.data import download
from interclr.data.arrays import open_arrays
from interclr.data.folder import open_folder, split_folder, splits_of_folder
from interclr.data.list_file import open_list
from interclr.data.listing import EXTENSIONS
from interclr.data.names import Names
from interclr.data.packed_store import is_packed, open_packed
from interclr.data.source import ArraySource, FileSource, Source
from interclr.data.synthetic import CLASSES, generate
from interclr.types import UserError

Opener = Callable[[Path, str, int | None], Source]  # root, split ('train' or 'test'), max_side

SYNTHETIC = r"synthetic(:\d+)?"
SYNTHETIC_COUNT = 10_000
SYNTHETIC_TEST_SHARE = 4  # one test image for every four training images
SYNTHETIC_SEED = {"train": 0, "test": 1}


class NotThere(UserError):
    """There is nothing of that name or path."""


@contextmanager
def images_of_a_run() -> Iterator[None]:
    """A run knows its images by their path: where that is gone, the error says how to name the new one."""
    try:
        yield
    except NotThere as error:
        raise UserError(f"{error}; where the run's images have been moved, add --data NEWPLACE") from None


def open_source(
    spec: str | Path, split: str = "train", root: Path | None = None, max_side: int | None = None
) -> Source:
    """Open a built-in set by name, or a folder, a list file or a packed store by path.

    ``root`` is where built-in sets lie, ``$INTERCLR_DATA`` or ``./data`` by default. ``synthetic:500`` is the synthetic
    set with 500 training images. A folder called like a built-in set is reached as ``./cifar10``.
    """
    name = str(spec)
    root = data_root() if root is None else root
    if re.fullmatch(SYNTHETIC, name):
        return _synthetic(name, _known_split(name, split))
    if name in BUILT_IN:
        return BUILT_IN[name](root, _known_split(name, split), max_side)
    path = Path(spec).expanduser()
    try:
        return _open_path(path, split, max_side)
    except FileNotFoundError:
        raise NotThere(_not_found(name, path)) from None
    except OSError as error:
        raise UserError(f"cannot open {error.filename or path}: {error.strerror}") from None


def in_full(spec: str) -> str:
    """A built-in name as it is, a path from the root on: what names the same set in any working directory."""
    known = spec in BUILT_IN or re.fullmatch(SYNTHETIC, spec)
    return spec if known else str(Path(spec).expanduser().absolute())


def _open_path(path: Path, split: str, max_side: int | None) -> Source:
    path.stat()  # raises where there is nothing, or nothing we may see
    if is_packed(path):
        if split != "train":
            raise UserError(f"{path} is one packed store without splits; pack {split!r} separately and name that store")
        return open_packed(path, max_side)
    if path.is_dir() and (parts := voc_parts(path)) is not None:
        return _voc_folder(*parts, _known_split(str(path), split), str(path), max_side)
    if path.is_dir():
        images = split_folder(path, split)
        return open_packed(images, max_side) if is_packed(images) else open_folder(path, split, max_side)
    if path.suffix[1:].lower() in EXTENSIONS:
        raise UserError(f"{path} is a single image; name a folder of images, or a text file that lists them")
    if split != "train":
        raise UserError(f"{path} is one list without splits; name the list of {split!r} itself")
    return open_list(path, max_side)


def get(name: str, root: Path | None = None, say: Callable[[str], None] = print) -> None:
    """Download a built-in set into ``root``; nothing happens where it is already there."""
    root = data_root() if root is None else root
    if name not in BUILT_IN:
        close = difflib.get_close_matches(name, BUILT_IN, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(BUILT_IN)}"
        raise UserError(f"there is no data set {name!r} to get; {hint}")
    if name not in download.GETTERS:
        raise UserError(f"{name} cannot be downloaded freely; {HOW_TO_PLACE[name].format(root=root)}")
    download.GETTERS[name](root, say)


def data_root() -> Path:
    return Path(os.environ.get("INTERCLR_DATA") or "data")


def _known_split(name: str, split: str) -> str:
    if split not in ("train", "val", "test"):
        raise UserError(f"{name} has no split {split!r}; it has train and test")
    return "train" if split == "train" else "test"


def _not_found(name: str, path: Path) -> str:
    close = difflib.get_close_matches(name.lower(), ["synthetic", *BUILT_IN], n=3)
    if os.sep in name or not close:
        known = ", ".join(["synthetic", *BUILT_IN])
        return f"{path} does not exist, and it is not the name of a built-in set ({known})"
    return f"there is no data set {name!r}, nor a folder or file of that name; did you mean {' or '.join(close)}?"


def _synthetic(name: str, split: str) -> ArraySource:
    _, _, count = name.partition(":")
    wanted = int(count) if count else SYNTHETIC_COUNT
    if split == "test":
        wanted = max(1, wanted // SYNTHETIC_TEST_SHARE)
    pixels, labels = generate(wanted, SYNTHETIC_SEED[split])
    return ArraySource(pixels, labels, name=f"synthetic {split}", classes=tuple(CLASSES))


def _downloaded(name: str) -> Opener:
    def opener(root: Path, split: str, max_side: int | None) -> Source:
        if (root / name / "classes.json").is_file():
            return open_arrays(root / name, split, name)
        source = download.from_torchvision(name, root, split)  # files that torchvision itself has put there
        if source is None:
            raise UserError(f"{name} is not in {root}; run: interclr data get {name}")
        return source

    return opener


def _imagenet(root: Path, split: str, max_side: int | None) -> Source:
    for folder in (root / "imagenet", root):
        if splits_of_folder(folder):
            return open_folder(folder, split, max_side, name=f"imagenet {split}")
    raise UserError(f"imagenet is not in {root}; {HOW_TO_PLACE['imagenet'].format(root=root)}")


def _places205(root: Path, split: str, max_side: int | None) -> Source:
    file = root / "places205" / ("train_places205.csv" if split == "train" else "val_places205.csv")
    if not file.is_file():
        raise UserError(f"places205 is not in {root}; {HOW_TO_PLACE['places205'].format(root=root)}")
    # The official archive keeps its images some folders below the lists.
    below = [file.parent / "images256", file.parent / "data/vision/torralba/deeplearning/images256"]
    folder = next((folder for folder in below if folder.is_dir()), file.parent)
    return open_list(file, max_side, folder, name=f"places205 {split}", keep_numbers=True)


def _voc(name: str, train: tuple[str, ...]) -> Opener:
    def opener(root: Path, split: str, max_side: int | None) -> Source:
        kit = next((base / "VOCdevkit" for base in (root / "voc", root) if (base / "VOCdevkit").is_dir()), None)
        if kit is None:
            raise UserError(f"{name} is not in {root}; run: interclr data get {name}")
        return _voc_images(kit, train if split == "train" else ("VOC2007",), split, name, max_side)

    return opener


def _voc_images(kit: Path, years: tuple[str, ...], split: str, name: str, max_side: int | None) -> FileSource:
    """Objects are many to an image, so there is no single label; detection and SVM read the annotations themselves."""
    names: list[str] = []
    for year in years:
        identifiers = kit / year / "ImageSets" / "Main" / ("trainval.txt" if split == "train" else "test.txt")
        if not identifiers.is_file():
            raise UserError(f"{name} is incomplete: {identifiers} is missing")
        names += [f"{year}/JPEGImages/{line}.jpg" for line in identifiers.read_text().split()]
    return FileSource(kit, Names.of(names), name=f"{name} {split}", max_side=max_side)


def voc_parts(folder: Path) -> tuple[Path, tuple[str, ...]] | None:
    """A devkit and its years, where ``folder`` is a devkit, holds one, or is one year of one; otherwise None."""

    def is_year(path: Path) -> bool:
        return all((path / part).is_dir() for part in ("JPEGImages", "Annotations", "ImageSets/Main"))

    if is_year(folder):
        return folder.absolute().parent, (folder.absolute().name,)
    for kit in (folder, folder / "VOCdevkit"):
        years = tuple(sorted(path.name for path in kit.iterdir() if is_year(path))) if kit.is_dir() else ()
        if years:
            return kit, years
    return None


def _voc_folder(kit: Path, years: tuple[str, ...], split: str, name: str, max_side: int | None) -> Source:
    """Of a devkit given as a folder: every year to train on, and to test on VOC2007 or else every year with a list."""
    if split != "train":
        tested = tuple(year for year in years if (kit / year / "ImageSets" / "Main" / "test.txt").is_file())
        years = ("VOC2007",) if "VOC2007" in tested else tested
        if not years:
            raise UserError(f"{name} has no test.txt in ImageSets/Main")
    return _voc_images(kit, years, split, name, max_side)


BUILT_IN: dict[str, Opener] = {
    "cifar10": _downloaded("cifar10"),
    "cifar100": _downloaded("cifar100"),
    "stl10": _downloaded("stl10"),
    "imagenet": _imagenet,
    "places205": _places205,
    "voc07": _voc("voc07", ("VOC2007",)),
    "voc0712": _voc("voc0712", ("VOC2007", "VOC2012")),
}
HOW_TO_PLACE = {
    "imagenet": "place its class folders in {root}/imagenet/train and {root}/imagenet/val",
    "places205": "place train_places205.csv, val_places205.csv and the folder images256 in {root}/places205",
}
