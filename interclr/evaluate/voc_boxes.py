"""Boxes in PASCAL VOC's format: ``JPEGImages``, ``Annotations/*.xml``, ``ImageSets/Main/*.txt``, of one or more years.

What becomes of input that is not as it should be, the same for every file:

- boxes that reach outside the image are clipped to it, and counted where they do by more than a pixel (tools that count
  from 0 write 0 where VOC writes 1); boxes with no area, or none inside the image, are dropped and counted;
- an image whose annotation has no object is a negative: always kept for testing, for training on request;
- an annotation that states another size than its image has is believed for its boxes, and counted;
- a missing image or annotation, XML that cannot be parsed, a box without coordinates and a class that is not among the
  known ones are errors that name the file.

XML comes from strangers: no file over a mebibyte is parsed, and none with a document type, so there are no entities.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from interclr.data.decode import FORMATS, orientation, unreadable_as
from interclr.data.listing import EXTENSIONS
from interclr.data.parallel import ordered_map
from interclr.data.source import UnreadableImage
from interclr.types import UserError

Progress = Callable[[int, int], None]
MAX_XML_BYTES = 1 << 20
MAX_CLASSES = 10_000
THINNEST = 0.5  # pixels
FOLDERS = ("JPEGImages", "Annotations", "ImageSets/Main")


@dataclass(frozen=True, slots=True)
class BoxedImage:
    """An image with its boxes as continuous edges: VOC's 1-based inclusive (xmin − 1, ymin − 1, xmax, ymax)."""

    name: str  # 'VOC2007/000005'
    path: Path
    width: int
    height: int
    boxes: NDArray[np.float32]  # (n, 4) x0, y0, x1, y1
    labels: NDArray[np.int64]  # (n,)
    difficult: NDArray[np.bool_]  # (n,)


@dataclass(frozen=True, slots=True)
class BoxedSet:
    images: tuple[BoxedImage, ...]
    classes: tuple[str, ...]
    clipped: int = 0  # boxes
    dropped: int = 0  # boxes
    resized: int = 0  # annotations that state another size than the image has

    @property
    def empty(self) -> int:
        """Images without any box."""
        return sum(len(image.boxes) == 0 for image in self.images)

    @property
    def boxes(self) -> int:
        return sum(len(image.boxes) for image in self.images)

    def fingerprint(self) -> str:
        digest = hashlib.sha256("\n".join(self.classes).encode())
        for image in self.images:
            digest.update(image.name.encode(errors="surrogateescape") + image.boxes.tobytes() + image.labels.tobytes())
            digest.update(image.difficult.tobytes())
        return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Split:
    """One list of one year: ``VOC2007/trainval``; the year is empty where the folder itself has VOC's layout."""

    folder: Path
    part: str
    list_name: str

    @property
    def file(self) -> Path:
        return self.folder / "ImageSets" / "Main" / f"{self.list_name}.txt"

    def __str__(self) -> str:
        return f"{self.part}/{self.list_name}" if self.part else self.list_name


@dataclass(frozen=True, slots=True)
class _Annotation:
    names: tuple[str, ...]
    values: BoxedImage  # its labels are filled in once the classes are known
    clipped: int
    dropped: int
    resized: bool
    file: Path


def find_splits(
    data: Path, train: Sequence[str] = (), test: Sequence[str] = ()
) -> tuple[tuple[Split, ...], tuple[Split, ...]]:
    """The lists to train on and to test on.

    ``data`` is a VOCdevkit, the folder that holds it, or one folder of the same layout. Named lists (as 'VOC2007/test',
    or 'test' where there is but one year) are taken as they are. Otherwise VOC07+12's custom: ``trainval`` of every
    year, and ``test`` of VOC2007, or else of the first year that has one. Without a test list: ``train`` and ``val``.
    """
    parts = _parts(data)

    def named(names: Sequence[str]) -> tuple[Split, ...]:
        splits = []
        for name in names:
            part, _, list_name = name.rpartition("/")
            if part not in parts and not (part == "" and len(parts) == 1):
                raise UserError(f"{data} has no part {part!r} (of {name!r}); it has {', '.join(map(repr, parts))}")
            folder = parts[part] if part in parts else next(iter(parts.values()))
            splits.append(Split(folder, part, list_name))
            if not splits[-1].file.is_file():
                raise UserError(f"there is no list {splits[-1].file}")
        return tuple(splits)

    def each(list_name: str) -> tuple[Split, ...]:
        splits = [Split(folder, part, list_name) for part, folder in parts.items()]
        return tuple(split for split in splits if split.file.is_file())

    tests = sorted(each("test"), key=lambda split: (split.part != "VOC2007", split.part))[:1]
    found = (each("trainval") or each("train"), tuple(tests)) if tests else (each("train"), each("val"))
    learn = named(train) if train else found[0]
    judge = named(test) if test else found[1]
    for splits, what in ((learn, "train on (trainval.txt or train.txt)"), (judge, "test on (test.txt or val.txt)")):
        if not splits:
            raise UserError(f"{data} has no list to {what} in ImageSets/Main; name one of its lists instead")
    return learn, judge


def _parts(data: Path) -> dict[str, Path]:
    for base in (data, data / "VOCdevkit"):
        if all((base / folder).is_dir() for folder in FOLDERS):
            return {"": base}
        if base.is_dir():
            years = [year for year in sorted(base.iterdir()) if all((year / folder).is_dir() for folder in FOLDERS)]
            if years:
                return {year.name: year for year in years}
    what = "has not VOC's layout" if data.is_dir() else "is not a folder"
    raise UserError(f"{data} {what}: detection needs the folders {', '.join(FOLDERS)}, or a VOCdevkit of such folders")


def read_boxes(
    splits: Sequence[Split], classes: Sequence[str] | None = None, progress: Progress | None = None
) -> BoxedSet:
    """All images of ``splits``. Without ``classes`` they are the names that occur, in alphabetical order (as VOC's)."""
    wanted: dict[tuple[str, str], Split] = {}
    for split in splits:
        wanted.update({(split.part, name): split for name in _identifiers(split.file)})
    if not wanted:
        raise UserError(f"no image is listed in {', '.join(str(split.file) for split in splits)}")
    entries = [(split, name) for (_, name), split in wanted.items()]
    read = []
    for annotation in ordered_map(lambda i: _read(*entries[i]), len(entries)):
        read.append(annotation)
        if progress is not None:
            progress(len(read), len(entries))
    occurring = sorted({name for annotation in read for name in annotation.names})
    known = tuple(classes) if classes else tuple(occurring)
    if not known:
        raise UserError(f"none of the {len(read)} images of {', '.join(map(str, splits))} has a box")
    if len(known) > MAX_CLASSES:
        raise UserError(f"{len(known):,} classes in {', '.join(map(str, splits))}; at most {MAX_CLASSES:,} can be told")
    number = {name: i for i, name in enumerate(known)}
    images = []
    for annotation in read:
        unknown = next((name for name in annotation.names if name not in number), None)
        if unknown is not None:
            raise UserError(f"{annotation.file} has an object of the unknown class {unknown!r}; known: {_some(known)}")
        labels = np.array([number[name] for name in annotation.names], dtype=np.int64)
        images.append(replace(annotation.values, labels=labels))
    return BoxedSet(
        tuple(images),
        known,
        clipped=sum(annotation.clipped for annotation in read),
        dropped=sum(annotation.dropped for annotation in read),
        resized=sum(annotation.resized for annotation in read),
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")


def _identifiers(file: Path) -> list[str]:
    """The first word of each line; lists of one class have a second, ±1."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the list {file}: {error}") from None
    names = [line.split()[0] for line in lines if line.strip()]
    outside = next((name for name in names if Path(name).is_absolute() or ".." in Path(name).parts), None)
    if outside is not None:
        raise UserError(f"{file} lists {outside!r}, which lies outside the data")
    return names


def _read(split: Split, name: str) -> _Annotation:
    image = _image_of(split.folder / "JPEGImages", name)
    file = split.folder / "Annotations" / f"{name}.xml"
    width, height = _size(image)
    root = parse_xml(file)
    names, rows, difficult = [], [], []
    clipped = dropped = 0
    for item in root.findall("object"):
        label, box = (item.findtext("name") or "").strip(), item.find("bndbox")
        if not label or box is None:
            raise UserError(f"{file}: an object has no {'name' if not label else 'bndbox'}")
        edges = np.array([_number(box, edge, file) for edge in ("xmin", "ymin", "xmax", "ymax")])
        edges -= (1, 1, 0, 0)
        inside = np.clip(edges, 0, (width, height, width, height))
        if min(edges[2:] - edges[:2]) < THINNEST or min(inside[2:] - inside[:2]) < THINNEST:
            dropped += 1
            continue
        clipped += bool(np.abs(edges - inside).max() > 1)
        names.append(label)
        rows.append(inside)
        difficult.append((item.findtext("difficult") or "0").strip() == "1")
    stated = (_stated(root, "width"), _stated(root, "height"))
    boxes = np.array(rows, dtype=np.float32).reshape(-1, 4)
    called = f"{split.part}/{name}" if split.part else name
    unlabelled = np.full(len(rows), -1, dtype=np.int64)
    values = BoxedImage(called, image, width, height, boxes, unlabelled, np.array(difficult, dtype=bool))
    resized = 0 not in stated and stated != (width, height)
    return _Annotation(tuple(names), values, clipped, dropped, resized, file)


def _image_of(folder: Path, name: str) -> Path:
    for extension in EXTENSIONS:
        path = folder / f"{name}.{extension}"
        if path.is_file():
            return path
    raise UserError(f"there is no image {folder / name}.jpg, which the list names")


def _size(path: Path) -> tuple[int, int]:
    """Width and height as ``decode`` will show the image, from its header alone."""
    try:
        with unreadable_as(str(path)), Image.open(path, formats=FORMATS) as image:
            turned = orientation(image) >= 5
            return (image.height, image.width) if turned else image.size
    except UnreadableImage as failure:
        raise UserError(f"cannot read the image {failure}") from None


def _number(box: Element, edge: str, file: Path) -> float:
    text = box.findtext(edge)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{file}: {edge} of a box is {text!r}, not a number")
    return value


def _stated(root: Element, side: str) -> int:
    try:
        return int(float(root.findtext(f"size/{side}") or 0))
    except (ValueError, OverflowError):
        return 0


def parse_xml(file: Path) -> Element:
    """The root of a small XML file without a document type: neither external files nor entities that grow."""
    try:
        size = file.stat().st_size
        if size > MAX_XML_BYTES:
            raise UserError(f"{file} has {size:,} bytes; an annotation of more than {MAX_XML_BYTES:,} is not read")
        data = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no annotation {file}") from None
    except OSError as error:
        raise UserError(f"cannot read the annotation {file}: {error.strerror}") from None

    def refuse(*_: Any) -> None:
        raise UserError(f"{file} has a document type (<!DOCTYPE>), which annotations do not need and we do not read")

    builder = TreeBuilder()
    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is not well-formed XML: {error}") from None
    return builder.close()
