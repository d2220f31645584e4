"""``interclr embed``: the features of every image of a set in a file, with their labels and names."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import torch

from interclr.data.builtin import open_source
from interclr.data.reading import Unreadable
from interclr.data.subset import readable_rows
from interclr.data.views import largest_side
from interclr.evaluate.base import Context, Subject, embed_source
from interclr.run.files import check_writable, save_tensors, write_text
from interclr.screen import Screen
from interclr.types import UserError

SPLITS = ("train", "test", "val")


def write_features(
    subject: Subject, data: str, out: Path, split: str, root: Path | None, device: torch.device, screen: Screen
) -> None:
    """``out`` holds features (N, F), NaN where an image is unreadable, and labels where known; beside it the names."""
    if out.suffix != ".safetensors":
        raise UserError(f"{out}: features are written as .safetensors (read with safetensors.torch.load_file)")
    if out.is_dir():
        raise UserError(f"{out} is a folder: name the file to write")
    source, unreadable = open_source(data, split, root, max_side=largest_side(subject.image_size)), Unreadable()
    check_writable(out.parent, "name another file")
    context, host = Context(out.parent, device, screen), torch.device("cpu")  # a GPU may not have room for all
    features = embed_source(subject, source, context, unreadable, host)
    if unreadable.reasons:
        many = f"{len(unreadable.reasons)} of {len(source)} images are unreadable"
        screen.warn(f"{many}, their rows are NaN; the first is {unreadable.first}")
        known = features[kept := readable_rows(source, unreadable.reasons)]
        features = torch.full_like(features, float("nan"))
        features[kept] = known
    tensors = {"features": features}
    if source.labels is not None:
        tensors["labels"] = source.labels.contiguous()
    save_tensors(out, tensors)
    names = "\n".join(json.dumps(source.name_of(row)) for row in range(len(source)))
    beside = out.with_suffix(".names.txt")
    write_text(beside, names + "\n")
    left_out = _other_splits(data, split, source.name, root)
    of = f" of the {split} split" if left_out else ""
    rest = "".join(f"; not embedded: {count:,} images of --split {name}" for name, count in left_out.items())
    screen.say(f"{len(source):,} x {features.shape[1]} features{of} in {out}, names in {beside.name}{rest}")


def _other_splits(data: str, own: str, name: str, root: Path | None) -> dict[str, int]:
    """How many images ``data`` has in splits other than ``own``, opened as ``name``; most have none."""
    found: dict[str, int] = {}
    opened = {name}  # test and val are often the same
    for split in (each for each in SPLITS if each != own):
        with suppress(UserError):  # there is no such split
            source = open_source(data, split, root)
            found |= {} if source.name in opened else {split: len(source)}
            opened.add(source.name)
    return found
