"""Look through every image of a source and say what is odd: broken files, rare encodings, duplicates."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from interclr.data.builtin import BUILT_IN, open_source
from interclr.data.copies import SIDE, near_copies, tiny
from interclr.data.decode import has_alpha, open_image, orientation, render, to_tensor, unreadable_as
from interclr.data.folder import images_below, splits_of_folder, strays
from interclr.data.listing import NOT_REGULAR
from interclr.data.packed_store import is_packed
from interclr.data.parallel import Working, ordered_map, unseen
from interclr.data.source import FileSource, Source, UnreadableImage

SMALL_SIDE = 32
DARK = 32  # of 255: a 16-bit image that reaches no further holds 12-bit values or less, and is nearly black
RANGES = {"16-bit": "16 bits", "float": "0 to 1"}  # of kinds whose values may use little of what they have
MOST_COMPARED = 500_000  # images; comparing them takes as the square of their number, minutes for so many on 16 cores
LONG = 40_000  # images: half a minute on one core, so from here on it is said how to leave the comparison out
EXAMPLES = 3
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_BIT_DEPTH_AT = 24
TIFF_BITS_PER_SAMPLE = 258
PPM_HEADER = re.compile(rb"P[36](?:(?:\s|#[^\n]*\n)+(\d+)){3}")  # width, height and, kept, the largest value

BROKEN = ("unreadable", "truncated", "zero size")  # these images cannot be used; all other kinds can

Digest = bytes  # 16 bytes
NO_DIGEST: Digest = bytes(16)


@dataclass(frozen=True)
class CheckReport:
    source: str
    count: int
    findings: dict[str, list[tuple[str, str]]]  # kind → (name, detail) of each image, in the order of the source
    duplicate_files: list[list[str]]  # groups of names whose files are equal byte for byte
    duplicate_pixels: list[list[str]]  # groups that show the same pixels, from files that are not all equal
    # Nearly the same picture, and how alike, the closest first; None where that was not looked for.
    near_duplicates: list[tuple[str, str, float]] | None
    other: dict[str, int] = field(default_factory=dict)  # files in the folder that are not read, by extension

    @property
    def unreadable(self) -> int:
        """Images that cannot be used."""
        return sum(len(self.findings.get(kind, ())) for kind in BROKEN)

    def summary(self) -> list[tuple[str, int, str]]:
        """Rows for a table: kind, how many, a few examples. Of copies the surplus ones count, of near ones pairs."""
        rows = []
        for kind, found in self.findings.items():
            rows.append((kind, len(found), _examples([f"{name} ({detail})" for name, detail in found])))
        for kind, groups in (("duplicate files", self.duplicate_files), ("duplicate pixels", self.duplicate_pixels)):
            if groups:
                surplus = sum(len(group) - 1 for group in groups)
                rows.append(
                    (f"{kind}, surplus", surplus, _examples([" = ".join(group[:EXAMPLES]) for group in groups]))
                )
        if self.near_duplicates:
            pairs = [f"{one} ≈ {other} ({likeness:.3f})" for one, other, likeness in self.near_duplicates]
            rows.append(("near duplicates, pairs", len(pairs), _examples(pairs)))
        if self.near_duplicates is None:
            many = f" among more than {MOST_COMPARED:,} images" if self.count > MOST_COMPARED else ""
            rows.append(("near duplicates", 0, f"not looked for{many}"))
        if self.other:
            kinds = sorted(self.other.items(), key=lambda item: (-item[1], item[0]))
            rows.append(("not read", sum(self.other.values()), _examples([f"{many:,} {kind}" for kind, many in kinds])))
        return rows

    def to_json(self) -> str:
        near = None
        if self.near_duplicates is not None:
            near = [{"images": [one, other], "likeness": round(value, 4)} for one, other, value in self.near_duplicates]
        content = {
            "source": self.source,
            "count": self.count,
            "unreadable": self.unreadable,
            "findings": {
                kind: [{"name": name, "detail": detail} for name, detail in found]
                for kind, found in self.findings.items()
            },
            "duplicate_files": self.duplicate_files,
            "duplicate_pixels": self.duplicate_pixels,
            "near_duplicates": near,
            "other_files": self.other,
        }
        return json.dumps(content, indent=1)


def check(
    source: Source | str | Path,
    *,
    workers: int | None = None,
    working: Working = unseen,
    small: int = SMALL_SIDE,
    copies: bool = True,
) -> CheckReport:
    """Read every image once. Images whose shorter side is under ``small`` are reported as small.

    Near duplicates are looked for, with ``copies``, among at most ``MOST_COMPARED`` images: in a larger set not at all.
    """
    other: dict[str, int] = {}
    outside: list[str] = []
    if not isinstance(source, Source):
        path = Path(source)
        # Of a folder everything is looked at, all its splits together.
        if path.is_dir() and not is_packed(path) and str(source) not in BUILT_IN:
            listing = images_below(path)
            # Somebody may expect their .heic to be seen.
            other = {_named(kind): many for kind, many in listing.kinds.items()}
            source = FileSource(path, listing.images)
            outside = _outside_class_folders(path, listing.images.to_list())
        else:
            source = open_source(source)
    count = len(source)
    findings: dict[str, list[tuple[str, str]]] = {}
    if outside:
        findings["outside the class folders"] = [(name, "so no image has a label") for name in outside]
    file_digests = np.zeros((count, 16), dtype=np.uint8)
    pixel_digests = np.zeros((count, 16), dtype=np.uint8)
    copies = copies and count <= MOST_COMPARED
    pictures = torch.zeros(count if copies else 0, 3, SIDE, SIDE, dtype=torch.uint8)  # unreadable: like no other
    with working("checking") as progress:
        for index, result in enumerate(ordered_map(_inspector(source, small, copies), count, workers)):
            kinds, file_digest, pixel_digest, picture = result
            for kind, detail in kinds:
                findings.setdefault(kind, []).append((source.name_of(index), detail))
            file_digests[index] = np.frombuffer(file_digest, np.uint8)
            pixel_digests[index] = np.frombuffer(pixel_digest, np.uint8)
            if picture is not None:
                pictures[index] = picture
            progress(index + 1, count)
    same_file = _groups(file_digests)
    # The same pixels from files that are all equal are no news; one file of another encoding among them is.
    same_pixels = [group for group in _groups(pixel_digests) if len({file_digests[i].tobytes() for i in group}) > 1]
    if not file_digests.any():  # no files at all, so equal pixels are all there is to find
        same_pixels = _groups(pixel_digests)

    def named(groups: list[list[int]]) -> list[list[str]]:
        return [[source.name_of(index) for index in group] for group in groups]

    near = None
    if copies:
        with working("comparing pictures" + (" (skip: --no-copies)" if count >= LONG else "")) as progress:
            found = near_copies(pictures, [digest.tobytes() for digest in pixel_digests], progress)
        near = [(source.name_of(one), source.name_of(second), likeness) for (one, second), likeness in found.items()]
    return CheckReport(source.name, count, findings, named(same_file), named(same_pixels), near, other)


def _named(kind: str) -> str:
    """A kind of ``Listing.kinds`` for people."""
    return kind if kind == NOT_REGULAR else f".{kind}" if kind else "without extension"


def _outside_class_folders(folder: Path, names: list[str]) -> list[str]:
    """Of every split by itself, as labels are."""
    tops = [f"{split}/" for split in dict.fromkeys(splits_of_folder(folder).values())] or [""]
    split = {top: [name.removeprefix(top) for name in names if name.startswith(top)] for top in tops}
    return [f"{top}{name}" for top, within in split.items() for name in strays(within)]


# (kind, detail)s, digest of the file, of the pixels, and a tiny picture of what can be read and is to be compared
Inspection = tuple[list[tuple[str, str]], Digest, Digest, Tensor | None]


def _inspector(source: Source, small: int, copies: bool) -> Callable[[int], Inspection]:
    def inspect(index: int) -> Inspection:
        kinds: list[tuple[str, str]] = []
        file_digest = pixel_digest = NO_DIGEST
        picture = None
        name = source.name_of(index)
        try:
            with unreadable_as(name):
                data = source.encoded(index)
                if data is None:
                    pixels = source.read(index)
                else:
                    if data:  # empty files are all equal, but duplicates of nothing
                        file_digest = hashlib.blake2b(data, digest_size=16).digest()
                    image = open_image(data, name)
                    kinds += _kinds_of(image, data)
                    pixels = to_tensor(render(image))
                height, width = pixels.shape[1:]
                picture = tiny(pixels) if copies else None
                if min(height, width) < small:
                    kinds.append(("small", f"{width}×{height}"))
                deep = next((kind for kind, _ in kinds if kind in RANGES), None)
                if deep is not None and int(pixels.max()) < DARK:
                    detail = f"values use less than an eighth of {RANGES[deep]}: stretch them first"
                    kinds.append((f"{deep}, nearly black", detail))
                content = pixels.numpy().tobytes()
                pixel_digest = hashlib.blake2b(content, digest_size=16, salt=f"{width}".encode()).digest()
        except UnreadableImage as error:
            kinds.append((_broken_kind(error.reason), error.reason))
        return kinds, file_digest, pixel_digest, picture

    return inspect


def _kinds_of(image: Image.Image, data: bytes) -> list[tuple[str, str]]:
    kinds = []
    frames = int(getattr(image, "n_frames", 1))
    if frames > 1 and image.format != "MPO":  # phones put a preview behind a photograph; that is no animation
        kinds.append(("animated", f"{frames} frames, the first is used"))
    if image.mode == "CMYK":
        kinds.append(("CMYK", "converted to RGB without its colour profile"))
    if image.mode == "F":
        kinds.append(("float", f"{image.format}, from 0 to 1, or else from its least to its largest value, to 8 bits"))
    elif _is_deep(image, data):
        kinds.append(("16-bit", f"{image.format} {image.mode}, scaled to 8 bits"))
    if has_alpha(image):
        kinds.append(("alpha", f"{image.mode}, laid on white"))
    if orientation(image) != 1:
        kinds.append(("turned", f"EXIF orientation {orientation(image)}, set upright"))
    return kinds


def _is_deep(image: Image.Image, data: bytes) -> bool:
    """Integers of more than 8 bits. Pillow opens deep colour as plain RGB, so the file itself is asked."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return True
    if data.startswith(PNG_SIGNATURE):
        return data[PNG_BIT_DEPTH_AT] == 16
    if header := PPM_HEADER.match(data):
        return int(header[1]) > 255
    tags = getattr(image, "tag_v2", None)
    return tags is not None and max(np.atleast_1d(tags.get(TIFF_BITS_PER_SAMPLE, 8))) > 8


def _broken_kind(reason: str) -> str:
    lowered = reason.lower()
    if "empty" in lowered or "zero size" in lowered:
        return "zero size"
    return "truncated" if "truncated" in lowered else "unreadable"


def _groups(digests: NDArray[np.uint8]) -> list[list[int]]:
    """Indices with equal digests, groups in the order of their first member; an all-zero digest stands for none."""
    if not len(digests):
        return []
    keys = np.ascontiguousarray(digests).view("V16").ravel()
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero((counts[inverse] > 1) & digests.any(axis=1))
    groups: dict[int, list[int]] = {}
    for index in repeated.tolist():
        groups.setdefault(int(inverse[index]), []).append(index)
    return list(groups.values())


def _examples(items: list[str]) -> str:
    more = f", and {len(items) - EXAMPLES} more" if len(items) > EXAMPLES else ""
    return ", ".join(items[:EXAMPLES]) + more
