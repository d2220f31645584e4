"""What a training measures of itself: k-NN where there are labels, health, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_runs import INTER, Heard, folder_settings, tiny, train, write_images

from interclr.data.builtin import open_source
from interclr.data.reading import Unreadable
from interclr.data.source import Source
from interclr.engine.dataset import TrainingData
from interclr.engine.monitor import Monitor
from interclr.evaluate import PROTOCOLS
from interclr.evaluate.requested import Request
from interclr.evaluate.session import evaluate
from interclr.screen import Screen


def test_images_alone_in_their_clusters_are_warned_of_where_pairs_are_drawn(tmp_path: Path) -> None:
    for loss, warned in (("own", True), ("soft", False)):
        heard = Heard()
        settings = tiny(*INTER, "inter.clusters=60", f"inter.loss={loss}", "schedule.epochs=1")
        train(settings, tmp_path / loss, screen=heard.screen)
        assert ("most clusters hold a single image" in heard.text) == warned


def test_pairs_are_judged_where_some_are_drawn(tmp_path: Path) -> None:
    for loss, judged in (("own", True), ("soft", False)):
        run = train(tiny(*INTER, f"inter.loss={loss}"), tmp_path / loss)
        told = [line for line in run.metrics if line.get("event") == "monitor"][-1]
        assert "purity" in told
        assert ("positives_right" in told, "negatives_wrong" in told) == (judged, judged)


def test_more_neighbours_than_images_are_told_as_what_they_are(tmp_path: Path) -> None:
    heard = Heard()
    run = train(tiny("monitor.k=5000"), tmp_path / "run", screen=heard.screen)
    assert run.result["knn_k"] == 64
    assert "k=64, T=" in heard.text


def test_evaluation_finds_what_training_found_where_a_fifth_of_the_images_is_tested_on(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(300):
        home = tmp_path / "images" / f"class{number % 2}"
        home.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (8, 8, 3), dtype=torch.uint8, generator=generator).numpy()
        Image.fromarray(pixels).save(home / f"{number:03d}.png")
    settings = tiny(f"data.source={tmp_path / 'images'}", "monitor.k=auto", "schedule.epochs=1")
    run = train(settings, tmp_path / "run")
    assert run.settings.monitor.k == run.result["knn_k"] == 4  # a fiftieth of 240, not of 300
    found = evaluate(["knn"], PROTOCOLS, Request(str(run.folder)), [], Screen(quiet=True))
    assert found["knn"]["k"] == 4
    assert found["knn"]["top1"] == pytest.approx(run.result["knn"], abs=1e-4)


def test_what_is_not_read_and_what_guessing_gives_is_said(tmp_path: Path) -> None:
    for number in range(40):
        home = tmp_path / "images" / ("holiday" if number < 30 else "cats")
        home.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (6 * number, 0, 0)).save(home / f"{number:03d}.png")
    for name in ("a.HEIC", "b.heic", "c.nef", "notes.txt"):
        (tmp_path / "images" / "cats" / name).write_bytes(b"")
    heard, settings = Heard(), tiny(f"data.source={tmp_path / 'images'}", "data.batch=8", "schedule.epochs=1")
    run = train(settings, tmp_path / "run", screen=heard.screen)
    assert "pictures that are not read, beside these: 2 .heic, 1 .nef; convert them to JPEG first" in heard.text
    assert "labels: 2 classes of 40 images, the commonest (holiday) is 75 % of them" in heard.text
    assert run.result["knn_guessing"] == 75
    assert heard.text.count("always the commonest class 75.0 %, raw pixels") == 2
    assert not any(
        source.not_read for source in (open_source("synthetic:8"), open_source(str(tmp_path / "images/holiday")))
    )


def test_unlabelled_images_train_without_knn(out: Path, tmp_path: Path) -> None:
    run = train(folder_settings(write_images(tmp_path / "flat", 20), *INTER), out)
    assert run.finished
    assert not any(key.startswith("knn") for line in run.metrics for key in line)
    assert "knn" not in run.result
    assert "nmi" not in run.result
    assert run.result["rank_me"] > 0


def test_labelled_images_without_a_test_split_measure_knn(out: Path, tmp_path: Path) -> None:
    heard = Heard()
    run = train(folder_settings(write_images(tmp_path / "images", 40, classes=2)), out, screen=heard.screen)
    assert 0 <= run.result["knn"] <= 100
    assert "k-NN is measured on 8 of the 40" in heard.text


def test_k_nn_leaves_out_what_cannot_be_read(tmp_path: Path) -> None:
    """Streamed, an unreadable image would be seen as its neighbour: here every one before an image of another class."""
    for place in ("bank", "queries"):
        for number in range(12):
            home = tmp_path / place / f"class{number % 2}"
            home.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (250 * (number % 2), number, 0)).save(home / f"{number:03d}.png")
        (tmp_path / place / "class0" / "010.png").write_bytes(b"no image")  # the last before class 1
    settings = tiny("data.max_side=32", "data.workers=0", "monitor.k=20", "engine.precision=fp32")
    bank, queries = (open_source(str(tmp_path / place), max_side=32) for place in ("bank", "queries"))

    def measured(queries: Source) -> float | None:
        data = TrainingData(bank, bank, queries, torch.arange(len(bank)), Unreadable())
        return Monitor(settings, data, torch.device("cpu"), Screen(quiet=True)).knn(torch.nn.Flatten())

    assert measured(queries) == 100
    for path in (tmp_path / "queries").rglob("*.png"):
        path.write_bytes(b"no image")
    assert measured(queries) is None
