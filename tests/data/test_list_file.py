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


TWICE = ("a.png,wren", "b.png,owl", "a.png,wren", "b.png,owl")


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(("path,species", *TWICE)),
        "\n".join(("Species;File", *(";".join(reversed(line.split(","))) for line in TWICE))),
        "\n".join((",path,species", *(f"{number},{line}" for number, line in enumerate(TWICE)))),  # as pandas writes it
    ],
)
def test_a_column_beside_the_path_whose_words_repeat_holds_the_labels(tmp_path: Path, text: str) -> None:
    with pytest.warns(UserWarning, match=r"labels are read from the column species of .*list\.csv"):
        source = open_list(listed(tmp_path, text))
    assert source.classes == ("owl", "wren")
    assert source.labels is not None
    assert source.labels.tolist() == [1, 0, 1, 0]


def test_a_known_name_comes_first(tmp_path: Path) -> None:
    source = open_list(listed(tmp_path, "species,path,class\nx,a.png,wren\nx,b.png,owl\n"))
    assert source.classes == ("owl", "wren")


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("path,species,site\na.png,wren,1\nb.png,owl,2\n", "species, site"),
        ("filename,path\na.png,a.png\nb.png,b.png\n", "filename"),  # another path is no label
        ("id,filename\n100,a.png\n101,b.png\n", "id"),
        ("path,caption\na.png,a wren\nb.png,an owl\n", "caption"),  # each occurs once
        ("path,split\na.png,train\nb.png,val\na.png,train\nb.png,val\n", "split"),
        ("path,delta\na.png,-5\nb.png,0.5\na.png,-5\nb.png,0.5\n", "delta"),
        ("path,site\na.png,x\nb.png,x\n", "site"),  # one word says nothing
    ],
)
def test_columns_that_are_not_understood_are_named(tmp_path: Path, text: str, columns: str) -> None:
    with pytest.warns(UserWarning, match=rf"no labels .*list\.csv.* columns {columns} .*\(label, class, target"):
        assert open_list(listed(tmp_path, text)).labels is None


def test_an_index_without_a_name_is_no_label(tmp_path: Path) -> None:
    assert open_list(listed(tmp_path, ",path\n0,a.png\n1,b.png\n")).labels is None


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ('a.png,"cat, big"\nb.png,"cat, small"\n', ("cat, big", "cat, small")),
        ('"a.png","say ""hi"""\n"b.png","x"\n', ('say "hi"', "x")),
        ("a.png;'cat; big'\nb.png;'cat; small'\n", ("cat; big", "cat; small")),
        ('# exported\n\npath, label\na.png, "owl"\nb.png, wren\n', ("owl", "wren")),
        ("filepath,split,label\na.png,train,owl\nb.png,test,wren\n", ("owl", "wren")),
        ("image_url\tid\tlabel\na.png\t17\towl\nb.png\t18\twren\n", ("owl", "wren")),
    ],
)
@pytest.mark.filterwarnings("ignore:the column split")
def test_labels_are_whole_fields_of_the_right_column(tmp_path: Path, text: str, classes: tuple[str, ...]) -> None:
    source = open_list(listed(tmp_path, text))
    assert source.classes == classes
    assert source.labels is not None
    assert source.labels.tolist() == [0, 1]


def test_a_column_of_splits_is_told_where_it_is_not_looked_at(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the column split of .* is not looked at"):
        open_list(listed(tmp_path, "path,label,split\na.png,owl,train\nb.png,wren,test\n"))


def test_numbers_with_gaps_are_as_many_classes_as_there_are(tmp_path: Path) -> None:
    text = "a.png 3\nb.png 900\na.png 17\nb.png -1\n"
    source = open_list(listed(tmp_path, text))
    assert source.labels is not None
    assert source.labels.tolist() == [0, 2, 1, -1]
    assert source.classes == ("3", "17", "900")
    kept = open_list(listed(tmp_path, text), keep_numbers=True)
    assert kept.labels is not None
    assert kept.labels.tolist() == [3, 900, 17, -1]


@pytest.mark.parametrize("name", ["a\u2028b.png", "a\u0085b.png", "#c.png"])
def test_rare_characters_in_names(tmp_path: Path, name: str) -> None:
    listed(tmp_path, "")
    (tmp_path / name).write_bytes((tmp_path / "a.png").read_bytes())
    for text in (f"{name} 0\nb.png 1\n", f"path,label\n{name},0\nb.png,1\n"):
        source = open_list(listed(tmp_path, text))
        assert [source.name_of(row) for row in range(2)] == [name, "b.png"]


def test_a_first_line_that_names_a_file_without_an_extension_is_not_a_header(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 1: no image path"):
        open_list(listed(tmp_path, "../flat/noext\na.png\n"))
