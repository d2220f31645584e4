from __future__ import annotations

import csv
import json
import math
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from report_runs import (
    HOSTILE_CLASS,
    HOSTILE_NAMES,
    content_of,
    hostile_folder,
    inter_run,
    made,
    numbers,
    picture_folder,
    unit,
)
from report_runs import picture as opened
from tiny_runs import Heard, tiny, train, write_images

import interclr
from interclr.bank import MemoryBank
from interclr.report import findings, report
from interclr.report.embedding_map import flatten, principal
from interclr.report.gallery import Gallery
from interclr.report.history import MOST, commands, curves
from interclr.report.page import render, to_json
from interclr.report.thumbnails import SHEETS_BUDGET, sheets, square
from interclr.run.folder import Run
from interclr.screen import Screen
from interclr.types import UserError

QUIET = Screen(quiet=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inter_run(tmp_path_factory.mktemp("finished") / "run")


# Whole reports.


def test_a_report_of_a_finished_run_has_everything(finished: Path) -> None:
    content = made(finished)
    assert content["title"] == "MoCo v2 + InterCLR on synthetic train"
    assert {"k-NN accuracy", "Cluster purity", "Effective rank", "Clusters in training", "Epochs", "Training time"} == {
        figure["label"] for figure in content["figures"]
    }
    titles = [curve["title"] for curve in content["curves"]]
    assert titles[:3] == ["Loss", "k-NN accuracy", "Learning rate"]
    assert {"Cluster sizes", "Cluster balance", "Effective rank", "Uniformity"} <= set(titles)
    assert titles[titles.index("Uniformity") + 1] == "Alignment"  # the two are read together
    images = content["images"]
    assert images["ownBank"]
    assert images["count"] == images["total"] == 64
    assert list(images["clusters"]["orders"]) == ["Largest", "Smallest", "Purest", "Most mixed"]
    assert set(images["negatives"]["false"]) == {"Hard", "Semi-hard", "Random", "Semi-easy"}
    assert numbers(images["map"]["position"], "<f4").reshape(-1, 2).shape == (64, 2)
    assert np.abs(numbers(images["map"]["position"], "<f4")).max() <= 1.0001
    assert opened(images["thumbnails"]["sheets"][0]).width == 50 * images["thumbnails"]["side"]
    assert content["notes"] == []
    assert content["commands"][0]["text"] == (f"interclr pretrain {finished}/resolved.yaml --out {finished}-again")


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({}, [("Repeat this run, from its resolved settings", "interclr pretrain /r/resolved.yaml --out /r-again")]),
        (
            {"changes": [], "processes": 2, "command": "torchrun a", "continued_by": ["torchrun b"]},
            [
                (
                    "Repeat this run exactly, from its resolved settings",
                    "torchrun --nproc-per-node 2 -m interclr.cli pretrain /r/resolved.yaml --out /r-again",
                ),
                ("As it was started", "torchrun a"),
                ("Then continued by", "torchrun b"),
            ],
        ),
        (
            {"changes": ["schedule.epochs: 2 → 3"], "processes": 1, "command": "a", "continued_by": ["b", "c"]},
            [
                (
                    "As it was started; continued with other settings (schedule.epochs: 2 → 3), so no single command "
                    "repeats it",
                    "a",
                ),
                ("Then continued by", "b"),
                ("Then continued by", "c"),
            ],
        ),
    ],
)
def test_a_run_is_called_repeatable_only_where_it_is(told: dict[str, Any], shown: list[tuple[str, str]]) -> None:
    assert [(line["label"], line["text"]) for line in commands(Path("/r"), None, told)] == shown
    state = {key: told[key] for key in ("changes", "processes") if key in told}  # of a run that is not finished
    typed = [told["command"], *told["continued_by"]] if told else [""]
    assert [(line["label"], line["text"]) for line in commands(Path("/r"), state | {"commands": typed}, {})] == shown


def test_the_clusters_shown_are_those_of_the_map_and_negatives_those_of_the_bank(finished: Path) -> None:
    from tiny_runs import final_state

    images = made(finished)["images"]
    state = final_state(finished)["learner"]
    cluster = numbers(images["cluster"], "<i4")
    for number, entry in images["clusters"]["shown"].items():
        assert entry["size"] == int((cluster == int(number)).sum())
        assert all(cluster[member] == int(number) for member in entry["members"])
    similar = numbers(images["neighbours"]["image"], "<i4").reshape(64, -1)[:, 0]
    assert (cluster[similar] == cluster).mean() > 2 * np.square(np.bincount(cluster) / 64).sum()  # than by chance
    for anchor in images["negatives"]["anchors"]:
        label = int(state["bank.labels"][anchor["image"]])
        for drawn in anchor["draws"].values():
            assert all(int(state["bank.labels"][image]) != label for image, _ in drawn)


def test_comparing_pictures_has_a_bar(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: dict[str, list[tuple[int, int]]] = {}

    @contextmanager
    def working(self: Screen, what: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: bars.setdefault(what, []).append((done, total))

    monkeypatch.setattr(Screen, "working", working)
    made(finished, out=tmp_path / "page.html")
    assert bars["comparing pictures"] == [(64, 64)]


def test_the_same_run_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    pages = [report(finished, screen=QUIET, out=tmp_path / name / "page.html").read_bytes() for name in "ab"]
    assert pages[0] == pages[1]
    assert (tmp_path / "a" / "page-duplicates.csv").exists()  # beside it, and not another page's


def test_it_says_where_it_is_and_leaves_nothing_else(finished: Path, tmp_path: Path) -> None:
    heard = Heard()
    written = report(finished, screen=heard.screen, out=tmp_path)
    assert written == tmp_path / "report.html"
    assert str(written) in heard.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["duplicates.csv", "report.html"]


@pytest.mark.parametrize(
    ("out", "file"),
    [
        ("page.html", "page.html"),
        ("new/page.HTM", "new/page.HTM"),
        ("pages", "pages/report.html"),
        ("pages/", "pages/report.html"),
        ("v1.2", "v1.2/report.html"),
        ("site.html/", "site.html/report.html"),
    ],
)
def test_what_is_not_named_like_a_page_is_a_folder(finished: Path, tmp_path: Path, out: str, file: str) -> None:
    written = report(finished, screen=QUIET, points=4, out=f"{tmp_path}/{out}")
    assert written == tmp_path / file
    assert written.read_text().startswith("<!doctype html>")


def test_a_file_in_the_place_of_the_folder_is_said(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "page").write_text("mine")
    with pytest.raises(UserError, match="choose another --out"):
        report(finished, screen=QUIET, points=4, out=tmp_path / "page")
    assert (tmp_path / "page").read_text() == "mine"


def test_a_large_set_is_sampled(finished: Path) -> None:
    content = made(finished, points=20)
    images = content["images"]
    assert len(numbers(images["map"]["image"], "<i4")) == 20
    assert images["total"] == 64
    assert "20 of 64 images" in content["notes"][0]
    assert sum(entry["size"] for entry in images["clusters"]["shown"].values()) == images["count"] < 64


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_from_python_ends_with_its_page_where_it_is_wanted(tmp_path: Path, wanted: bool) -> None:
    settings = tiny("data.source=synthetic:16", "schedule.epochs=1")
    interclr.pretrain(settings, tmp_path / "run", screen=QUIET, stop_after=0)
    assert not (tmp_path / "run" / "report.html").exists()  # not finished
    options = {} if wanted else {"report": False}
    assert interclr.pretrain(settings, tmp_path / "run", screen=QUIET, resume=True, **options).finished
    assert (tmp_path / "run" / "report.html").exists() == wanted


def test_a_page_that_cannot_be_written_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise UserError("no room")

    monkeypatch.setattr("interclr.report.pretrain.write_report", fails)
    heard = Heard()
    settings = tiny("data.source=synthetic:16", "schedule.epochs=1")
    assert interclr.pretrain(settings, tmp_path / "run", screen=heard.screen).finished
    assert "no report: no room" in heard.text


def test_an_unfinished_run_shows_its_latest_checkpoint(out: Path) -> None:
    from tiny_runs import INTER

    train(tiny(*INTER), out, stop_after=5)
    content = made(out)
    assert content["notes"] == ["This run is not finished: the page shows its checkpoint at step 5."]
    assert content["images"]["ownBank"]
    assert next(f for f in content["figures"] if f["label"] == "Epochs")["value"].endswith("of 2")


def test_a_run_without_inter_has_k_means_clusters(out: Path) -> None:
    train(tiny("schedule.epochs=1"), out)
    images = made(out)["images"]
    assert not images["ownBank"]
    assert images["clusters"]["count"] >= 2
    assert images["negatives"]["anchors"]


def test_a_run_without_labels_has_nothing_that_needs_them(tmp_path: Path, out: Path) -> None:
    write_images(tmp_path / "images", 24)
    inter_run(out, f"data.source={tmp_path / 'images'}", "schedule.epochs=1")
    content = made(out)
    images = content["images"]
    assert images["label"] is None
    assert "false" not in images["negatives"]
    assert list(images["clusters"]["orders"]) == ["Largest", "Smallest", "Tightest", "Loosest"]
    assert all("purity" not in entry for entry in images["clusters"]["shown"].values())
    assert not {"k-NN accuracy", "Cluster purity"} & {figure["label"] for figure in content["figures"]}
    assert "k-NN accuracy" not in [curve["title"] for curve in content["curves"]]


@pytest.mark.parametrize("count", [2, 10])
def test_a_handful_of_images(tmp_path: Path, out: Path, count: int) -> None:
    write_images(tmp_path / "images", count)
    train(tiny(f"data.source={tmp_path / 'images'}", "data.batch=2", "schedule.epochs=1"), out)
    images = made(out)["images"]
    assert images["count"] == count
    assert images["map"]["method"] == ("PCA" if count == 2 else "t-SNE")
    assert images["neighbours"]["k"] == count - 1
    assert images["negatives"]["anchors"]


def test_unreadable_images_are_left_out_as_in_training(tmp_path: Path, out: Path) -> None:
    write_images(tmp_path / "images", 20, classes=2)
    (tmp_path / "images" / "class0" / "broken.png").write_bytes(b"nothing")
    inter_run(out, f"data.source={tmp_path / 'images'}", "schedule.epochs=1")
    content = made(out)
    assert content["images"]["ownBank"]
    assert content["images"]["count"] == 20
    assert not any("broken" in name for name in content["images"]["names"])


def test_data_that_have_changed_or_gone(tmp_path: Path, out: Path) -> None:
    write_images(tmp_path / "images", 20, classes=2)
    inter_run(out, f"data.source={tmp_path / 'images'}", "schedule.epochs=1")
    Image.new("RGB", (32, 32)).save(tmp_path / "images" / "class0" / "new.png")
    content = made(out)
    assert not content["images"]["ownBank"]
    assert any("changed" in note for note in content["notes"])
    shutil.rmtree(tmp_path / "images")
    with pytest.raises(UserError, match="left as it is"):  # a page that shows the images is worth more
        made(out)
    (out / "report.html").unlink()
    content = made(out)
    assert content["images"] is None
    assert content["curves"]
    assert any("cannot be shown" in note for note in content["notes"])


def test_damaged_checkpoints_leave_the_backbone(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    for path in (folder / "checkpoint").iterdir():
        path.write_bytes(b"damaged")
    content = made(folder)
    assert "no readable checkpoint" in content["notes"][0]
    assert not content["images"]["ownBank"]
    (folder / "backbone.safetensors").unlink()
    shutil.rmtree(folder / "checkpoint")
    (folder / "report.html").unlink()
    assert made(folder)["images"] is None


def test_copies_are_found(tmp_path: Path, out: Path) -> None:
    folder = write_images(tmp_path / "images", 12)
    shutil.copy(folder / "003.png", folder / "copy.png")
    coarse = np.random.default_rng(0).integers(0, 200, (5, 5, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((40, 40))
    picture.save(folder / "005.png")
    ImageEnhance.Brightness(picture).enhance(1.2).resize((60, 52)).save(folder / "larger.jpg", quality=70)
    train(tiny(f"data.source={folder}", "data.batch=4", "schedule.epochs=1"), out)
    images = made(out)["images"]
    exact = images["exact"]
    assert (exact["groups"], exact["surplus"]) == (1, 1)
    assert sorted(images["names"][i] for i in exact["shown"][0]["images"]) == ["003.png", "copy.png"]
    assert images["near"]["count"] == 1
    assert sorted(images["names"][i] for i in images["near"]["shown"][0]["images"]) == ["005.png", "larger.jpg"]
    copies = [set(pair["images"]) for pair in (*exact["shown"], *images["near"]["shown"])]
    assert all(set(pair["images"]) not in copies for pair in images["alike"]["shown"])
    cluster = numbers(images["cluster"], "<i4")
    assert len({cluster[i] for i in exact["shown"][0]["images"]}) == 1
    with open(out / "duplicates.csv", newline="") as file:
        header, first, second, *others = csv.reader(file)
    assert header == ["kind", "likeness", "image", "other"]
    assert first == ["exact", "1.0000", "003.png", "copy.png"]
    assert (second[0], {*second[2:]}) == ("near", {"005.png", "larger.jpg"})
    assert {kind for kind, *_ in others} == {"alike"}
    assert len(others) == images["alike"]["count"]
    values = [float(value) for _, value, *_ in others]
    assert values == sorted(values, reverse=True)
    assert {*others[0][2:]} == {images["names"][i] for i in images["alike"]["shown"][0]["images"]}


def test_the_table_of_copies_finds_files_whose_names_are_not_text(tmp_path: Path, out: Path) -> None:
    folder = write_images(tmp_path / "images", 12)
    odd = os.fsencode(folder) + b"/bad\xff.png"
    shutil.copy(os.fsencode(folder / "003.png"), odd)
    train(tiny(f"data.source={folder}", "data.batch=4", "schedule.epochs=1"), out)
    assert "bad\ufffd.png" in made(out)["images"]["names"]
    (row,) = (line for line in (out / "duplicates.csv").read_bytes().splitlines() if line.startswith(b'"exact"'))
    assert {os.path.join(os.fsencode(folder), name) for name in row.replace(b'"', b"").split(b",")[2:]} == {
        os.fsencode(folder / "003.png"),
        odd,
    }


def test_the_table_of_copies_is_one_whatever_names_hold(tmp_path: Path, out: Path) -> None:
    """A carriage return in a name, and one that a spreadsheet would take for a formula."""
    folder = write_images(tmp_path / "images", 12)
    for name in ("cr\rhere.png", "=1+1.png"):
        shutil.copy(folder / "003.png", folder / name)
    train(tiny(f"data.source={folder}", "data.batch=4", "schedule.epochs=1"), out)
    report(out, screen=QUIET)
    with open(out / "duplicates.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {4}
    named = {name for kind, _, *names in rows if kind == "exact" for name in names}
    assert named == {"003.png", "cr\rhere.png", "./=1+1.png"}
    assert all((folder / name).is_file() for name in named)


def test_hostile_names_stay_data(tmp_path: Path, out: Path) -> None:
    hostile_folder(tmp_path / "images")
    train(tiny(f"data.source={tmp_path / 'images'}", "schedule.epochs=1", "data.batch=8"), out)
    page = report(out, screen=QUIET).read_text()
    content = content_of(page)
    assert {f"{HOSTILE_CLASS}/{name}" for name in HOSTILE_NAMES} <= set(content["images"]["names"])
    assert HOSTILE_CLASS in content["images"]["classes"]
    assert "alert(1)<" not in page
    assert HOSTILE_CLASS not in page
    assert page.count("<script") == 2
    assert page.isascii() or all(ord(c) != 0x2028 for c in page)
    assert "default-src 'none'" in page
    assert "unsafe" not in page


def test_photographs_get_larger_pictures(tmp_path: Path, out: Path) -> None:
    picture_folder(tmp_path / "images", [f"{i}.png" for i in range(8)], side=120)
    train(tiny(f"data.source={tmp_path / 'images'}", "data.batch=4", "data.max_side=120", "schedule.epochs=1"), out)
    images = made(out)["images"]
    assert images["thumbnails"]["side"] == 64
    assert opened(images["large"]["0"]).size == (96, 96)


@pytest.mark.parametrize(("points", "says"), [(1, "from 2 to 20,000"), (20_001, "from 2 to 20,000")])
def test_what_cannot_be_done_is_said(finished: Path, tmp_path: Path, points: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        report(finished, screen=QUIET, points=points)
    with pytest.raises(UserError, match=r"no resolved\.yaml"):
        report(tmp_path, screen=QUIET)


# Parts.


def test_json_that_nothing_can_break_out_of() -> None:
    value = {"a": "</script><!-- & \u2028 \u2029 é 图", "b": [1.5, None]}
    text = to_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"x": math.nan})


def test_marks_inside_the_content_are_left_alone() -> None:
    page = render({"title": "{{style}} {{script}}"})
    assert content_of(page)["title"] == "{{style}} {{script}}"


def test_curves_are_thinned_and_skip_what_is_not_a_number() -> None:
    records: list[dict[str, Any]] = [{"step": 0, "epoch": 0.0, "event": "start", "knn_before": 10.0, "knn_pixels": 5.0}]
    records += [{"epoch": i / 100, "loss": 5 - i / 1000, "lr": 0.1} for i in range(5000)]
    records += [{"epoch": 50.0, "loss": math.nan, "lr": 0.0}, {"epoch": 50.0, "event": "monitor", "knn": 50.0}]
    found = {curve["title"]: curve for curve in curves(records)}
    loss = found["Loss"]["series"][0]
    assert len(loss["x"]) == len(loss["y"]) == MOST
    assert (loss["x"][0], loss["y"][0], loss["x"][-1]) == (0.0, 5.0, 49.99)
    assert found["k-NN accuracy"]["series"][0]["y"] == [10.0, 50.0]
    assert found["k-NN accuracy"]["level"] == {"name": "raw pixels", "y": 5.0}
    assert curves([]) == []


def test_nearest_neighbours_never_include_the_image_itself() -> None:
    features = torch.ones(30, 4)  # everybody is everybody's exact twin
    cosine, nearest = findings.neighbours(features)
    assert nearest.shape == (30, findings.NEIGHBOURS)
    assert not (nearest == torch.arange(30)[:, None]).any()
    features = unit([[1, 0], [1, 0.1], [0, 1]])
    cosine, nearest = findings.neighbours(features)
    assert nearest.tolist() == [[1, 2], [0, 2], [1, 0]]
    assert cosine[0, 0] == pytest.approx(1 / math.sqrt(1.01), abs=1e-6)


def test_clusters_are_ordered_and_mixed_as_counted() -> None:
    bank = MemoryBank(6, 2, 2)
    bank.fill(unit([[1, 0], [1, 0.1], [1, -0.1], [0, 1], [0.1, 1], [1, 1]]))
    bank.assign(torch.tensor([0, 0, 0, 1, 1, 1]))
    found = findings.clusters(bank, torch.tensor([7, 7, 7, 2, 2, -1]))
    assert found["orders"]["Purest"] == [0, 1]
    assert found["shown"]["0"]["classes"] == [[7, 1.0]]
    assert found["shown"]["1"]["classes"] == [[2, 1.0]]
    assert found["shown"]["1"]["size"] == 3
    assert findings.clusters(bank, None)["orders"]["Tightest"] == [0, 1]


def test_a_sample_without_a_labelled_image_is_shown_as_one_without_labels() -> None:
    bank = MemoryBank(6, 2, 2)
    assert findings.clusters(bank, torch.full((6,), -1)) == findings.clusters(bank, None)
    partly, none = (types.SimpleNamespace(labels=labels) for labels in (torch.tensor([-1, 3, -1]), None))
    assert Gallery(partly, 32, rows=[0, 2]).labels() is None
    assert Gallery(partly, 32, rows=[1, 2]).labels().tolist() == [3, -1]
    assert Gallery(none, 32, rows=[1, 2]).labels() is None


def test_negatives_come_from_other_clusters_and_false_ones_are_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    bank = MemoryBank(60, 8, 3, generator=generator)
    labels = torch.arange(60) % 6  # clusters are i mod 3: a label never crosses clusters
    found = findings.negatives(bank, labels, [0, 1], 0.5)
    assert found is not None
    for anchor in found["anchors"]:
        for drawn in anchor["draws"].values():
            assert drawn
            assert all(i % 3 != anchor["image"] % 3 for i, _ in drawn)
            assert [c for _, c in drawn] == sorted((c for _, c in drawn), reverse=True)
    assert set(found["false"].values()) == {0.0}
    everything = findings.negatives(bank, torch.zeros(60, dtype=torch.int64), [0], 0.5)
    assert everything is not None
    assert set(everything["false"].values()) == {1.0}
    assert everything["counted"] == 20  # half of the 40 in other clusters
    one = MemoryBank(4, 2, 1)
    assert findings.negatives(one, None, [0], 0.1) is None


def test_shares_of_false_negatives_are_of_as_many_for_every_strategy() -> None:
    """Whoever counts more of the nearest than the pool holds makes hard negatives look better than semi-hard ones."""
    angle = torch.arange(160) * 0.01  # images lie in a row, in alternate clusters, and have their neighbours' label
    bank = MemoryBank(160, 2, 2)
    bank.fill(torch.stack([angle.cos(), angle.sin()], 1))
    bank.assign(torch.arange(160) % 2)
    found = findings.negatives(bank, torch.arange(160) // 16, [0], 0.1)
    assert found is not None
    assert found["counted"] == 8  # the semi-hard pool: a tenth of 80
    assert found["false"]["Hard"] == found["false"]["Semi-hard"] > found["false"]["Random"]


def test_the_map_is_repeatable_and_keeps_neighbours_together() -> None:
    generator = np.random.default_rng(0)
    features = np.concatenate([generator.normal(c, 0.05, (30, 5)) for c in np.eye(5)[:3]]).astype(np.float32)
    layout, method = flatten(features, QUIET)
    assert method == "t-SNE"
    assert np.array_equal(layout, flatten(features, QUIET)[0])
    groups = layout.reshape(3, 30, 2)
    within = np.linalg.norm(groups - groups.mean(1, keepdims=True), axis=2).mean()
    between = np.linalg.norm(groups.mean(1)[:, None] - groups.mean(1)[None], axis=2)[~np.eye(3, dtype=bool)].min()
    assert between > 3 * within
    assert flatten(np.ones((50, 4), np.float32), QUIET)[1] == "PCA"  # collapsed: nothing to lay out


def test_umap_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class UMAP:
        def __init__(self, **options: Any) -> None:
            assert options == {"n_neighbors": 15, "random_state": 0}

        def fit_transform(self, features: Any) -> Any:
            return features[:, :2]

    module = types.ModuleType("umap")
    module.UMAP = UMAP  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "umap", module)
    assert flatten(np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32), QUIET)[1] == "UMAP"


def test_principal_components_are_those_of_an_svd() -> None:
    features = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    centred = features - features.mean(0)
    expected = np.abs(centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T)
    assert np.allclose(np.abs(principal(features, 2)), expected, atol=1e-4)
    assert np.allclose(np.abs(principal(features[:4], 2)).shape, (4, 2))


def test_thumbnails_are_square_and_sheets_stay_small() -> None:
    assert square(torch.zeros(3, 40, 90, dtype=torch.uint8), 32).size == (32, 32)
    assert square(torch.zeros(3, 5, 7, dtype=torch.uint8), 32).size == (32, 32)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (28, 28, 3), dtype=np.uint8))
    packed = sheets([noise] * 20_000, 28)  # noise is the worst case
    assert len(packed["sheets"]) == 8
    assert sum(map(len, packed["sheets"])) <= SHEETS_BUDGET


def test_labelled_images_too_large_for_a_k_nn_of_pixels(tmp_path: Path, out: Path) -> None:
    write_images(tmp_path / "images", 24, side=100, classes=2)
    wishes = (f"data.source={tmp_path / 'images'}", "data.batch=8", "data.image_size=96", "schedule.epochs=1")
    train(tiny(*wishes, "model.width=16"), out)  # 8 channels in channels-last crash torch on some CPUs
    curve = next(curve for curve in made(out)["curves"] if curve["title"] == "k-NN accuracy")
    assert curve["level"] is None
    assert len(curve["series"][0]["y"]) == 2


def test_a_run_that_began_as_another_has_a_report(finished: Path, out: Path) -> None:
    """Branched: it has a checkpoint to go on from and no record of a start."""
    (out / "checkpoint").mkdir(parents=True)
    first = sorted((finished / "checkpoint").iterdir())[0]
    shutil.copy(first, out / "checkpoint" / first.name)
    run = train(Run(finished).settings, out, resume=True)
    assert all(line.get("event") != "start" for line in run.metrics)
    assert "k-NN accuracy" in [curve["title"] for curve in made(out)["curves"]]
