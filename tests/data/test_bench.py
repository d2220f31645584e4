"""The made photographs, and the figures about the loader: sane, not fast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from interclr.bench.data import make_photos, measure_loader, measure_wait
from interclr.data.builtin import open_source
from interclr.data.packed import pack
from interclr.types import UserError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    make_photos(folder / "photos", 24)
    pack(open_source(folder / "photos"), folder / "store")
    return folder / "store"


def test_photos_are_the_same_every_time_and_differ(tmp_path: Path) -> None:
    make_photos(tmp_path / "a", 8)
    make_photos(tmp_path / "b", 5)
    make_photos(tmp_path / "c", 2, seed=1)
    files = sorted((tmp_path / "a").iterdir())
    contents = [file.read_bytes() for file in files]
    assert len(set(contents)) == 8
    assert all((tmp_path / "b" / file.name).read_bytes() == file.read_bytes() for file in files[:5])
    assert (tmp_path / "c" / files[0].name).read_bytes() != contents[0]
    assert 90_000 < sum(map(len, contents)) / 8 < 130_000
    sizes = [Image.open(file).size for file in files]
    assert {width > height for width, height in sizes} == {True, False}
    assert all(250 < min(size) <= max(size) <= 512 for size in sizes)


@pytest.mark.parametrize("workers", [0, 2])
def test_figures_of_the_loader(store: Path, workers: int) -> None:
    figures = measure_loader(store, 4, workers, 0.2, CPU)
    assert figures["images_per_second"] > 10
    assert 90 < figures["kilobytes_per_image"] < 130
    assert figures["megabytes_per_second"] == pytest.approx(
        figures["images_per_second"] * figures["kilobytes_per_image"] / 1e3
    )
    assert figures["worker_microseconds_per_image"] == pytest.approx(
        1e6 * max(workers, 1) / figures["images_per_second"]
    )


def test_waiting_without_workers_and_hardly_any_with_long_steps(store: Path) -> None:
    busy = measure_wait(store, 8, 0, 0.1, CPU, step_ms=0.1)
    assert busy["wait"] > 0.5
    calm = measure_wait(store, 1, 1, 0.1, CPU, step_ms=40)
    assert 0 <= calm["wait"] < busy["wait"]
    assert 0 <= calm["idle"] < 0.5
    assert calm["images_per_second"] == pytest.approx(25, rel=0.5)


def test_raw_pixels_are_nothing_to_decode(tmp_path: Path) -> None:
    pack(open_source("synthetic:20"), tmp_path / "raw")
    with pytest.raises(UserError, match="raw pixels"):
        measure_loader(tmp_path / "raw", 4, 0, 0.1, CPU)
