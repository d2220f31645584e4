"""The command from one word to results on disk, and what it says when the word is wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from box_tree import write_year
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_session import QUIET, TINY, class_folder, measure

from interclr.config import load_settings
from interclr.data.builtin import open_source
from interclr.data.packed import pack
from interclr.data.source import Source
from interclr.data.synthetic import generate
from interclr.engine import pretrain
from interclr.evaluate import PROTOCOLS, Request, evaluate, open_subject
from interclr.evaluate.base import Context, Evaluation, LabelledData, Subject
from interclr.evaluate.paper import published
from interclr.evaluate.session import place_of
from interclr.models import BackboneConfig
from interclr.run import checkpoint
from interclr.screen import Screen
from interclr.types import UserError


def test_a_run_is_measured_on_its_own_data(run: Path, tmp_path: Path) -> None:
    figures = measure(["knn"], str(run), "k=5", out=tmp_path)["knn"]
    assert figures["k"] == 5
    result = json.loads((tmp_path / "knn" / "result.json").read_text())
    assert result["figures"] == figures
    assert result["settings"]["temperature"] == 0.1
    predictions = json.loads((tmp_path / "knn" / "predictions.json").read_text())
    assert all(len(values) == 40 for values in predictions.values())
    assert measure(["knn"], str(run), "k=5", out=tmp_path)["knn"] == figures  # from cached features


def test_the_clusters_are_the_runs_own(run: Path, tmp_path: Path) -> None:
    figures = measure(["clusters"], str(run), out=tmp_path)["clusters"]
    kept = load_file(tmp_path / "clusters" / "assignments.safetensors")["labels"]
    assert len(kept) == 160
    assert figures["clusters"] == 8


def test_a_checkpoint_knows_the_data_and_the_clusters_of_its_run(run: Path, tmp_path: Path) -> None:
    newest = sorted((run / "checkpoint").glob("step-*.pt"))[-1]
    assert measure(["knn"], str(newest)) == measure(["knn"], str(run), out=tmp_path / "run")
    assert (run / "evaluate" / newest.stem / "knn" / "result.json").exists()
    for words in ({}, {"data": "synthetic:160"}):  # the same images by their name
        figures = measure(["clusters"], str(newest), out=tmp_path / "own", **words)["clusters"]
        assert figures["clusters"] == 8
        (tmp_path / "own" / "clusters" / "assignments.safetensors").unlink()
    measure(["clusters"], str(newest), "k=5", out=tmp_path / "other", data="synthetic:100")
    assert not (tmp_path / "other" / "clusters" / "assignments.safetensors").exists()


def test_clusters_that_a_user_asks_for_are_not_the_runs(run: Path, tmp_path: Path) -> None:
    save_file({"labels": torch.arange(160) % 3}, tmp_path / "mine.safetensors")
    for words, clusters in ((["k=5"], 5), ([f"assignments={tmp_path / 'mine.safetensors'}"], 3)):
        for data in (None, "synthetic:160"):
            assert measure(["clusters"], str(run), *words, data=data, out=tmp_path)["clusters"]["clusters"] == clusters


def test_other_data_need_no_checkpoint(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    for path in (copy / "checkpoint").iterdir():
        path.write_bytes(b"damaged")
    assert measure(["clusters"], str(copy), data="synthetic:100", out=tmp_path / "out")["clusters"]["clusters"] == 10
    with pytest.raises(UserError, match="no readable checkpoint"):
        measure(["clusters"], str(copy), out=tmp_path / "own")


def test_clusters_that_have_not_begun_are_nobodys(tmp_path: Path) -> None:
    late = [*TINY, "schedule.epochs=2", "inter.clusters=8", "inter.sampler.negatives=4", "inter.warmup_epochs=1"]
    pretrain(load_settings("default", late), tmp_path / "run", screen=QUIET, stop_after=3)
    measure(["clusters"], str(tmp_path / "run"), "k=5", out=tmp_path / "out")
    assert not (tmp_path / "out" / "clusters" / "assignments.safetensors").exists()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("held") / "run"
    few = [*TINY, "data.hold_out=30", "inter.clusters=8", "inter.sampler.negatives=4", "inter.warmup_epochs=0"]
    pretrain(load_settings("default", few), folder, screen=QUIET)
    return folder


def test_results_on_other_data_and_of_other_subjects_lie_apart(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photos = class_folder(tmp_path / "my photos")
    checkpoint = sorted((run / "checkpoint").glob("*.pt"))[-1]
    measure(["knn"], str(run))
    measure(["knn"], str(run), data=str(photos))
    measure(["knn"], str(checkpoint), data=str(photos))
    measure(["knn"], "torchvision/resnet18", data="synthetic:100", image_size=32)
    slug = str(photos).strip("/").replace("/", "-").replace(" ", "-")[-100:]
    places = {
        run / "evaluate": (str(run), "synthetic:160", 160, 40),
        run / "evaluate" / slug: (str(run), str(photos), 60, 20),
        run / "evaluate" / checkpoint.stem / slug: (str(checkpoint), str(photos), 60, 20),
        tmp_path / "evaluate" / "torchvision-resnet18" / "synthetic-100": (
            *("torchvision/resnet18 (random weights)", "synthetic:100", 100, 25),
        ),
    }
    for place, told in places.items():
        result = json.loads((place / "knn" / "result.json").read_text())
        assert tuple(result[key] for key in ("subject", "data", "train_images", "test_images")) == told
        assert {"command", "commit", "torch", "date"} <= result.keys()


def test_other_data_of_the_same_name_overwrite_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x/y and x-y, and y in two working directories; a result of before tells only what was typed."""
    run = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluate")))
    for place, images in (("x/y", 40), ("x-y", 50), ("x/x-y", 60)):
        class_folder(tmp_path / place, images)
    for cwd, data in ((".", "x/y"), (".", "x-y"), ("x", "x-y"), (".", "x/y"), ("x", "x-y")):
        monkeypatch.chdir(tmp_path / cwd)
        measure(["knn"], str(run), "k=3", data=data)
    results = {path: json.loads(path.read_text()) for path in (run / "evaluate").glob("*/knn/result.json")}
    told = {result["data_path"]: result["train_images"] + result["test_images"] for result in results.values()}
    assert told == {str(tmp_path / "x/y"): 40, str(tmp_path / "x-y"): 50, str(tmp_path / "x" / "x-y"): 60}
    first = run / "evaluate" / "x-y" / "knn" / "result.json"
    assert results[first]["data"] == "x/y"
    del results[first]["data_path"]
    first.write_text(json.dumps(results[first]))
    monkeypatch.chdir(tmp_path)
    assert place_of(Request(str(run), "x/y")) == run / "evaluate" / "x-y"
    assert place_of(Request(str(run), "x-y")) != run / "evaluate" / "x-y"


def test_held_out_images_are_tested_on_and_nothing_else(held: Path) -> None:
    monitored = json.loads((held / "result.json").read_text())
    figures = measure(["knn"], str(held), f"k={monitored['knn_k']}", held_out=True)
    assert figures["knn"]["top1"] == pytest.approx(monitored["knn"], abs=1e-3)  # which is measured on the same images
    predictions = json.loads((held / "evaluate" / "held-out" / "knn" / "predictions.json").read_text())
    shuffled = torch.randperm(160, generator=torch.Generator().manual_seed(20_260_101))
    labels = open_source("synthetic:160").labels
    assert labels is not None
    assert predictions["label"] == labels[shuffled[:30].sort().values].tolist()
    assert not (held / "evaluate" / "knn").exists()


@pytest.mark.parametrize("held_out", [False, True])
def test_the_clusters_of_a_run_with_held_out_images_are_its_own(held: Path, tmp_path: Path, held_out: bool) -> None:
    measure(["clusters"], str(held), out=tmp_path, held_out=held_out)
    assert len(load_file(tmp_path / "clusters" / "assignments.safetensors")["labels"]) == 130


def test_held_out_needs_a_run_that_held_images_out(run: Path, held: Path) -> None:
    with pytest.raises(UserError, match=r"held no images out; train with data\.hold_out=N"):
        measure(["knn"], str(run), held_out=True)
    with pytest.raises(UserError, match="needs a run, and no --data"):
        measure(["knn"], str(held), held_out=True, data="synthetic:100")
    with pytest.raises(UserError, match="needs a run, "):
        measure(["knn"], str(held / "backbone.safetensors"), held_out=True)
    with pytest.raises(UserError, match="splits of their own"):
        measure(["detection"], str(held), held_out=True)


def test_all_says_what_the_data_do_not_allow(run: Path, tmp_path: Path) -> None:
    figures = evaluate(["knn", "detection"], PROTOCOLS, Request(str(run), out=tmp_path), [], QUIET, whole=True)
    assert list(figures) == ["knn"]
    page = (tmp_path / "all.md").read_text()
    assert "Not run: detection" in page
    assert "boxes" in page
    assert "MoCov2" not in page  # the paper's figures are of other data
    assert "the paper's own" not in page


def test_figures_of_all_are_told_with_what_they_depend_on(run: Path, tmp_path: Path) -> None:
    stream = StringIO()
    names = ["knn", "linear", "low-shot", "semi-supervised"]
    found = evaluate(
        names, PROTOCOLS, Request(str(run), out=tmp_path), [], Screen(Console(file=stream, width=200)), True
    )
    best = json.loads((tmp_path / "linear" / "result.json").read_text())["best_stage"]
    told = {
        f"knn | top1, k=3, T=0.1 | {found['knn']['top1']:.2f}",
        f"linear | top1, {best} | {found['linear']['top1']:.2f}",
        f"low-shot | mAP, 1…16 per class | {found['low-shot']['mAP']:.2f}",
        *(
            f"semi-supervised | {top}@{part}%, {images} images | {found['semi-supervised'][f'{top}@{part}%']:.2f}"
            for top in ("top1", "top5")
            for part, images in ((1, 10), (10, 20))
        ),
    }
    lines = (tmp_path / "all.md").read_text().splitlines()
    assert {line.strip("| ") for line in lines[4:] if line.startswith("|")} == told
    table = json.loads((tmp_path / "all.json").read_text())["table"]
    assert {" | ".join(row.values()) for row in table} == told
    assert list(table[0]) == ["protocol", "figure", "this run"]
    assert "top1@1%, 10 images" in stream.getvalue()
    assert "this table is in" in stream.getvalue()


def test_the_papers_figures_stand_beside_those_on_the_papers_data(run: Path, tmp_path: Path) -> None:
    """Of ImageNet and VOC07 each has its own protocols; a folder is neither, whatever is in it."""
    for split in ("train", "val"):
        class_folder(tmp_path / "sets" / "imagenet" / split)

    class Fixed(Evaluation):
        name: str = "fixed"

        def run(self, subject: Subject, data: LabelledData, context: Context) -> dict[str, float]:
            return {"top1": 50.0, "mAP": 60.0}

    named = {"linear": Fixed, "svm": Fixed}
    stream = StringIO()
    screen = Screen(Console(file=stream, width=200))
    request = Request(str(run), "imagenet", tmp_path / "out", tmp_path / "sets")
    evaluate(list(named), named, request, [], screen, whole=True)
    page = (tmp_path / "out" / "all.md").read_text()
    assert "| linear | top1 | 50.00 | 64.6 | 65.7 | 67.5 | 68.0 | 70.6 | 73.5 |\n| svm | mAP | 60.00 |  |" in page
    assert "the paper's own results" in page
    assert "MoCov2" in stream.getvalue()
    folder = replace(request, data=str(tmp_path / "sets" / "imagenet"), out=tmp_path / "folder")
    evaluate(list(named), named, folder, [], screen, whole=True)
    assert "64.6" not in (tmp_path / "folder" / "all.md").read_text()
    assert published("svm", "mAP", "voc07")[0] == 81.7
    assert published("detection", "AP50", "voc0712")[0] == 81.5
    assert not published("detection", "AP50", "voc07")  # which is trained on one year alone


def test_a_result_of_another_seed_or_setting_is_not_replaced_without_a_word(run: Path, tmp_path: Path) -> None:
    class Counting(Evaluation):
        name: str = "counting"
        k: int | None = None
        jobs: int = 0

        def run(self, subject: Subject, data: LabelledData, context: Context) -> dict[str, float]:
            return {"images": float(len(data.train))}

    def said(name: str, *words: str, **more: Any) -> list[str]:
        stream = StringIO()
        screen = Screen(Console(file=stream, width=400))
        evaluate([name], {**PROTOCOLS, "counting": Counting}, Request(str(run), **more), list(words), screen)
        return [line for line in stream.getvalue().splitlines() if "replaces" in line]

    run = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluate")))
    place = run / "evaluate" / "counting"
    told = f"counting: replaces the result of seed 0{{}} in {place}; give --out to keep both"
    assert not said("counting", "k=4")
    assert not said("counting", "k=4")
    assert not said("counting", "k=4", "jobs=2")  # which changes nothing
    assert said("counting", "k=5") == [told.format(", k=4")]
    assert said("counting", "k=5", seed=1) == [told.format("")]
    assert not said("counting", "k=4", out=tmp_path / "other")
    assert said("counting", out=tmp_path / "other")[0].endswith("other/counting; give another --out to keep both")
    (place / "result.json").write_text("[]")
    assert not said("counting", "k=6")
    assert not said("clusters")
    run = Path(run.rename(tmp_path / "moved"))
    assert not said("clusters")  # its own assignments, in another place
    assert "assignments=assignments.safetensors" in said("clusters", "k=5")[0]
    whose = f"replaces the result of {tmp_path / 'run'}, seed 0 in {tmp_path / 'other'}"  # of the run as it was called
    assert whose in said("counting", out=tmp_path / "other")[0]
    assert not said("counting", out=tmp_path / "other")


def test_all_without_data_says_what_is_missing(tmp_path: Path) -> None:
    request = Request("torchvision/resnet18", out=tmp_path)
    with pytest.raises(UserError, match="nothing could be measured"):
        evaluate(["knn", "svm"], PROTOCOLS, request, [], QUIET, whole=True)
    assert "Not run: knn: name the labelled images with --data" in (tmp_path / "all.md").read_text()


def test_of_several_one_that_fails_is_an_error_after_the_others(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"detection: .* boxes"):
        measure(["detection", "knn"], str(run), out=tmp_path)
    assert (tmp_path / "knn" / "result.json").exists()
    assert not (tmp_path / "all.json").exists()


def test_a_lent_test_split_is_told_once(run: Path, tmp_path: Path) -> None:
    stream = StringIO()
    request = Request(str(run), str(class_folder(tmp_path / "images")), tmp_path / "out")
    evaluate(["knn", "svm"], PROTOCOLS, request, [], Screen(Console(file=stream, width=200)))
    assert stream.getvalue().count("no test split: 20 of 80 images") == 1


def test_a_folder_without_a_test_split_lends_a_fifth_of_every_class(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    figures = [measure(["knn"], str(run), data=str(folder), out=tmp_path / name)["knn"] for name in ("a", "b")]
    assert figures[0] == figures[1]
    predictions = json.loads((tmp_path / "a" / "knn" / "predictions.json").read_text())
    assert all(len(values) == 20 for values in predictions.values())  # 8 of every class, 2 of them tested on


def test_images_without_labels_are_refused_by_name(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "flat"
    folder.mkdir()
    for number, image in enumerate(generate(4, seed=0)[0]):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    with pytest.raises(UserError, match="no label"):
        measure(["knn"], str(run), data=str(folder), out=tmp_path / "out")


def test_a_wrong_setting_names_the_key(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^temprature: unknown key; did you mean temperature"):
        measure(["knn"], str(run), "temprature=1", out=tmp_path)
    with pytest.raises(UserError, match="--data"):
        measure(["knn"], "torchvision/resnet18", out=tmp_path)


def test_another_number_of_channels_is_named(tmp_path: Path) -> None:
    state = open_subject("torchvision/resnet18").backbone.network.state_dict()
    state["conv1.weight"] = state["conv1.weight"][:, :1].clone()
    save_file(state, tmp_path / "grey.safetensors")
    with pytest.raises(UserError, match=r"conv1\.weight"):
        open_subject(str(tmp_path / "grey.safetensors"), backbone="resnet18")


def test_the_clusters_of_a_run_on_a_folder_are_its_own(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    overrides = [*TINY, f"data.source={folder}", "inter.clusters=8", "inter.sampler.negatives=4"]
    pretrain(load_settings("default", overrides), tmp_path / "run", screen=QUIET)
    assert measure(["clusters"], str(tmp_path / "run"))["clusters"]["clusters"] == 8


def test_one_image_of_every_class_is_explained(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images", images=10)
    with pytest.raises(UserError, match="one image of every class"):
        measure(["knn"], str(run), data=str(folder), out=tmp_path / "out")


def test_features_are_made_again_when_the_pixels_change(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    first = measure(["knn"], str(run), "k=3", data=str(folder), out=tmp_path / "out")
    for number, path in enumerate(sorted(folder.rglob("*.png"))):
        Image.new("RGB", (32, 32), (number * 3, 0, 0)).save(path)
    again = measure(["knn"], str(run), "k=3", data=str(folder), out=tmp_path / "out")
    fresh = measure(["knn"], str(run), "k=3", data=str(folder), out=tmp_path / "other")
    assert again == fresh
    assert again != first


@pytest.mark.parametrize("damage", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_damaged_features_are_made_again(run: Path, tmp_path: Path, damage: bytes) -> None:
    first = measure(["knn"], str(run), "k=3", out=tmp_path)
    for path in (tmp_path / "features").iterdir():
        path.write_bytes(damage)
    assert measure(["knn"], str(run), "k=3", out=tmp_path) == first


def test_images_without_a_label_are_left_out_of_a_partly_labelled_set(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    lines = [f"{name},{name.split('/')[0] if number % 2 else ''}" for number, name in enumerate(names)]
    (folder / "list.csv").write_text("\n".join(lines))
    measure(["knn"], str(run), "k=3", data=str(folder / "list.csv"), out=tmp_path / "out")
    predictions = json.loads((tmp_path / "out" / "knn" / "predictions.json").read_text())
    assert all(len(values) == 10 for values in predictions.values())  # 4 of every class have labels, 1 is tested on


def replace_by_noise(folder: Path) -> None:
    random = np.random.default_rng(0)
    for path in folder.rglob("*.png"):
        Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)


@pytest.mark.parametrize("image_format", ["jpeg", "raw"])
def test_features_are_made_again_when_a_packed_store_is(run: Path, tmp_path: Path, image_format: str) -> None:
    """Names and labels are the same, so nothing but the images tells the stores apart."""
    folder, store = class_folder(tmp_path / "images"), tmp_path / "store"
    for again in (False, True):
        if again:
            replace_by_noise(folder)
            shutil.rmtree(store)
        pack(open_source(str(folder)), store, image_format=image_format)
        found = measure(["knn"], str(run), "k=3", data=str(store), out=tmp_path / "out")
    assert len(list((tmp_path / "out" / "features").iterdir())) == 4  # two splits of two stores
    assert found == measure(["knn"], str(run), "k=3", data=str(store), out=tmp_path / "fresh")


def test_features_of_a_subset_of_a_subset_are_made_again(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    lines = [f"{name},{name.split('/')[0] if number % 7 else ''}" for number, name in enumerate(names)]
    (folder / "list.csv").write_text("\n".join(lines))
    first = measure(["knn"], str(run), "k=3", data=str(folder / "list.csv"), out=tmp_path / "out")
    replace_by_noise(folder)
    again = measure(["knn"], str(run), "k=3", data=str(folder / "list.csv"), out=tmp_path / "out")
    assert again == measure(["knn"], str(run), "k=3", data=str(folder / "list.csv"), out=tmp_path / "fresh")
    assert again != first


def test_a_source_that_cannot_tell_is_never_the_same() -> None:
    class Unknown(Source):
        name, labels, classes = "unknown", None, None

        def __len__(self) -> int:
            return 3

        def name_of(self, index: int) -> str:
            return str(index)

        def read(self, index: int) -> torch.Tensor:
            return torch.zeros(3, 4, 4, dtype=torch.uint8)

        def _add_to_fingerprint(self, digest: object) -> None: ...

    assert Unknown().fingerprint() == Unknown().fingerprint()
    assert Unknown().content() != Unknown().content()


@pytest.mark.parametrize(
    ("names", "overrides"),
    [
        (["knn", "svm"], []),
        (["linear"], ["epochs=2"]),
        (["linear"], ["epochs=1", "augment=true"]),
        (["semi-supervised"], ["fractions=[0.5]", "epochs=1"]),
    ],
)
def test_unreadable_images_are_left_out_and_counted(
    run: Path, tmp_path: Path, names: list[str], overrides: list[str]
) -> None:
    """The figures are those of the folder without them."""
    folder, clean = tmp_path / "images", tmp_path / "clean"
    for place in (folder, clean):  # a test split of their own: a fifth would be another fifth without them
        for number, path in enumerate(sorted(class_folder(tmp_path / "flat", 120).rglob("*.png"))):
            target = place / ("val" if number % 4 == 0 else "train") / path.parent.name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    for number, path in enumerate(sorted(folder.rglob("*.png"))):
        if number % 5 == 0:
            path.write_bytes(path.read_bytes()[:40])
            (clean / path.relative_to(folder)).unlink()
    stream = StringIO()
    screen = Screen(Console(file=stream, width=200))
    request = Request(str(run), str(folder), tmp_path / "out")
    found = evaluate(names, PROTOCOLS, request, overrides, screen)
    assert found == measure(names, str(run), *overrides, data=str(clean), out=tmp_path / "other")
    said = stream.getvalue()
    counted = [said.count(words) for words in ("18 of 90 images", "6 of 30 images", "left out. The first is")]
    assert counted == [1, 1, 2]
    for name in names:
        assert json.loads((tmp_path / "out" / name / "result.json").read_text())["unreadable_left_out"] == 24


def test_clusters_know_of_images_that_another_protocol_found_unreadable(run: Path, tmp_path: Path) -> None:
    """The one splits the folder, the other takes it whole."""
    folder = class_folder(tmp_path / "images")
    broken = sorted(folder.rglob("*.png"))[::7]
    for path in broken:
        path.write_bytes(b"broken")
    both = measure(["knn", "clusters"], str(run), data=str(folder), out=tmp_path / "both")
    assert both["clusters"] == measure(["clusters"], str(run), data=str(folder), out=tmp_path / "one")["clusters"]
    result = json.loads((tmp_path / "both" / "clusters" / "result.json").read_text())
    assert result["unreadable_left_out"] == len(broken)


@pytest.mark.parametrize("name", ["knn", "linear", "semi-supervised", "svm"])
def test_a_split_of_which_nothing_can_be_read(run: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "images"
    class_folder(folder / "train")
    for path in class_folder(folder / "val", 30).rglob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(UserError, match=r"none of the 30 images of .*val can be read"):
        measure([name], str(run), data=str(folder), out=tmp_path / "out")


def test_a_test_split_that_is_of_no_use_is_not_replaced_by_training_images(run: Path, tmp_path: Path) -> None:
    class_folder(tmp_path / "images" / "train")
    (tmp_path / "images" / "val").mkdir()
    with pytest.raises(UserError, match=r"no images in .*val"):
        measure(["knn"], str(run), data=str(tmp_path / "images"), out=tmp_path / "out")


def test_detection_is_last_and_not_begun_on_a_cpu_unasked(run: Path, tmp_path: Path) -> None:
    assert list(PROTOCOLS)[-1] == "detection"
    write_year(tmp_path / "kit" / "VOC2007", {"trainval": 4, "test": 2})
    request = Request(str(run), str(tmp_path / "kit"), tmp_path / "out")
    with pytest.raises(UserError, match="nothing could be measured"):
        evaluate(["svm", "detection"], PROTOCOLS, request, [], QUIET, whole=True)
    assert "ask for it by its name" in json.loads((tmp_path / "out" / "all.json").read_text())["not run"]["detection"]


def test_figures_of_a_protocol_that_writes_nothing_itself(run: Path, tmp_path: Path) -> None:
    class Counting(Evaluation):
        name: str = "counting"

        def run(self, subject: Subject, data: LabelledData, context: Context) -> dict[str, float]:
            return {"images": float(len(data.train))}

    told = StringIO()
    console = Console(file=told, width=100)
    found = evaluate(["counting"], {"counting": Counting}, Request(str(run), out=tmp_path), [], Screen(console))
    written = json.loads((tmp_path / "counting" / "result.json").read_text())
    assert written["figures"] == found["counting"]
    assert written["protocol"] == "counting"
    assert "images" in told.getvalue()


def test_a_protocol_that_does_not_exist_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no protocol 'nope'; there are: knn, linear"):
        measure(["nope"], str(run), out=tmp_path)


def test_one_class_is_nothing_to_measure(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    (folder / "list.csv").write_text("\n".join(f"{name},1" for name in names))
    for protocol in ("knn", "linear"):
        with pytest.raises(UserError, match="are of one class"):
            measure([protocol], str(run), data=str(folder / "list.csv"), out=tmp_path / "out")


def test_settings_that_name_the_images_need_no_others(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(BackboneConfig(backbone="resnet18").build().network.state_dict(), path)
    for protocol, setting in (("detection", "data=/nowhere"), ("svm", "voc=/nowhere")):
        with pytest.raises(UserError, match="/nowhere"):
            measure([protocol], str(path), setting, backbone="resnet18", out=tmp_path / "out")


def test_unreadable_images_do_not_take_others_of_the_same_name_with_them(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    for split in ("train", "val"):
        for number, path in enumerate(sorted(class_folder(tmp_path / "flat", 80).rglob("*.png"))):
            target = folder / split / path.parent.name / f"{number % 8}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    for path in sorted((folder / "train").rglob("0.png"))[:3]:
        path.write_bytes(b"no image")
    found = measure(["clusters", "knn"], str(run), data=str(folder), out=tmp_path / "out")
    predictions = json.loads((tmp_path / "out" / "knn" / "predictions.json").read_text())
    assert len(predictions["label"]) == len(list((folder / "val").rglob("*.png")))
    assert set(found) == {"clusters", "knn"}
    for path in sorted((folder / "val").rglob("1.png"))[:2]:  # broken in the test split alone, met after the other
        path.write_bytes(b"no image")
    measure(["clusters", "knn"], str(run), data=str(folder), out=tmp_path / "again")
    counted = [
        json.loads((tmp_path / "again" / name / "result.json").read_text())["unreadable_left_out"]
        for name in ("clusters", "knn")
    ]
    assert counted == [3, 5]


@pytest.mark.parametrize("resident", ["true", "false"])
def test_the_clusters_of_a_run_are_its_own_though_images_are_unreadable(tmp_path: Path, resident: str) -> None:
    """In memory a run leaves them out; streamed, the bank has entries for them, which are of other images."""
    folder = class_folder(tmp_path / "images")
    sorted(folder.rglob("*.png"))[5].write_bytes(b"no image")
    wishes = [word for word in TINY if not word.startswith("data.source")]
    wishes += ["inter.clusters=8", "inter.sampler.negatives=4", f"data.source={folder}", f"data.resident={resident}"]
    wishes += ["data.image_size=32", "data.workers=0"]
    trained = pretrain(load_settings("default", wishes), tmp_path / "run", screen=QUIET)
    found = measure(["knn", "clusters"], str(tmp_path / "run"), out=tmp_path / "out")
    result = json.loads((tmp_path / "out" / "clusters" / "result.json").read_text())
    assert result["clusters_of"] == "the run"
    assert (result["train_images"], result["unreadable_left_out"]) == (79, 1)
    assigned = load_file(tmp_path / "out" / "clusters" / "assignments.safetensors")["labels"]
    bank = checkpoint.load_latest(trained.folder / "checkpoint")[0]["learner"]["bank.labels"]  # type: ignore[index]
    source = open_source(str(folder))
    rows = [row for row in range(80) if "no image" not in str(Path(folder, source.name_of(row)).read_bytes()[:8])]
    assert torch.equal(assigned, bank if resident == "true" else bank[rows])
    if resident == "true":
        assert found["clusters"]["nmi"] == pytest.approx(trained.result["nmi"])


def test_classes_of_a_single_image_are_said_to_be_never_tested(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    for kind in ("class0", "class1"):
        for path in sorted((folder / kind).iterdir())[1:]:
            path.unlink()
    stream = StringIO()
    request = Request(str(run), str(folder), tmp_path / "out")
    evaluate(["knn", "svm"], PROTOCOLS, request, [], Screen(Console(file=stream, width=200)))
    assert stream.getvalue().count("2 of 10 classes have a single image and are never tested") == 1


def test_a_test_of_one_class_alone_is_refused(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images", images=10)
    first = next((folder / "class0").iterdir())
    shutil.copy(first, first.with_name("again.png"))
    with pytest.raises(UserError, match="only one of its 10 classes has a second image"):
        measure(["knn"], str(run), data=str(folder), out=tmp_path / "out")


def test_what_keeps_a_folder_from_having_labels_is_named(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "stray")
    Image.new("RGB", (32, 32)).save(folder / "stray.png")
    with pytest.raises(UserError, match=r"81 of 81 .*, since stray\.png lies outside the class folders: "):
        measure(["knn"], str(run), data=str(folder), out=tmp_path / "out")
    split = tmp_path / "split"
    class_folder(split / "train")
    (split / "test" / "unknown").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(split / "test" / "unknown" / "a.png")
    with pytest.raises(UserError, match="all of unknown, a class that is missing in the training split"):
        measure(["knn"], str(run), data=str(split), out=tmp_path / "out")


@pytest.mark.parametrize(("name", "goes_on"), [("knn", False), ("semi-supervised", True)])
def test_an_interrupted_protocol_says_whether_it_goes_on(
    run: Path, tmp_path: Path, name: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PROTOCOLS[name], "run", interrupted)
    stream = StringIO()
    with pytest.raises(KeyboardInterrupt):
        evaluate([name], PROTOCOLS, Request(str(run), out=tmp_path), [], Screen(Console(file=stream, width=200)))
    assert ("the same command goes on where this one was" in stream.getvalue()) == goes_on


def test_of_linear_probes_those_that_augment_go_on() -> None:
    data = LabelledData(open_source("synthetic:40"), open_source("synthetic:40", "test"), "synthetic")
    kinds = [PROTOCOLS["linear"].model_validate(tree) for tree in ({}, {"augment": True}, {"preset": "imagenet"})]
    assert [kind.continues(data) for kind in kinds] == [False, True, True]
