"""Pictures of runs: something is drawn, frames have their colours, and nothing breaks without labels."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from PIL import Image
from tiny_runs import INTER, tiny, train, write_images

from interclr.config import dump
from interclr.data.source import ArraySource, FileSource, UnreadableImage
from interclr.study import figures, gallery
from interclr.study.gallery import GREEN, RED, plot_negatives, plot_retrieval
from interclr.study.plots import plot_curves, plot_tsne
from interclr.study.schema import read_study
from interclr.study.subjects import _short, differences, open_run, titles, training_data
from interclr.study.tables import label_free, summarise
from interclr.types import UserError


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Intra only, both, and both without labels."""
    home = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    short = ("schedule.epochs=1", "data.source=synthetic:96", "engine.loggers=[]")
    train(tiny(*short), home / "intra")
    train(tiny(*short, *INTER), home / "both")
    bare = write_images(home / "bare", 24)
    train(tiny(*short, *INTER, f"data.source={bare}", "data.batch=8"), home / "unlabelled")
    return {name: home / name for name in ("intra", "both", "unlabelled")}


def pixels(path: Path) -> np.ndarray:
    assert path.with_suffix(".svg").stat().st_size > 1000
    return np.asarray(Image.open(path.with_suffix(".png")).convert("RGB")).astype(int)


def count(picture: np.ndarray, colour: str) -> int:
    wanted = np.round(255 * np.array(to_rgb(colour)))
    return int((abs(picture - wanted).max(2) <= 2).sum())


def test_tsne_has_a_panel_for_each_run(runs: dict[str, Path], tmp_path: Path) -> None:
    plot_tsne([runs["intra"], runs["both"]], tmp_path / "two.png", classes=3, images=2, views=4)
    plot_tsne([runs["both"]], tmp_path / "one", classes=3, images=2, views=4)
    two, one = pixels(tmp_path / "two"), pixels(tmp_path / "one")
    assert two.shape[1] == pytest.approx(2 * one.shape[1], rel=0.02)
    for colour in ("C0", "C1", "C2"):
        assert count(two, colour) > 20
    left, right = two[:, : two.shape[1] // 2], two[:, two.shape[1] // 2 :]
    assert (left < 200).any()
    assert (right < 200).any()


def test_tsne_reads_what_it_shows_and_passes_over_what_cannot_be_read(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_images(tmp_path / "photos", 40)
    for path in sorted(folder.iterdir())[::3]:
        path.write_bytes(b"not an image")
    read: list[int] = []
    real = FileSource.read
    monkeypatch.setattr(FileSource, "read", lambda self, row: (read.append(row), real(self, row))[1])
    plot_tsne([runs["both"]], tmp_path / "few", classes=2, images=3, views=3, data=str(folder))
    assert (pixels(tmp_path / "few") < 128).any()
    assert 12 <= len(read) < 40  # six shown, each looked at and then drawn
    for path in folder.iterdir():
        path.write_bytes(b"not an image")
    with pytest.raises(UserError, match="interclr data check"):
        plot_tsne([runs["both"]], tmp_path / "none", data=str(folder))


def test_retrieval_frames_hits_and_misses(runs: dict[str, Path], tmp_path: Path) -> None:
    plot_retrieval([runs["both"]], tmp_path / "one", queries=4, neighbours=6)
    picture = pixels(tmp_path / "one")
    assert count(picture, GREEN) > 200
    assert count(picture, RED) > 200
    plot_retrieval([runs["intra"], runs["both"]], tmp_path / "two", queries=4, neighbours=6)
    assert pixels(tmp_path / "two").shape[0] > 1.6 * picture.shape[0]


def test_negatives_by_strategy(runs: dict[str, Path], tmp_path: Path) -> None:
    plot_negatives(runs["both"], tmp_path / "bank", anchors=2, negatives=8)
    assert count(pixels(tmp_path / "bank"), RED) > 200
    plot_negatives(runs["intra"], tmp_path / "plain", anchors=2, negatives=4)
    assert (pixels(tmp_path / "plain") < 128).any()


def test_negatives_are_drawn_from_the_runs_own_pool(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(Axes, "set_title", lambda _, title, **options: titles.append(title))
    shares: list[tuple[int, float]] = []
    real = gallery.false_negatives

    def noted(bank: Any, sampler: Any, *rest: Any) -> float | None:
        shares.append((sampler.negatives, sampler.pool_fraction))
        return real(bank, sampler, *rest)

    monkeypatch.setattr(gallery, "false_negatives", noted)
    plot_negatives(runs["both"], tmp_path / "own", anchors=1)  # INTER has a pool of a half
    assert "farthest 50 %" in titles[-1]
    assert {fraction for _, fraction in shares[1:4:2]} == {0.5}
    shares.clear()
    plot_negatives(runs["both"], tmp_path / "given", anchors=1, pool_fraction=0.05)
    assert "farthest 5 %" in titles[-1]
    (counted,) = {count for count, _ in shares}  # as many for all
    assert counted < 10
    assert f"shares of {counted} an anchor" in titles[-1]


def test_without_labels_there_are_no_frames(runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["unlabelled"]
    plot_retrieval([run], tmp_path / "r", queries=2, neighbours=3)
    plot_negatives(run, tmp_path / "n", anchors=2, negatives=3)
    plot_tsne([run], tmp_path / "t", classes=2, images=3, views=3)
    for name in ("r", "n"):
        picture = pixels(tmp_path / name)
        assert (picture < 128).any()
        assert count(picture, GREEN) < 50
        assert count(picture, RED) < 50
    assert (pixels(tmp_path / "t") < 128).any()


def test_a_query_of_the_bank_does_not_find_itself(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captions: list[str] = []
    real = gallery.draw_tile

    def noted(axes: Any, picture: Any, x: float, y: float, text: str, frame: str | None = None) -> None:
        captions.append(text)
        real(axes, picture, x, y, text, frame)

    monkeypatch.setattr(gallery, "draw_tile", noted)
    plot_retrieval([runs["unlabelled"]], tmp_path / "r", queries=3, neighbours=4)
    assert captions.count("query") == 3
    assert len(captions) == 3 * 5
    subject = open_run(runs["unlabelled"])
    features = subject.embed(training_data(subject.settings).images)
    nearest = (features @ features.T).fill_diagonal_(-1).amax(1)
    shown = [float(text) for text in captions if text != "query"]
    assert max(shown) <= float(nearest.max()) + 0.005


def test_curves_of_several_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    plot_curves([runs["intra"], runs["both"]], tmp_path / "all")
    picture = pixels(tmp_path / "all")
    assert count(picture, "C0") > 50
    assert count(picture, "C1") > 50


def cell_folder(home: Path, *overrides: str) -> Path:
    """A cell of a study as it lies on disk, as far as its name goes."""
    folder = home / "cells" / hashlib.sha256(" ".join(overrides).encode()).hexdigest()[:12]
    folder.mkdir(parents=True)
    for name in ("cell.yaml", "resolved.yaml"):
        (folder / name).write_text(dump(tiny(*INTER, *overrides)))
    return folder


def test_cells_are_called_by_what_they_vary(runs: dict[str, Path], tmp_path: Path) -> None:
    few = cell_folder(tmp_path, "inter.clusters=2", "engine.log_every=1")
    many = cell_folder(tmp_path, "inter.clusters=8", "inter.margin=0.25")
    hard = cell_folder(tmp_path, "inter.sampler={name: hard, negatives: 2}")
    assert titles([few, many]) == ["inter.clusters=2\ninter.margin=-0.5", "inter.clusters=8\ninter.margin=0.25"]
    assert titles([runs["both"], cell_folder(tmp_path, "seed=1"), cell_folder(tmp_path, "seed=2")]) == [
        "both",  # has a name already, and more that differs
        "seed=1",
        "seed=2",
    ]
    assert titles([few, hard])[1] == "inter.clusters=4\ninter.sampler=hard"
    assert titles([few, few]) == [str(few)] * 2  # nothing tells them apart
    assert titles([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]


def test_what_differs_in_a_list_is_told_by_its_place_and_not_at_length() -> None:
    trees = [{"views": [{"flip": flip, "scale": [0.2, 1.0]}, {"flip": 0.5}]} for flip in (0.1, 0.5)]
    assert differences(trees) == {"views.0.flip": [0.1, 0.5]}
    assert differences([{"a": [1]}, {"a": [1, 2]}]) == {"a": [[1], [1, 2]]}
    assert len(_short("x" * 500)) == 25


def test_cells_of_another_version_keep_their_names(tmp_path: Path) -> None:
    cells = [cell_folder(tmp_path, f"seed={seed}") for seed in (1, 2)]
    for folder in cells:
        with open(folder / "resolved.yaml", "a") as file:
            file.write("gone_setting: 1\n")
    assert titles(cells) == [folder.name for folder in cells]


def test_panels_of_cells_are_titled_by_what_they_vary(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = []
    for key, seed in (("0123456789ab", 3), ("ba9876543210", 4)):
        folder = Path(shutil.copytree(runs["both"], tmp_path / "cells" / key))
        settings = (folder / "resolved.yaml").read_text()
        (folder / "resolved.yaml").write_text(settings.replace("seed: 0", f"seed: {seed}"))
        shutil.copy(folder / "resolved.yaml", folder / "cell.yaml")
        cells.append(folder)
    shown: list[str] = []
    monkeypatch.setattr(Axes, "set_title", lambda _, title, **options: shown.append(title))
    plot_tsne([runs["both"], *cells], tmp_path / "three", classes=2, images=2, views=3)
    assert shown == ["both", "seed=3", "seed=4"]


def cell(name: str, x: float, values: list[float], *unfinished: str) -> dict[str, Any]:
    """With a finished run for each of ``values`` and others in the states ``unfinished``."""
    summary = summarise([{"knn": value, "rank_me": x, "milliseconds_per_step": value + 1} for value in values])
    runs: list[dict[str, Any]] = [
        {"state": "finished", "curve": [{"epoch": 0.0, "knn_before": value}, {"epoch": 1.0, "knn": value}]}
        for value in values
    ]
    runs += [{"state": state} for state in unfinished]
    return {"name": name, "x": x, "same_as": None, "summary": summary, "runs": runs}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Axes]]:
    """Every panel of a study's figures, with the name of its file."""
    found: list[tuple[str, Axes]] = []
    real = figures.figure

    @contextmanager
    def watched(path: Path, **options: Any) -> Iterator[list[Axes]]:
        with real(path, **options) as panels:
            yield panels
            found.extend((path.name, axes) for axes in panels)

    monkeypatch.setattr(figures, "figure", watched)
    return found


def draw(out: Path, kind: str, cells: list[dict[str, Any]]) -> None:
    free = label_free({each["name"]: each["summary"] for each in cells})
    study = read_study(f"title: t\nfigure: {kind}\ncells: [{{name: a}}]", "t")
    figures.draw(out, study, {"cells": cells, "label_free": free})


def hollow(axes: Axes) -> list[tuple[float, float]]:
    """Points and bars that are drawn white inside."""
    lines = [point for line in axes.lines if line.get_markerfacecolor() == "white" for point in line.get_xydata()]
    dots = [
        place
        for collection in axes.collections
        if isinstance(collection, PathCollection)
        for place, colour in zip(collection.get_offsets(), collection.get_facecolors(), strict=True)
        if to_rgb(colour) == (1, 1, 1)
    ]
    bars = [
        (bar.get_width(), bar.get_y() + bar.get_height() / 2)
        for bar in axes.patches
        if isinstance(bar, Rectangle) and to_rgb(bar.get_facecolor()) == (1, 1, 1)
    ]
    return [(float(x), float(y)) for x, y in (*lines, *dots, *bars)]


KINDS = ["curve", "bars", "over-epochs", "table"]


@pytest.mark.parametrize("kind", KINDS)
def test_figures_say_which_seeds_and_cells_they_show(tmp_path: Path, drawn: list[tuple[str, Axes]], kind: str) -> None:
    cells = [
        cell("a", 1, [50, 52, 54]),
        cell("b", 2, [60], "failed", "new"),
        cell("broken", 3, [], "failed", "new"),
        cell("c", 4, [53, 55]),
        cell("waiting", 5, [], "new", "new"),
        cell("worse", 6, [], "failed"),
        cell("begun", 7, [], "started", "new"),
    ]
    draw(tmp_path, kind, cells)
    assert [name for name, _ in drawn] == ["figure", "label_free"]
    (_, axes), (_, free) = drawn
    absent = "not shown: broken, worse (failed), waiting (not run yet), begun (not finished)"
    assert axes.texts[-1].get_text() == "1–3 seeds, ± standard deviation"
    assert " ".join(axes.figure.get_supxlabel().split()) == f"hollow: one seed; {absent}"
    assert " ".join(free.figure.get_supxlabel().split()) == f"1–3 seeds a point; hollow: one seed; {absent}"
    where = {"curve": [(2, 60)], "bars": [(1, 60)], "over-epochs": [(0, 60), (1, 60)], "table": [(61, 1)]}
    assert hollow(axes) == where[kind]
    assert hollow(free) == [(2, 60)]
    if kind == "curve":  # nothing lies over it
        assert max(axes.lines, key=lambda line: line.get_zorder()).get_markerfacecolor() == "white"
    inside = [text.get_color() for text in axes.texts[:-1]]
    assert inside == (["white", "C0", "white"] if kind == "table" else ["black"] * len(inside))
    # Without a spread there is no bar of errors, not even one of no length.
    errors = [each for each in axes.collections if isinstance(each, LineCollection)]
    ends = [segment for each in errors for segment in each.get_segments() if len(segment)]
    assert all(np.ptp(segment) > 0 for segment in ends)
    assert len(ends) == (0 if kind == "over-epochs" else 2)
    assert (pixels(tmp_path / "figure") < 128).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("seeds", "says"), [((1, 1), "one seed"), ((3, 3), "3 seeds, ± standard deviation"), ((2, 3), "2–3 seeds, ±")]
)
def test_where_all_cells_are_shown_nothing_is_said_below(
    tmp_path: Path, drawn: list[tuple[str, Axes]], kind: str, seeds: tuple[int, int], says: str
) -> None:
    draw(tmp_path, kind, [cell(name, count, [50.0, 60, 70][:count]) for name, count in zip("ab", seeds, strict=True)])
    for name, axes in drawn:
        assert hollow(axes) == []
        if name == "figure":
            assert axes.texts[-1].get_text().startswith(says)
            assert axes.figure.get_supxlabel() == ""
        else:
            assert axes.figure.get_supxlabel() == f"{says.partition(',')[0]} a point"


def test_a_finished_cell_without_the_figure_is_named(tmp_path: Path, drawn: list[tuple[str, Axes]]) -> None:
    bare = cell("bare", 3, [1.0])
    del bare["summary"]["knn"]
    draw(tmp_path, "bars", [cell("a", 1, [50]), cell("b", 2, [60]), bare])
    assert drawn[0][1].figure.get_supxlabel() == "not shown: bare (no such figure)"


@pytest.mark.parametrize("kind", ["curve", "bars", "over-epochs"])
@pytest.mark.parametrize("values", [[100.0, 100.0], [97.0, 100.0], [0.0, 0.0], [0.2, 1.0]])
def test_percentages_stay_between_0_and_100(
    tmp_path: Path, drawn: list[tuple[str, Axes]], kind: str, values: list[float]
) -> None:
    draw(tmp_path, kind, [cell(name, x, values) for name, x in (("a", 1), ("b", 2), ("c", 3), ("d", 5))])
    assert [name for name, _ in drawn] == ["figure", "label_free"]
    for _, axes in drawn:
        low, high = axes.get_ylim()
        assert 0 <= low < high <= 100
        assert all(text.get_color() != "white" for text in axes.texts)  # points have no inside to write in
    assert drawn[-1][1].get_title() == "k-NN is equal in all cells"


def test_a_run_under_two_names_is_one_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell(name, x, [x, 2.0 * x]) for name, x in (("a", 1), ("b", 2), ("c", 3), ("d", 3))]
    cells[3]["same_as"] = "c"
    points: list[int] = []
    monkeypatch.setattr(Axes, "scatter", lambda _, x, y, **options: points.append(len(x)))

    free = label_free({each["name"]: each["summary"] for each in cells[:3]})
    figures._label_free(tmp_path / "label_free", {"cells": cells, "label_free": free})
    assert sum(points) == 3


def test_k_nn_curves_stay_between_0_and_100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"epoch": epoch, "knn": 80.0 + 10 * epoch, "loss": 100.0 + 10 * epoch} for epoch in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    limits: dict[str, tuple[float, float]] = {}
    real = Axes.set_title

    def noted(axes: Axes, title: str, **options: Any) -> Any:
        limits[title] = axes.get_ylim()
        return real(axes, title, **options)

    monkeypatch.setattr(Axes, "set_title", noted)
    plot_curves([tmp_path], tmp_path / "curves")
    assert limits["k-NN, %"][1] == 100
    assert limits["loss"][1] > 120


def test_what_is_not_a_run_is_said(tmp_path: Path) -> None:
    for call in (plot_tsne, plot_retrieval, plot_curves):
        with pytest.raises(UserError, match="is not a run folder"):
            call([tmp_path], tmp_path / "x")
        with pytest.raises(UserError, match="name one run folder"):
            call([], tmp_path / "x")
    with pytest.raises(UserError, match="is not a run folder"):
        plot_negatives(tmp_path, tmp_path / "x")


def test_negatives_come_from_a_bank_that_was_started_and_is_of_these_images(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 40, classes=2)
    wishes = (f"data.source={folder}", *INTER)
    waiting = train(tiny(*wishes, "inter.warmup_epochs=1"), tmp_path / "waiting", stop_after=1).folder
    assert bank_of(waiting)[1] == "the features of waiting, clustered here"
    begun = train(tiny(*wishes), tmp_path / "begun", stop_after=1).folder
    assert bank_of(begun)[1] == "the memory bank of begun"
    first = sorted(folder.rglob("*.png"))[0]
    first.rename(first.with_name("zzz.png"))  # as many images, in another order
    with pytest.raises(UserError, match="belongs to other images"):
        plot_negatives(begun, tmp_path / "negatives.png")


def bank_of(folder: Path) -> Any:
    subject = open_run(folder)
    return gallery._bank_of(subject, training_data(subject.settings))


def test_an_unreadable_picture_is_grey() -> None:
    class Broken(ArraySource):
        def read(self, index: int) -> torch.Tensor:
            raise UnreadableImage("a", "broken")

    picture = gallery._picture(Broken(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), name="broken"), 0)
    assert np.allclose(picture, 128 / 255)
