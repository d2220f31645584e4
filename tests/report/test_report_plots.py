"""The page's findings as figures."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from report_runs import picture_folder
from tiny_runs import tiny, train, write_images

from interclr.report import plots
from interclr.report.collect import open_gallery, sampled, training_source
from interclr.run.folder import Run
from interclr.screen import Screen
from interclr.types import UserError

QUIET, CPU = Screen(quiet=True), torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two classes of noise; an exact and a near copy."""
    folder = tmp_path_factory.mktemp("plots")
    picture_folder(folder / "images", [f"{name}/{i:03d}.png" for name in ("bright", "dark") for i in range(12)])
    shutil.copy(folder / "images" / "dark" / "003.png", folder / "images" / "dark" / "copy.png")
    coarse = np.random.default_rng(0).integers(0, 200, (5, 5, 3), dtype=np.uint8)
    for name, side in (("small", 32), ("large", 48)):
        Image.fromarray(coarse).resize((side, side)).save(folder / "images" / "bright" / f"{name}.png")
    settings = tiny(f"data.source={folder / 'images'}", "data.batch=8", "schedule.epochs=1")
    return train(settings, folder / "run")


def test_what_is_drawn_is_what_the_page_finds(run: Run) -> None:
    source, _ = training_source(run, run.settings.data, None)
    gallery = open_gallery(run.folder, source, sampled(len(source), 100), run.settings, CPU, QUIET)
    names = [Path(name).name for name in gallery.names()]
    (line,) = plots.duplicates(gallery)
    shown = [(None if position is None else names[position], text) for position, text in line.tiles]
    assert {shown[0][0], shown[1][0]} == {"003.png", "copy.png"}
    assert shown[0][1] == "equal"
    assert shown[2] == (None, "")
    assert {shown[3][0], shown[4][0]} == {"small.png", "large.png"}
    assert 0.95 <= float(shown[3][1]) <= 1
    lines = plots.clusters(gallery)
    orders = [line.title.partition("\n")[0] for line in lines if line.title.count("\n") == 2]
    assert orders == ["Largest", "Smallest", "Purest", "Most mixed"]
    assert any("% dark" in line.title for line in lines)
    assert all(line.tiles for line in lines)
    values = [float(text) for line in plots.outliers(gallery) for _, text in line.tiles]
    assert values == sorted(values)
    assert len(values) == len(gallery) // 2


@pytest.mark.parametrize("kind", plots.KINDS)
def test_every_kind_is_a_picture_and_the_same_when_drawn_again(kind: str, run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        plots.plot_found(kind, run.folder, tmp_path / name, device=CPU, screen=QUIET)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    pixels = np.asarray(Image.open(tmp_path / "one.png").convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20


def test_nothing_alike_is_told(run: Run, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 8)
    other = train(tiny(f"data.source={images}", "data.batch=4", "schedule.epochs=1"), tmp_path / "run")
    with pytest.raises(UserError, match="no two of the 8 images"):
        plots.plot_found("duplicates", other.folder, tmp_path / "none", device=CPU, screen=QUIET)
    with pytest.raises(UserError, match="not a run folder"):
        plots.plot_found("map", tmp_path, tmp_path / "none", device=CPU, screen=QUIET)
