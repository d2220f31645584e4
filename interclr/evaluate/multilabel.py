"""One-vs-all targets: of VOC's devkit, where an image has many classes, and of any set with one label per image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from interclr.data.names import Names
from interclr.data.source import FileSource, Source
from interclr.evaluate.base import LabelledData, check_labels
from interclr.evaluate.voc_boxes import parse_xml
from interclr.svm import Signs
from interclr.types import UserError


@dataclass(frozen=True, slots=True)
class MultiLabelSet:
    source: Source
    targets: Signs  # (N, C) 1 present, −1 absent, 0 difficult: left out of training and testing
    classes: tuple[str, ...]
    labels: NDArray[np.int64] | None = None  # (N,) columns of ``targets``, where every image has exactly one class


def targets_of(data: LabelledData, voc: Path | None = None) -> tuple[MultiLabelSet, MultiLabelSet]:
    """Training and test targets: VOC's where ``voc`` names a devkit or ``data`` is one, the labels' otherwise."""
    if voc is not None:
        train, test = open_voc_classification(voc, "trainval"), open_voc_classification(voc, "test")
    elif (years := _voc_years(data.train)) and (test_years := _voc_years(data.test)):
        assert isinstance(data.train, FileSource)
        root, side = data.train.folder, data.train.max_side
        train = open_voc_classification(root, "trainval", years, side)
        test = open_voc_classification(root, "test", test_years, side)
    else:
        train, test = _single(data)
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise UserError(f"classes of the training and the test split differ: {', '.join(odd[:5])}")
    _check(train, test)
    return train, test


def open_voc_classification(
    root: Path, split: str, years: Sequence[str] = ("VOC2007",), max_side: int | None = None
) -> MultiLabelSet:
    """Read ``split`` of a devkit: ``root`` is ``VOCdevkit``, the folder that holds it, or (one year) the year's own.

    ``ImageSets/Main/CLASS_SPLIT.txt`` gives 1, −1, or 0 where every object of the class is difficult. A tree without
    these files is read from its ``Annotations`` by the same rule.
    """
    kit, years = _devkit(root, years)
    names: list[str] = []
    targets: list[Signs] = []
    classes: tuple[str, ...] | None = None
    for year in years:
        main = kit / year / "ImageSets" / "Main"
        file = main / f"{split}.txt"
        if not file.is_file():
            raise UserError(f"{kit} is incomplete: {file} is missing")
        identifiers = [line.split()[0] for line in file.read_text().splitlines() if line.strip()]
        if not identifiers:
            raise UserError(f"{file} names no images")
        files = sorted(path for path in main.glob(f"*_{split}.txt"))
        found, signs = _from_lists(files, split, identifiers) if files else _from_annotations(kit / year, identifiers)
        if classes is not None and found != classes:
            raise UserError(f"{year} has other classes than {years[0]}: {', '.join(sorted(set(found) ^ set(classes)))}")
        classes = found
        names += [f"{year}/JPEGImages/{identifier}.jpg" for identifier in identifiers]
        targets.append(signs)
    assert classes is not None
    source = FileSource(kit, Names.of(names), name=f"{'+'.join(years)} {split}", classes=classes, max_side=max_side)
    return MultiLabelSet(source, np.concatenate(targets), classes)


def _from_lists(files: list[Path], split: str, identifiers: list[str]) -> tuple[tuple[str, ...], Signs]:
    signs = np.empty((len(identifiers), len(files)), dtype=np.int8)
    for column, file in enumerate(files):
        values: dict[str, int] = {}
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            words = line.split()
            if not words:
                continue
            if len(words) != 2 or words[1] not in ("1", "0", "-1"):
                raise UserError(f"{file}, line {number}: expected an image and 1, 0 or -1, not {line[:60]!r}")
            values[words[0]] = int(words[1])
        missing = [identifier for identifier in identifiers if identifier not in values]
        if missing:
            raise UserError(f"{file} says nothing of {len(missing)} images of the split; the first is {missing[0]}")
        signs[:, column] = [values[identifier] for identifier in identifiers]
    return tuple(file.name.removesuffix(f"_{split}.txt") for file in files), signs


def _from_annotations(folder: Path, identifiers: list[str]) -> tuple[tuple[str, ...], Signs]:
    """Classes are those named anywhere in the year's annotations, so that both splits agree on them."""
    present: dict[str, dict[str, bool]] = {}  # image → class → whether one of its objects is not difficult
    for path in sorted((folder / "Annotations").glob("*.xml")):
        objects = parse_xml(path).findall("object")
        seen = present.setdefault(path.stem, {})
        for item in objects:
            name, easy = (item.findtext("name") or "").strip(), (item.findtext("difficult") or "0").strip() != "1"
            seen[name] = seen.get(name, False) or easy
    missing = [identifier for identifier in identifiers if identifier not in present]
    if missing:
        raise UserError(
            f"{folder} has neither class lists in ImageSets/Main nor annotations of {len(missing)} images; the first "
            f"is {missing[0]}"
        )
    classes = tuple(sorted({name for seen in present.values() for name in seen}))
    column = {name: number for number, name in enumerate(classes)}
    signs = np.full((len(identifiers), len(classes)), -1, dtype=np.int8)
    for row, identifier in enumerate(identifiers):
        for name, easy in present[identifier].items():
            signs[row, column[name]] = 1 if easy else 0
    return classes, signs


def _devkit(root: Path, years: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    root = root.expanduser()
    if (root / "ImageSets" / "Main").is_dir():
        return root.absolute().parent, (root.absolute().name,)
    for kit in (root, root / "VOCdevkit"):
        if (kit / years[0]).is_dir():
            return kit, tuple(years)
    raise UserError(f"{root} is no VOC devkit: it holds neither {years[0]} nor VOCdevkit/{years[0]}")


def _voc_years(source: Source) -> tuple[str, ...]:
    """The years of a devkit's images opened without labels (``--data voc07``); none for anything else."""
    if not isinstance(source, FileSource) or source.labels is not None:
        return ()
    names = source.names.to_list()
    years = sorted({name.split("/")[0] for name in names})
    whole = all("/JPEGImages/" in name for name in names)
    return tuple(years) if whole and all((source.folder / year / "ImageSets/Main").is_dir() for year in years) else ()


def _single(data: LabelledData) -> tuple[MultiLabelSet, MultiLabelSet]:
    """A column for each class that has training images: numbers that no image uses are passed over."""
    check_labels(data)
    assert data.train.labels is not None
    assert data.test.labels is not None
    used = np.unique(data.train.labels.numpy())
    names = data.train.classes
    classes = tuple(names[number] if names else str(number) for number in used.tolist())

    def of(source: Source, numbers: NDArray[np.int64]) -> MultiLabelSet:
        labels = np.searchsorted(used, numbers)
        signs = np.where(labels[:, None] == np.arange(len(used)), 1, -1).astype(np.int8)
        return MultiLabelSet(source, signs, classes, labels)

    return of(data.train, data.train.labels.numpy()), of(data.test, data.test.labels.numpy())


def _check(train: MultiLabelSet, test: MultiLabelSet) -> None:
    for sign, what in ((1, "positive"), (-1, "negative")):
        lacking = [train.classes[c] for c in np.flatnonzero(~(train.targets == sign).any(0))]
        if lacking:
            few = ", ".join(lacking[:5])
            raise UserError(f"{len(lacking)} classes have no {what} training image, so no SVM can be trained: {few}")
    if not (test.targets > 0).any():
        raise UserError("no test image shows any of the classes, so there is nothing to measure")
