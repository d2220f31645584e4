from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_runs import Heard, write_images

from interclr.config import DataConfig
from interclr.data.builtin import open_source
from interclr.data.canvas import Canvas
from interclr.data.loader import ResidentLoader
from interclr.data.source import ArraySource, Source
from interclr.data.stream import StreamLoader
from interclr.data.subset import Subset
from interclr.engine import dataset
from interclr.engine.dataset import TrainingData, median_side, open_training_source, prepare
from interclr.evaluate.base import check_labels
from interclr.evaluate.requested import Request, Requested
from interclr.types import UserError

CPU = torch.device("cpu")


def opened(config: DataConfig, heard: Heard | None = None) -> TrainingData:
    return prepare(open_training_source(config), config, CPU, (heard or Heard()).screen)


def break_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def test_the_synthetic_set_is_resident_and_has_a_test_split() -> None:
    data = opened(DataConfig(source="synthetic:50"))
    assert isinstance(data.images, Canvas)
    assert isinstance(data.queries, Canvas)
    assert data.bank_rows.tolist() == list(range(50))
    train, test = open_source("synthetic:50"), open_source("synthetic:50", "test")
    assert torch.equal(data.images.pixels, train.pixels)
    assert torch.equal(data.queries.pixels, test.pixels)
    assert not torch.equal(train.pixels, test.pixels)


@pytest.mark.parametrize("resident", [True, False])
def test_held_out_images_are_not_trained_on(resident: bool) -> None:
    config = DataConfig(source="synthetic:40", hold_out=10, resident=resident)
    data = opened(config)
    assert len(data.source) == 30
    whole = open_source("synthetic:40").pixels
    key = {row.numpy().tobytes(): i for i, row in enumerate(whole)}
    held = [key[row.numpy().tobytes()] for row in rows_of(data.queries)]
    kept = [key[row.numpy().tobytes()] for row in rows_of(data.images)]
    assert sorted(held + kept) == list(range(40))
    assert kept == sorted(kept)
    assert torch.equal(data.labels, open_source("synthetic:40").labels[kept])
    again = opened(config)  # whatever the run's seed
    assert torch.equal(again.labels, data.labels)


def test_images_held_out_do_not_make_others_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "HOST_LIMIT", 40 * 3 * 32 * 32)
    assert isinstance(opened(DataConfig(source="synthetic:40")).images, Canvas)
    assert isinstance(opened(DataConfig(source="synthetic:50", hold_out=10)).images, Canvas)
    assert not isinstance(opened(DataConfig(source="synthetic:41")).images, Canvas)


def rows_of(images: object) -> list[torch.Tensor]:
    return list(images.pixels) if isinstance(images, Canvas) else [images.read(i) for i in range(len(images))]


@pytest.mark.parametrize("resident", [True, False])
def test_without_a_test_split_some_training_images_are_queries_and_not_in_the_bank(
    resident: bool, tmp_path: Path
) -> None:
    folder = write_images(tmp_path / "images", 30, classes=3)
    heard = Heard()
    data = opened(DataConfig(source=str(folder), resident=resident), heard)
    assert "no test split" in heard.text
    assert isinstance(data.queries, Canvas) == resident
    assert len(data.queries) == 6
    assert len(data.bank_rows) == 24
    source = open_source(str(folder))
    key = {source.read(i).numpy().tobytes(): i for i in range(30)}
    queries = [key[row.numpy().tobytes()] for row in rows_of(data.queries)]
    assert sorted(queries + data.bank_rows.tolist()) == list(range(30))
    assert data.queries.labels.tolist() == source.labels[queries].tolist()


def names_of(images: object, source: Source) -> list[str]:
    key = {source.read(i).numpy().tobytes(): source.name_of(i) for i in range(len(source))}
    return [key[row.numpy().tobytes()] for row in rows_of(images)]


def uneven_classes(folder: Path) -> Path:
    """Of 1, 2, 3, 8 and 13 images."""
    for number, count in enumerate((1, 2, 3, 8, 13)):
        write_images(folder / str(number), count, seed=number)
    return folder


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("limit", [2_000, 3])
def test_k_nn_is_measured_on_the_images_that_evaluate_tests_on(
    resident: bool, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "MONITOR_QUERIES", limit)
    folder = uneven_classes(tmp_path / "images")
    heard = Heard()
    data = opened(DataConfig(source=str(folder), resident=resident), heard)
    request = Request("torchvision/resnet18", str(folder))
    evaluated = Requested(request, 512, tmp_path, heard.screen).labelled()
    tested = [evaluated.test.name_of(row) for row in range(len(evaluated.test))]
    asked = names_of(data.queries, open_source(str(folder)))
    assert len(tested) == 7
    assert data.queries.labels.tolist() == [int(name[0]) for name in asked]
    if limit == 3:
        assert len(asked) == 3
        assert set(asked) < set(tested)
        assert "on 3 of the 27 labelled images, some of the 7 that interclr evaluate tests on" in heard.text
    else:
        assert asked == tested
        assert "on 7 of the 27 labelled images, those that interclr evaluate tests on" in heard.text
    assert "against the other 20" in heard.text
    bank = [data.source.name_of(row) for row in data.bank_rows.tolist()]
    assert bank == [evaluated.train.name_of(row) for row in range(len(evaluated.train))]


def test_an_unreadable_image_does_not_change_which_others_are_asked_for(tmp_path: Path) -> None:
    folder = uneven_classes(tmp_path / "images")
    source = open_source(str(folder))
    before = opened(DataConfig(source=str(folder)))
    asked = names_of(before.queries, source)
    pixels = {source.name_of(i): source.read(i) for i in range(len(source))}
    for broken in (asked[-1], "4/000.png" if asked[-1] != "4/000.png" else "4/001.png"):
        break_file(folder / broken)
    after = opened(DataConfig(source=str(folder)))
    expected = torch.stack([pixels[name] for name in asked[:-1]])
    assert torch.equal(after.queries.pixels, expected)
    assert len(after.bank_rows) + len(after.queries) == len(after.source) == 25


def test_labels_that_are_all_unknown_are_lent_to_nobody(tmp_path: Path) -> None:
    write_images(tmp_path, 6)
    (tmp_path / "list.csv").write_text("".join(f"{i:03d}.png,-1\n" for i in range(6)))
    assert opened(DataConfig(source=str(tmp_path / "list.csv"))).queries is None
    request = Request("torchvision/resnet18", str(tmp_path / "list.csv"))
    with pytest.raises(UserError, match=r"6 of 6 training images .* have no label"):
        check_labels(Requested(request, 512, tmp_path, Heard().screen).labelled())


def test_no_knn_where_one_class_alone_could_be_asked_for(tmp_path: Path) -> None:
    for number, count in enumerate((1, 1, 5)):
        write_images(tmp_path / str(number), count, seed=number)
    data = opened(DataConfig(source=str(tmp_path)))
    assert data.queries is None
    assert data.bank_rows is None


def test_images_that_are_all_the_same_are_said_once(tmp_path: Path) -> None:
    for number in range(5):
        Image.new("RGB", (20, 20)).save(tmp_path / f"{number}.png")
    heard = Heard()
    opened(DataConfig(source=str(tmp_path)), heard)
    assert heard.text.count("all 5 images looked at are the same: interclr data check") == 1
    Image.new("RGB", (20, 20), (0, 0, 1)).save(tmp_path / "4.png")
    heard = Heard()
    opened(DataConfig(source=str(tmp_path)), heard)
    assert "the same" not in heard.text


def test_a_look_at_a_large_set_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.zeros(3_000, 3, 4, 4, dtype=torch.uint8)
    monkeypatch.setattr(dataset, "open_source", lambda spec, split, *rest: ArraySource(pixels, name=split))
    compared = []
    monkeypatch.setattr(torch, "equal", lambda one, other, real=torch.equal: compared.append(1) or real(one, other))
    heard = Heard()
    opened(DataConfig(source="many"), heard)
    assert "all 2,048 images looked at are the same" in heard.text
    assert len(compared) == 2_048
    compared.clear()
    pixels[1:] = torch.arange(1, 3_000).view(-1, 1, 1, 1)
    opened(DataConfig(source="many"))
    assert len(compared) == 2


def test_no_labels_no_knn(tmp_path: Path) -> None:
    data = opened(DataConfig(source=str(write_images(tmp_path / "flat", 5))))
    assert data.queries is None
    assert data.bank_rows is None


def test_unknown_labels_are_neither_in_the_bank_nor_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def source(split: str) -> ArraySource:
        pixels = open_source("synthetic:12").pixels
        return ArraySource(pixels, torch.tensor([-1, 0, 1, 2] * 3), name=split)

    monkeypatch.setattr(dataset, "open_source", lambda spec, split, *rest: source(split))
    data = opened(DataConfig(source="partly labelled"))
    assert data.bank_rows.tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert data.queries.labels.tolist() == [0, 1, 2] * 3
    held = opened(DataConfig(source="partly labelled", hold_out=8))
    assert (held.queries.labels >= 0).all()


@pytest.mark.parametrize("broken", [[3], [0, 1, 9]])
def test_unreadable_files_are_left_out_of_a_resident_set_and_said(broken: list[int], tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 10)
    for i in broken:
        break_file(folder / f"{i:03d}.png")
    heard = Heard()
    data = opened(DataConfig(source=str(folder)), heard)
    assert len(data.source) == len(data.images) == 10 - len(broken)
    assert list(data.unreadable.reasons) == [f"{i:03d}.png" for i in broken]
    assert f"{len(broken)} of 10 images are unreadable" in heard.text
    assert data.source.name_of(0) == f"{next(i for i in range(10) if i not in broken):03d}.png"
    with pytest.raises(UserError, match=rf"{broken[0]:03d}\.png.*data\.unreadable=fail"):
        opened(DataConfig(source=str(folder), unreadable="fail"))


def test_an_unreadable_test_image_is_said(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_images(tmp_path / split, 8, classes=2)
    break_file(tmp_path / "test" / "class0" / "002.png")
    heard = Heard()
    data = opened(DataConfig(source=str(tmp_path)), heard)
    assert len(data.queries) == 7
    assert "class0/002.png" in heard.text


def test_too_few_images(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no images in"):
        open_training_source(DataConfig(source=str(tmp_path / "empty")))
    with pytest.raises(UserError, match=r"1 image\(s\) found; at least 2"):
        open_training_source(DataConfig(source=str(write_images(tmp_path / "one", 1))))
    with pytest.raises(UserError, match=r"64 image\(s\) found, 63 held out"):
        open_training_source(DataConfig(source="synthetic:64", hold_out=63))
    folder = write_images(tmp_path / "broken", 4)
    for path in folder.iterdir():
        break_file(path)
    with pytest.raises(UserError, match="can be read"):
        median_side(open_training_source(DataConfig(source=str(folder))))
    write_images(tmp_path / "broken", 1)
    with pytest.raises(UserError, match="at least 2 readable"):
        opened(DataConfig(source=str(folder)))


def test_median_side_passes_over_what_it_cannot_read(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 5, side=20)
    write_images(folder / "large", 2, side=90)
    break_file(folder / "000.png")
    assert median_side(open_source(str(folder))) == 20


def test_loaders_and_the_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    config = DataConfig(source=str(write_images(tmp_path / "images", 6)), max_side=32, workers=0)
    assert isinstance(opened(config).loader(2, 0, CPU, config, heard.screen), ResidentLoader)
    monkeypatch.setattr(dataset, "HOST_LIMIT", 6 * 3 * 32 * 32 - 1)
    stream = opened(config).loader(2, 0, CPU, config, heard.screen)
    assert isinstance(stream, StreamLoader)
    assert stream.workers == 0
    monkeypatch.setattr(dataset, "HOST_LIMIT", 6 * 3 * 32 * 32)
    assert isinstance(opened(config).images, Canvas)


def test_a_subset_of_an_array_counts_as_what_it_is() -> None:
    source = open_source("synthetic:10")
    assert Subset(source, [1, 2]).labels.tolist() == source.labels[[1, 2]].tolist()
