"""Any folder of images as a source: flat, nested, or one subfolder per class; with or without train and test splits."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from interclr.data.listing import EXTENSIONS, Listing, list_images
from interclr.data.names import Names
from interclr.data.source import FileSource
from interclr.types import UserError

HELD_OUT = ("val", "test")
# Pictures that nothing here decodes, by extension: those of phones and editors, and cameras' raw ones.
ENCODED, RAW = {"heic", "heif", "avif", "jxl", "jp2", "psd"}, {"dng", "cr2", "cr3", "nef", "arw", "orf", "raf", "rw2"}


def open_folder(folder: Path, split: str = "train", max_side: int | None = None, name: str | None = None) -> FileSource:
    """Open a folder, or the subfolder of ``split`` where it has ``train`` and ``val`` or ``test``.

    Labels: where every image lies in one of two or more first-level subfolders, each of those is a class, numbered in
    sorted order as torchvision's ImageFolder does; otherwise there are none. A single subfolder is a class where
    another split has it beside others.
    """
    images = split_folder(folder, split)
    listing = images_below(images)
    names = listing.images
    # All splits share one numbering, even where a class is missing from one of them.
    siblings = [folder / sibling for sibling in splits_of_folder(folder).values()] if images != folder else []
    labels, classes = labels_by_folder(names, siblings, images)
    source = FileSource(images, names, labels, name=name or str(images), classes=classes, max_side=max_side)
    source.not_read = {kind: many for kind, many in listing.kinds.items() if kind in ENCODED | RAW}
    return source


def images_below(folder: Path) -> Listing:
    listing = list_images(folder)
    if not listing.images:
        looked_for = ", ".join(EXTENSIONS)
        raise UserError(
            f"no images in {folder}: looked for the extensions {looked_for}; {listing.other} other files were seen"
        )
    return listing


def splits_of_folder(folder: Path) -> dict[str, str]:
    """Split names and their subfolders, for instance ``{'train': 'train', 'val': 'val', 'test': 'val'}``."""
    held_out = [name for name in HELD_OUT if (folder / name).is_dir()]
    if not held_out or not (folder / "train").is_dir():
        return {}
    return {"train": "train", "val": held_out[0], "test": held_out[-1]}


def split_folder(folder: Path, split: str) -> Path:
    splits = splits_of_folder(folder)
    if split in splits:
        return folder / splits[split]
    if splits:
        raise UserError(f"{folder} has no split {split!r}; it has {', '.join(splits)}")
    if split != "train":
        raise UserError(f"{folder} has no split {split!r}: that needs subfolders train/ and val/ or test/")
    return folder


def labels_by_folder(names: Names, siblings: list[Path], own: Path) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """``siblings`` are the folders of all splits, this one's ``own`` among them."""
    paths = names.to_list()
    tops = [path.partition("/")[0] for path in paths]  # of an image in the folder itself: its own name
    if any(len(top) == len(path) for top, path in zip(tops, paths, strict=True)):
        return None, None
    present = set(tops)
    if len(present) < 2 and not any(present < _folders_of_images(other) for other in {*siblings} - {own}):
        return None, None
    classes = tuple(sorted(present.union(*map(_subfolders, siblings))))
    number = {name: index for index, name in enumerate(classes)}
    return torch.tensor([number[top] for top in tops]), classes


def folders_and_others(paths: list[str]) -> tuple[set[str], list[str]]:
    """The first-level folders of these images, and the images that lie in none."""
    return {path.partition("/")[0] for path in paths if "/" in path}, [path for path in paths if "/" not in path]


def strays(paths: list[str]) -> list[str]:
    """Images beside folders that hold most of them: without these the folders would be classes."""
    folders, others = folders_and_others(paths)
    return others if len(folders) > 1 and 2 * len(others) < len(paths) else []


def _folders_of_images(folder: Path) -> set[str]:
    """The first-level subfolders with images in them, and the names of images that lie in none."""
    return {path.partition("/")[0] for path in list_images(folder).images}


def _subfolders(folder: Path) -> set[str]:
    return {entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."}
