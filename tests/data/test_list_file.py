from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from interclr.data.list_file import open_list
from interclr.types import UserError


def listed(folder: Path, text: str) -> Path:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(folder / name)
    path = folder / "list.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("first", ["picture class", "version 1.0", "#file list v1.0"])
def test_a_first_line_without_a_file_is_a_header(tmp_path: Path, first: str) -> None:
    source = open_list(listed(tmp_path, f"{first}\na.png 1\nb.png 0\n"))
    assert [source.name_of(row) for row in range(2)] == ["a.png", "b.png"]
    assert source.labels is not None
    assert source.labels.tolist() == [1, 0]


def test_a_first_line_with_a_file_we_do_not_know_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 1: no image path in '000\.heic 1'"):
        open_list(listed(tmp_path, "000.heic 1\na.png 1\nb.png 0\n"))


def test_a_label_beyond_all_numbers_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="99999999999999999999 is too large"):
        open_list(listed(tmp_path, "a.png 99999999999999999999\nb.png 1\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('path,label\na.png,"cat\nb.png,dog\n', "line 2: .*is a quote not closed"),
        ('path,label\na.png,cat\nb.png,"dog\nx",3\n', "line 3: a field goes on over several lines"),
        ("label,path\ncat,a.png\ndog\n", "line 3: 1 fields, but the path is in field 2"),
        ('path,label\na.png,"' + "x" * 200_000 + '"\n', "line 2: field larger"),
    ],
)
def test_no_line_of_a_table_is_lost(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_list(listed(tmp_path, text))


def test_a_table_may_have_blank_lines_and_quotes(tmp_path: Path) -> None:
    source = open_list(listed(tmp_path, 'label,path\n"a, b",a.png\n\n,,\nc,"b.png" \n'))
    assert source.classes == ("a, b", "c")
    assert [source.name_of(row) for row in range(2)] == ["a.png", "b.png"]
