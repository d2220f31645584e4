"""A text or CSV file that names one image a line: ``path``, ``path label`` or ``path,label``."""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from interclr.data.listing import EXTENSIONS
from interclr.data.names import Names
from interclr.data.source import FileSource
from interclr.types import UserError

LARGEST_CLASS = 30_000  # numbers from here on are identifiers, not classes counted from 0
PATH_COLUMNS = ("path", "file", "filename", "image", "image_path", "file_name", "name")
LABEL_COLUMNS = ("label", "class", "target", "category", "label_name", "class_name")

# The path ends at the last image extension before a delimiter, so it may itself contain spaces and commas.
_line = re.compile(
    rf"""(?P<quote>["']?)(?P<path>.+\.(?:{"|".join(EXTENSIONS)}))(?P=quote)"""
    r"""(?:\s*[,;\s]\s*(?P<label>"(?:[^"]|"")*"|'[^']*'|[^,;\t]*).*)?$""",
    re.IGNORECASE,
)


def open_list(
    file: Path,
    max_side: int | None = None,
    folder: Path | None = None,
    name: str | None = None,
    keep_numbers: bool = False,
) -> FileSource:
    """Open a list; relative paths count from ``folder``, or from the folder that holds the list.

    Labels that are numbers with gaps are numbered densely, unless ``keep_numbers``: those of several lists agree then.
    """
    folder = folder or file.parent
    try:
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"cannot read the list {file}: {error.strerror}") from None
    rows = list(_rows(file, text))
    if not rows:
        raise UserError(f"the list {file} names no images")
    paths = [path for path, _ in rows]
    missing = _missing(folder, paths)
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(paths)} files named in {file} do not exist; the first is {missing[0]!r} "
            f"(relative paths count from {folder})"
        )
    labels, classes = _number([label for _, label in rows], file, keep_numbers)
    return FileSource(folder, Names.of(paths), labels, name=name or str(file), classes=classes, max_side=max_side)


def _missing(folder: Path, paths: list[str]) -> list[str]:
    """Look into each directory once: asking for every file alone takes many times longer on a cold or remote disk."""
    present: dict[str, frozenset[str]] = {}
    missing = []
    for path in paths:
        directory, name = os.path.split(path)
        if directory not in present:
            try:
                present[directory] = frozenset(os.listdir(os.path.join(folder, directory)))
            except OSError:
                present[directory] = frozenset()
        if name not in present[directory]:
            missing.append(path)
    return missing


def _rows(file: Path, text: str) -> Iterator[tuple[str, str]]:
    """Path and label ('' where there is none) of each line."""
    if "\0" in text:
        raise UserError(f"the list {file} is not plain text (is it UTF-16? save it as UTF-8)")
    lines = text.split("\n")  # not splitlines: file names may contain the rarer line breaks
    first = next((number for number, line in enumerate(lines) if line.strip() and not _is_comment(line)), 0)
    header = [column.strip().strip('"').lower() for column in re.split("[,;\t]", lines[first])]
    if len(header) > 1 and not _line.match(lines[first].strip()):
        path_column = next((column for column in PATH_COLUMNS if column in header), None)
        path_column = path_column or _column_of_paths(header, lines[first:])
        if path_column is not None:
            yield from _named_columns(file, lines, first, header, path_column)
            return
    for number, line in enumerate(lines[first:], start=first + 1):
        line = line.strip()
        if not line or line.startswith("# ") or (number == first + 1 and _is_comment(line)):
            continue
        match = _line.match(line)
        if match:
            path = match["path"].replace('""', '"') if match["quote"] == '"' else match["path"]
            yield path, _unquoted((match["label"] or "").strip())
        elif number > first + 1 or re.match(r"[^,;\s]+\.\w+([,;\s]|$)|[^,;\s]*/", line):  # else it is a header
            raise UserError(
                f"{file}, line {number}: no image path in {line[:80]!r} (expected: path, or path and label)"
            )


def _is_comment(line: str) -> bool:
    """Before the first image. Later on, only what begins with "# ": a name may begin with a #."""
    return line.startswith("# ") or (line.startswith("#") and not _line.match(line.strip()))


def _unquoted(label: str) -> str:
    if len(label) > 1 and label[0] == label[-1] == '"':
        return label[1:-1].replace('""', '"').strip()
    return label.strip("\"'")


def _column_of_paths(header: list[str], lines: list[str]) -> str | None:
    """Of a header without a name that is known for paths the one column that holds images below it."""
    below = next((line for line in lines[1:] if line.strip()), "")
    fields = next(csv.reader([below], delimiter=_delimiter(lines[0]), skipinitialspace=True), [])
    images = [
        at for at, field in enumerate(fields) if field.strip().lower().endswith(tuple(f".{e}" for e in EXTENSIONS))
    ]
    return header[images[0]] if len(images) == 1 and images[0] < len(header) else None


def _delimiter(line: str) -> str:
    return next(mark for mark in "\t;," if mark in line)


def _named_columns(
    file: Path, all_lines: list[str], first: int, header: list[str], path_column: str
) -> Iterator[tuple[str, str]]:
    """With a header, columns may stand in any order and fields may be quoted."""
    path_at = header.index(path_column)
    rows: list[list[str]] = []
    lines: list[int] = []
    table = (f"{line}\n" for line in all_lines[first:])
    reader = csv.reader(table, delimiter=_delimiter(all_lines[first]), skipinitialspace=True)
    began = first + 1
    try:
        for row in reader:
            if began > first + 1 and any(field.strip() for field in row):
                if len(row) <= path_at:
                    raise UserError(f"{file}, line {began}: {len(row)} fields, but the path is in field {path_at + 1}")
                rows.append(row)
                lines.append(began)
            began = first + reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{file}, line {began}: {error}; is a quote not closed?") from None
    label_at = _label_column(file, header, path_column, rows)
    for line, row in zip(lines, rows, strict=True):
        label = row[label_at].strip() if label_at is not None and len(row) > label_at else ""
        if "\n" in label + row[path_at].strip():
            raise UserError(f"{file}, line {line}: a field goes on over several lines; is a quote not closed?")
        yield row[path_at].strip(), label


def _label_column(file: Path, header: list[str], path_column: str, rows: list[list[str]]) -> int | None:
    """Where the labels stand: in the column of a known name or, of two, in the one beside the path if it looks so.

    Words that repeat look like labels; numbers and words of which each occurs once are something else.
    """
    others = [column for column in header if column not in ("", path_column)]  # an index may be written without a name
    known = [column for column in LABEL_COLUMNS if column in others]
    if known and "split" in others:
        warnings.warn(
            f"the column split of {file} is not looked at, all its rows are taken: make a list for each part",
            stacklevel=2,
        )
    if known:
        return header.index(known[0])
    if len(others) == 1 and others[0] not in (*PATH_COLUMNS, "split"):
        at = header.index(others[0])
        words = [row[at].strip() for row in rows if len(row) > at and row[at].strip()]
        if 2 <= len(set(words)) <= len(words) / 2 and not all(re.fullmatch(r"[-+.\d]+", word) for word in words):
            warnings.warn(f"labels are read from the column {others[0]} of {file}", stacklevel=2)
            return at
    if others:
        warnings.warn(
            f"no labels are read from {file}: none of its columns {', '.join(others)} has a name known for labels "
            f"({', '.join(LABEL_COLUMNS)})",
            stacklevel=2,
        )
    return None


def _number(labels: list[str], file: Path, keep: bool) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Whole numbers from 0 on are kept, others and words are numbered in order; a missing label is -1."""
    present = {label for label in labels if label}
    if not present:
        return None, None
    if all(re.fullmatch(r"-?\d+", label) for label in present):
        if max(map(len, present)) > 18:  # beyond int64
            raise UserError(f"{file}: the label {max(present, key=len)} is too large a number")
        numbers = torch.tensor([int(label) if label else -1 for label in labels])
        if int(numbers.min()) < -1:
            raise UserError(f"{file}: the label {int(numbers.min())} is negative (only -1 is allowed, for unknown)")
        known = numbers[numbers >= 0].unique()
        if len(known) == int(numbers.max()) + 1 or (keep and int(numbers.max()) < LARGEST_CLASS):
            return numbers, None
        # With gaps they would be as many classes as the largest says: heads and tables of votes, and wrong top-5.
        dense = torch.where(numbers < 0, -1, torch.searchsorted(known, numbers.clamp_min(int(known[0]))))
        return dense, tuple(str(label) for label in known.tolist())
    classes = tuple(sorted(present))
    number = {name: index for index, name in enumerate(classes)}
    return torch.tensor([number.get(label, -1) for label in labels]), classes
