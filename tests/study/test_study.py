"""Studies: schema, plan, and a tiny one end to end, interrupted and finished."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from PIL import Image
from tiny_runs import Heard, write_images

from interclr.config import Settings, load_settings, recipe_names
from interclr.run.folder import Run
from interclr.screen import Screen
from interclr.study import open_studies, parse_seeds, run_study, runner, study_names, worker
from interclr.study.plan import key_of, plan
from interclr.study.schema import read_study
from interclr.study.tables import _markdown_label_free, _spearman, as_csv, label_free, spread, summarise
from interclr.types import UserError

TINY = (
    "data.batch=16",
    "data.image_size=32",
    "model.backbone=resnet8",
    "model.width=8",
    "method={name: mocov2, queue: 32, dim: 16, hidden: 32, momentum: 0.9}",
    "inter.clusters=4",
    "schedule.warmup_epochs=0.5",
    "engine.log_every=2",
    "engine.device=cpu",
    "engine.loggers=[]",
    "monitor.every_epochs=1",
)
OWN = """
title: Two weights
axis: λ
figure: curve
seeds: [0, 1]
cells:
  - {name: both, x: 0.75, overrides: [inter.intra_weight=0.75]}
  - {name: intra, x: 1, overrides: [inter.intra_weight=1]}
paper: {best: both, note: both is better}
"""


def small(study: str | Path, out: Path, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"epochs": 1, "data": "synthetic:64", "overrides": TINY, "probe": False}
    documents = run_study(str(study), out, **(given | {"screen": Screen(quiet=True)} | options))
    return next(iter(documents.values()))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """(λ, seed) of every training that is started here."""
    made: list[tuple[float, int]] = []
    real = worker.pretrain

    def counted(settings: Settings, *args: Any, **kwargs: Any) -> Run:
        assert settings.inter is not None
        made.append((settings.inter.intra_weight, settings.seed))
        return real(settings, *args, **kwargs)

    monkeypatch.setattr(worker, "pretrain", counted)
    return made


# Schema.


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("title: x", "cells: field required"),
        ("title: x\ncels: []\ncells: [{name: a}]", "cels: unknown key; did you mean cells"),
        ("title: x\ncells: [{name: a, override: [b=1]}]", "cells.0.override: unknown key; did you mean overrides"),
        ("title: x\ncells: [{name: a}, {name: a}]", "cells: two are called 'a'"),
        ("title: x\nfigure: pie\ncells: [{name: a}]", "figure: "),
        ("title: x\ncells: [{name: a, relative: {inter.clusters: 0}}]", "cells.0.relative"),
        ("title: x\nseeds: [1, 1]\ncells: [{name: a}]", "seeds: [1, 1] names one twice"),
        ("title: x\ncells: [{name: a}]\npaper: {best: b}", "paper.best: there is no cell 'b'"),
        ("- 1", "a study is a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistakes_in_a_study_are_named(text: str, says: str) -> None:
    with pytest.raises(UserError, match=r"own\.yaml") as caught:
        read_study(text, "own.yaml")
    assert says in str(caught.value)


def test_unknown_study_and_missing_file_say_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean lambda"):
        open_studies("lamda")
    with pytest.raises(UserError, match="cannot be read"):
        open_studies(str(tmp_path / "none.yaml"))


def test_a_wrong_override_names_cell_and_key() -> None:
    study = read_study("title: x\ncells: [{name: odd, overrides: [inter.cluster=3]}]", "x")
    with pytest.raises(UserError, match=r"cell 'odd': inter\.cluster: unknown key; did you mean clusters"):
        plan(study)


def test_a_cell_is_what_pretrain_makes_of_its_overrides() -> None:
    study = read_study("title: x\ncells: [{name: random, overrides: [inter.sampler.name=random]}]", "x")
    (cell,) = plan(study, "mocov2-interclr", seeds=(0,), overrides=["inter.sampler.negatives=5"])
    assert cell.settings == load_settings("mocov2-interclr", cell.overrides)
    assert cell.settings.inter is not None
    assert cell.settings.inter.sampler.negatives == 5


@pytest.mark.parametrize(("text", "seeds"), [("3", (0, 1, 2)), ("0,7", (0, 7)), ("7,", (7,))])
def test_seeds_by_number_or_by_name(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["0", "a", "-1", "1,-2", ","])
def test_seeds_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--seeds"):
        parse_seeds(text)


# Plan.


@pytest.mark.parametrize("recipe", [name for name in recipe_names() if "interclr" in name])
def test_every_study_plans_over_every_recipe(recipe: str) -> None:
    overrides = ["engine.device=cpu", "data.image_size=32", "data.batch=64"]
    for name in study_names():
        study = open_studies(name)[name]
        cells = plan(study, recipe, 2, (0, 5), "synthetic:200", overrides)
        assert len(cells) == 2 * len(study.cells)
        assert all(isinstance(cell.settings, Settings) for cell in cells)
        assert {cell.settings.seed for cell in cells} == {0, 5}
        assert all(cell.settings.schedule.epochs == 2 for cell in cells)
        assert len({cell.key for cell in cells}) == len(cells), f"{name}: cells that do not differ"
        assert study.figure != "curve" or all(cell.x is not None for cell in cells)


def test_plain_recipes_get_the_branch_too() -> None:
    cells = plan(
        open_studies("clusters")["clusters"], "synthetic-mocov2", 1, (0,), "synthetic:400", ["engine.device=cpu"]
    )
    asked = [cell.settings.inter and cell.settings.inter.clusters for cell in cells]
    assert asked == [2, 4, 9, "auto", 36]
    assert [cell.x for cell in cells] == [2, 4, 9, 18, 36]


def test_multiples_of_a_given_number_need_no_data() -> None:
    cells = plan(open_studies("negatives")["negatives"], "npidv2-interclr", seeds=(0,), overrides=["engine.device=cpu"])
    assert [cell.x for cell in cells] == [1024, 4096, 16384, 65536]


def test_multiples_stay_within_the_pool() -> None:
    cells = plan(open_studies("negatives")["negatives"], None, 1, (0,), "synthetic:330", ["engine.device=cpu"])
    assert [cell.x for cell in cells] == [1, 4, 16, 33]


def test_the_recipes_number_of_negatives_survives_another_sampler() -> None:
    given = ["inter.sampler.negatives=24", "engine.device=cpu"]
    cells = plan(open_studies("sampling")["sampling"], None, 1, (0,), "synthetic:200", given)
    samplers = [cell.settings.inter and cell.settings.inter.sampler for cell in cells]
    assert [sampler and (sampler.name, sampler.negatives) for sampler in samplers] == [
        (name, 24) for name in ("hard", "semi_hard", "random", "semi_easy")
    ]


@pytest.mark.parametrize("given", ["inter.intra_weight=0.5", "inter={clusters: 5}"])
def test_what_a_study_varies_cannot_be_overridden(given: str) -> None:
    with pytest.raises(UserError, match="is what this study varies"):
        plan(open_studies("lambda")["lambda"], overrides=[given])


def test_a_cells_name_follows_what_it_computes() -> None:
    def key(*overrides: str) -> str:
        return plan(open_studies("labels")["labels"], None, 1, (0,), "synthetic:64", ["engine.device=cpu", *overrides])[
            0
        ].key

    assert key() == key("engine.log_every=7", "data.workers=0", "engine.loggers=[]")
    assert key() == key("checkpoint.every_minutes=1", "checkpoint.every_epochs=1", "data.unreadable=fail")
    assert key() != key("optimiser.base_lr=1e-3")
    assert key() != key("data.hold_out=8")
    settings = plan(open_studies("labels")["labels"], overrides=["engine.device=cpu"])[0].settings
    assert key_of(settings) == key_of(settings.model_copy())


# Runs.


def test_interrupted_resumed_and_never_run_twice(
    own: Path, out: Path, calls: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third run is interrupted after two steps, as by Ctrl-C: it leaves a checkpoint and an unfinished folder."""
    counted = worker.pretrain

    def interrupted(settings: Settings, folder: Path, **kwargs: Any) -> Run:
        stop = {"stop_after": 2} if len(calls) == 2 else {}
        return counted(settings, folder, **(kwargs | stop))

    monkeypatch.setattr(worker, "pretrain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small(own, out)
    assert calls == [(0.75, 0), (0.75, 1), (1, 0)]
    so_far = json.loads((out / "study.json").read_text())
    assert [run["state"] for cell in so_far["cells"] for run in cell["runs"]] == [
        "finished",
        "finished",
        "started",
        "new",
    ]
    assert not so_far["finished"]
    monkeypatch.setattr(worker, "pretrain", counted)
    calls.clear()
    heard = Heard()
    document = small(own, out, screen=heard.screen)
    assert calls == [(1, 0), (1, 1)]
    assert "2 of 4 runs are finished; 2 to go" in heard.text
    assert document["finished"]
    calls.clear()
    again = small(own, out)
    assert calls == []
    assert again == document == json.loads((out / "study.json").read_text())
    # As without the interruption.
    whole = small(own, out.parent / "whole")
    for left, right in zip(document["cells"], whole["cells"], strict=True):
        for name in ("knn", "rank_me", "uniformity", "alignment"):
            assert left["summary"][name] == right["summary"][name]
    check_files(out, document)


def check_files(out: Path, document: dict[str, Any]) -> None:
    for name in ("figure", "label_free"):
        picture = np.asarray(Image.open(out / f"{name}.png").convert("RGB"))
        assert (picture < 128).any(), name
        assert (out / f"{name}.svg").stat().st_size > 1000
    table = (out / "table.md").read_text()
    common = set.intersection(*(set(run["overrides"]) for cell in document["cells"] for run in cell["runs"]))
    assert all(override in table for override in common)
    assert document["cells"][0]["runs"][0]["result"]["torch"] in table
    for cell in document["cells"]:
        values = [run["result"]["knn"] for run in cell["runs"]]
        assert cell["summary"]["knn"]["n"] == 2
        assert cell["summary"]["knn"]["mean"] == pytest.approx(np.mean(values))
        assert cell["summary"]["knn"]["std"] == pytest.approx(np.std(values, ddof=1))
        assert spread({"mean": np.mean(values), "std": np.std(values, ddof=1)}) in table
        assert all(run["settings"]["seed"] == run["seed"] for run in cell["runs"])
        assert all([record["epoch"] for record in run["curve"]] == [0, 1] for run in cell["runs"])
    assert "The paper: both is better." in table
    assert "Choosing without labels" in table
    lines = (out / "table.csv").read_text().splitlines()
    assert lines[0].startswith("cell,x,seeds_wanted,seeds_finished,seeds_failed,knn_mean,knn_std,knn_n,rank_me_mean")
    assert [line.split(",")[0] for line in lines[1:]] == ["both", "intra"]


def test_a_failing_cell_is_recorded_and_the_rest_goes_on(
    own: Path, out: Path, calls: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = worker.pretrain

    def failing(settings: Settings, folder: Path, **kwargs: Any) -> Run:
        if settings.seed == 0 and settings.inter is not None and settings.inter.intra_weight < 1:
            raise RuntimeError("the disk is\nfull")
        return counted(settings, folder, **kwargs)

    monkeypatch.setattr(worker, "pretrain", failing)
    heard = Heard()
    document = small(own, out, screen=heard.screen)
    assert calls == [(0.75, 1), (1, 0), (1, 1)]
    first = document["cells"][0]["runs"][0]
    assert (first["state"], first["error"]) == ("failed", "RuntimeError: the disk is\nfull")
    assert document["cells"][0]["summary"]["knn"]["n"] == 1
    assert document["cells"][0]["summary"]["knn"]["std"] is None
    assert "failed: both, seed 0: RuntimeError: the disk is full" in (out / "table.md").read_text()
    assert "1 of 2, 1 failed" in (out / "table.md").read_text()
    assert "both, seed 0 failed, the others go on" in heard.text
    monkeypatch.setattr(worker, "pretrain", counted)  # it is tried again, the others are not
    calls.clear()
    assert small(own, out)["finished"]
    assert calls == [(0.75, 0)]


def test_several_processes_give_what_one_gives(own: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    own.write_text(OWN.replace("seeds: [0, 1]", "seeds: [0]"))
    one, two = small(own, out), small(own, out.parent / "two", jobs=2)
    assert two["finished"]
    for left, right in zip(one["cells"], two["cells"], strict=True):
        for name in ("knn", "rank_me", "uniformity", "alignment"):
            assert left["summary"][name] == right["summary"][name]
        assert right["summary"]["memory_megabytes"]["mean"] > 50  # the process's own


def test_a_process_that_fails_is_recorded(own: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = "title: t\nown_process: true\nseeds: [0]\ncells: [{name: a, overrides: [data.batch=1000]}]"
    own.write_text(text)
    with pytest.raises(UserError, match="no cell of the study could be trained"):
        small(own, out, overrides=[each for each in TINY if "batch" not in each])
    document = json.loads((out / "study.json").read_text())
    assert document["cells"][0]["runs"][0]["error"].startswith("data.batch: 1000 images a batch asked of 64")


def test_the_plan_says_how_long_it_takes(own: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    own.write_text(OWN.replace("seeds: [0, 1]", "seeds: [0]"))
    small(own, out, probe=True, screen=heard.screen)
    assert "0 of 2 runs are finished; 2 to go, 1 at a time, about " in heard.text
    assert "about" in next(line for line in heard.text.splitlines() if "1 new" in line)
    assert not list((out / "cells").glob(".probe*"))


def test_methods_without_negatives_are_told(out: Path) -> None:
    heard = Heard()
    with pytest.raises(KeyboardInterrupt):
        small(
            "sampling",
            out,
            recipe="synthetic-byol-interclr",
            seeds=(0,),
            overrides=["engine.device=cpu"],
            screen=_Stop(heard.screen.console),
        )
    assert "byol has no negatives" in heard.text


class _Stop(Screen):
    """Interrupts when the plan has been said."""

    def table(self, *_: Any) -> None:
        raise KeyboardInterrupt


def test_bad_requests(own: Path, out: Path) -> None:
    with pytest.raises(UserError, match="--jobs 0"):
        small(own, out, jobs=0)
    with pytest.raises(UserError, match="devices of one kind"):
        small(own, out, devices=["cpu", "cuda:0"])
    out.write_text("a file")
    with pytest.raises(UserError, match="choose another --out"):
        small(own, out)


def test_cells_that_come_to_the_same_run_are_counted_once(own: Path, out: Path, calls: list[tuple[float, int]]) -> None:
    """Of 64 images auto makes few clusters, and a tenth and a quarter of them are both 2; 1.01 times them is them."""
    cells = {"k / 10": 0.1, "k / 4": 0.25, "k": 1, "1.01 k": 1.01, "2 k": 2}
    lines = [f"- {{name: {name}, relative: {{inter.clusters: {factor}}}}}" for name, factor in cells.items()]
    own.write_text("title: t\nfigure: curve\nseeds: [0]\ncells:\n" + "\n".join(lines))
    given = [*(each for each in TINY if "clusters" not in each), "inter.sampler.negatives=1"]
    heard = Heard()
    document = small(own, out, overrides=given, screen=heard.screen)
    assert len(calls) == 4  # auto and the number it comes to have folders of their own
    assert [cell["same_as"] for cell in document["cells"]] == [None, "k / 10", None, "k", None]
    assert all(entry["cells"] == 3 for entry in document["label_free"].values())
    note = "Here k / 4 is the same as k / 10, 1.01 k is the same as k: they compute the same"
    assert note in (out / "table.md").read_text()
    assert note in heard.text


# Figures of merit.


def test_mean_and_spread_against_numpy() -> None:
    values = np.random.default_rng(0).normal(60, 3, 7)
    summary = summarise([{"knn": value} for value in values] + [{"knn": float("nan")}, {}])
    assert summary["knn"]["n"] == 7
    assert summary["knn"]["mean"] == pytest.approx(values.mean())
    assert summary["knn"]["std"] == pytest.approx(values.std(ddof=1))
    assert summarise([{"knn": 1.0}])["knn"]["std"] is None


def test_rank_correlation_against_scipy() -> None:
    generator = np.random.default_rng(1)
    knn, rank, uniformity = generator.normal(size=(3, 9))
    uniformity[3] = uniformity[4]  # a tie

    def cell(i: int) -> dict[str, Any]:
        return summarise([{"knn": knn[i], "rank_me": rank[i], "uniformity": uniformity[i]}])

    found = label_free({str(i): cell(i) for i in range(9)})
    assert found["rank_me"]["spearman"] == pytest.approx(scipy.stats.spearmanr(rank, knn).statistic)
    assert found["rank_me"]["p_value"] == pytest.approx(scipy.stats.spearmanr(rank, knn).pvalue)
    assert found["uniformity"]["spearman"] == pytest.approx(-scipy.stats.spearmanr(uniformity, knn).statistic)
    assert found["rank_me"]["chooses"] == str(rank.argmax())
    assert found["uniformity"]["chooses"] == str(uniformity.argmin())
    assert found["rank_me"]["lost"] == pytest.approx(knn.max() - knn[rank.argmax()])
    assert set(found) == {"rank_me", "uniformity"}


@pytest.mark.parametrize(("cells", "p"), [(3, 0.333), (4, 0.0833), (5, 0.0167), (6, 0.00278), (8, 4.96e-5)])
def test_p_of_a_perfect_ranking_is_exact(cells: int, p: float) -> None:
    order = [float(i**3) for i in range(cells)]
    assert _spearman(order, sorted(order)) == (pytest.approx(1), pytest.approx(p, rel=2e-3))
    assert _spearman(order, order[::-1]) == (pytest.approx(-1), pytest.approx(p, rel=2e-3))


@pytest.mark.parametrize("right", [[3, 1, 4, 2, 5], [1, 1, 2, 5, 2], [7, 7, 7, 7, 1], [2, 4, 6, 8, 10]])
def test_p_counts_orders_that_are_as_extreme(right: list[float]) -> None:
    """Also where values tie."""
    left = [0.1, 0.2, 0.2, 0.4, 0.5]
    found, p = _spearman(left, right)
    every = [abs(scipy.stats.spearmanr(order, right).statistic) for order in permutations(left)]
    assert found == pytest.approx(scipy.stats.spearmanr(left, right).statistic)
    assert p == pytest.approx(np.mean(np.array(every) >= abs(found) - 1e-9))


def test_p_is_never_printed_as_nothing() -> None:
    def lines(cells: int) -> str:
        summaries = {str(i): summarise([{"knn": float(i), "rank_me": float(i)}]) for i in range(cells)}
        return "\n".join(_markdown_label_free(label_free(summaries)))

    assert "| +1.00 | 0.33 | 3 |" in lines(3)
    assert "| +1.00 | 0.0028 | 6 |" in lines(6)
    assert "| +1.00 | < 0.001 | 8 |" in lines(8)
    assert "| +1.00 | < 0.001 | 20 |" in lines(20)
    assert "| – (fewer than three cells) | – | 2 |" in lines(2)
    assert "It does not know of the spread over seeds." in lines(3)


def test_a_table_for_machines_tells_failed_from_unfinished() -> None:
    def entry(name: str, values: list[float], *others: str) -> dict[str, Any]:
        runs = [{"state": state} for state in [*["finished"] * len(values), *others]]
        return {"name": name, "x": None, "summary": summarise([{"knn": value} for value in values]), "runs": runs}

    cells = [
        entry("whole", [1.0, 2.0]),
        entry("half", [3.0], "failed"),
        entry("broken", [], "failed", "failed"),
        entry("waiting", [], "started", "new"),
    ]
    rows = list(csv.DictReader(as_csv({"cells": cells}).splitlines()))
    counts = [[row[f"seeds_{which}"] for which in ("wanted", "finished", "failed")] for row in rows]
    assert counts == [["2", "2", "0"], ["2", "1", "1"], ["2", "0", "2"], ["2", "0", "0"]]
    assert [row["knn_n"] for row in rows] == ["2", "1", "0", "0"]
    assert [row["knn_mean"] for row in rows] == ["1.5", "3.0", "", ""]


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [(61.234, 0.44, "61.2 ± 0.4"), (9.44, 1.26, "9.44 ± 1.26"), (0.98765, None, "0.988"), (1234.5, 9.6, "1234 ± 10")],
)
def test_digits(mean: float, std: float | None, text: str) -> None:
    assert spread({"mean": mean, "std": std}) == text


def test_no_rank_where_there_is_none() -> None:
    make: Callable[[float, float], Any] = lambda knn, rank: summarise([{"knn": knn, "rank_me": rank}])  # noqa: E731
    assert label_free({"a": make(1, 2), "b": make(2, 3)})["rank_me"]["spearman"] is None
    assert label_free({"a": make(1, 2), "b": make(2, 3)})["rank_me"]["unranked"] == "fewer than three cells"
    same = {name: make(5, i) for i, name in enumerate("abcd")}
    assert label_free(same)["rank_me"]["spearman"] is None
    assert label_free(same)["rank_me"]["unranked"] == "k-NN is equal in all cells"
    level = {name: make(i, 5) for i, name in enumerate("abcd")}
    assert label_free(level)["rank_me"]["unranked"] == "RankMe is equal in all cells"
    assert label_free({name: make(i, i) for i, name in enumerate("abc")})["rank_me"]["unranked"] is None
    unlabelled = {name: summarise([{"rank_me": float(i)}]) for i, name in enumerate("abc")}
    assert label_free(unlabelled)["rank_me"]["chooses"] == "c"
    assert "lost" not in label_free(unlabelled)["rank_me"]


@pytest.mark.parametrize("name", study_names())
def test_studies_have_the_branch_from_the_start(name: str) -> None:
    """As the paper's, also with a recipe that begins it later: half of a run without it would be no study of it."""
    recipe = "cifar10-mocov2-interclr"
    for cell in plan(open_studies(name)[name], recipe, 2, (0,), "synthetic:600", ["engine.device=cpu"]):
        assert cell.settings.inter is not None
        assert cell.settings.inter.warmup_epochs == 0


@pytest.mark.parametrize(
    ("data", "says"),
    [("nope", "nope does not exist"), ("cifar10", "interclr data get cifar10"), ("synthetic:1", "at least 2")],
)
def test_data_that_are_not_there_are_said_once_and_nothing_is_made(
    own: Path, out: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch, data: str, says: str
) -> None:
    monkeypatch.setenv("INTERCLR_DATA", str(out.parent / "empty"))
    heard = Heard()
    with pytest.raises(UserError, match=says):
        small(own, out, data=data, screen=heard.screen)
    assert heard.text == ""
    assert not out.exists()
    assert calls == []


def test_every_source_is_opened_once_before_the_plan_is_said(
    own: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [f"{{name: '{count}', overrides: ['data.source=synthetic:{count}']}}" for count in (40, 48)]
    own.write_text(f"title: t\nseeds: [0, 1]\ncells: [{', '.join(cells)}]")
    opened: list[str] = []
    real = runner.open_training_source
    monkeypatch.setattr(runner, "open_training_source", lambda data: (opened.append(data.source), real(data))[1])
    with pytest.raises(KeyboardInterrupt):
        small(own, out, data=None, screen=_Stop(Heard().screen.console))
    assert opened == ["synthetic:40", "synthetic:48"]


def test_cells_of_other_images_are_not_averaged(own: Path, out: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 32)
    small(own, out, data=str(folder), seeds=(0,))
    write_images(folder, 40)
    with pytest.raises(UserError, match="were trained on other images than"):
        small(own, out, data=str(folder), seeds=(0, 1))
