"""The runner of the CIFAR-10 plan on runs of seconds."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cifar10_scripts import ROOT, one_run, plan_of, runner

TINY = [
    *("data.source=synthetic:64", "data.batch=16", "model.backbone=resnet10", "model.width=8", "schedule.epochs=2"),
    *("schedule.warmup_epochs=0", "engine.log_every=2", "engine.device=cpu", "monitor.every_epochs=1"),
]
KEEPING = ["checkpoint.every_epochs=1", "checkpoint.keep=2"]


def record_at(folder: Path, name: str) -> dict[str, Any]:
    text = (folder / "records" / "tiny" / f"{name}.json").read_text()
    assert len(text) < 100_000
    return dict(json.loads(text))


# The plan.


@pytest.mark.parametrize(
    ("group", "complaint"),
    [
        ({"seeds": [0]}, "tiny: runs: field required"),
        ({"runs": {"a": {"recipe": "cifar10-byol", "override": []}}}, "tiny.runs.a: override: unknown key"),
        ({"runs": {"a": {"overrides": []}}}, "tiny.runs.a: recipe: field required"),
        ({"runs": {"a": {"recipe": "cifar10-byo"}}}, "did you mean cifar10-byol"),
        ({"runs": {"a": {"recipe": "cifar10-byol", "overrides": ["data.bach=3"]}}}, "did you mean batch?"),
        ({"runs": {"a/b": {"recipe": "cifar10-byol"}}}, "'a/b' names a file"),
        ({"runs": {"a": {"recipe": "cifar10-byol"}}, "evaluate": ["nothing"]}, "no protocol 'nothing'"),
        ({"runs": {"a": {"recipe": "cifar10-byol", "from": {"run": "b", "epoch": 1}}}}, "no run 'b'"),
        ({"runs": {"a": {"recipe": "cifar10-byol", "from": {"run": "a", "epoch": 1}}}}, "continues itself"),
        (
            {
                "runs": {
                    "a": {"recipe": "cifar10-byol", "overrides": ["checkpoint.every_epochs=50", "checkpoint.keep=3"]},
                    "b": {"recipe": "cifar10-byol", "from": {"run": "a", "epoch": 50}},
                }
            },
            "a will not keep its checkpoint of epoch 50",
        ),
    ],
)
def test_errors_of_the_plan_come_before_any_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], group: Any, complaint: str
) -> None:
    plan, work = plan_of(tmp_path, {"tiny": group}), tmp_path / "work"
    assert runner.main(["tiny", "--plan", str(plan), "--work", str(work)]) == 2
    errors = capsys.readouterr().err
    assert complaint in errors
    assert errors.count("\n") == 1
    assert not work.exists()


def test_the_plan_in_the_repository_is_sound() -> None:
    plan = runner.read_plan(runner.PLAN)
    for name, group in plan.items():
        jobs = runner.jobs_of(plan, name, [], [], [])
        assert len(jobs) == len(group.runs) * len(group.seeds)


def test_a_run_can_be_asked_for_with_a_seed_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.by_seed([]) == [([], [])]
    words = ["a", "b", "a@3", "b@0", "c"]
    assert runner.by_seed(words) == [(["a", "b"], []), (["a"], [3]), (["b"], [0]), (["c"], [])]
    plan = plan_of(tmp_path, {"tiny": {"runs": {"a": {"recipe": "cifar10-byol"}}}})
    for wrong in ("a@one", "a@"):
        assert runner.main(["tiny", wrong, "--plan", str(plan), "--work", str(tmp_path / "w")]) == 2
        assert f"{wrong}: a number stands behind the @" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


CHAIN = {
    "grandchild": {"recipe": "cifar10-byol", "from": {"run": "child", "epoch": 100}},
    "other": {"recipe": "cifar10-byol"},
    "child": {"recipe": "cifar10-byol", "from": {"run": "parent", "epoch": 100}},
    "parent": {"recipe": "cifar10-byol"},
}


def chain(folder: Path, names: list[str]) -> list[Any]:
    keeping = ["checkpoint.every_epochs=100", "checkpoint.keep=2"]
    plan = runner.read_plan(plan_of(folder, {"tiny": {"runs": CHAIN, "common": keeping, "seeds": [0, 1]}}))
    return list(runner.jobs_of(plan, "tiny", names, [], ["data.root=/here"]))


def test_seeds_come_outermost_and_parents_first(tmp_path: Path) -> None:
    order = ["parent", "child", "grandchild", "other"]
    assert [job.title for job in chain(tmp_path, [])] == [f"{name}-s{seed}" for seed in (0, 1) for name in order]
    assert [job.name for job in chain(tmp_path, ["child"])] == ["parent", "child"] * 2
    assert chain(tmp_path, [])[0].portable() == ["checkpoint.every_epochs=100", "checkpoint.keep=2"]


@pytest.mark.parametrize(("asked", "threads"), [(None, "2"), ("", "2"), ("5", "5")])
def test_trainings_share_the_cores(
    asked: str | None, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    made = runner.Runner(tmp_path, tmp_path, jobs=3)
    log = tmp_path / "log"
    made._call(["-c", "import os; print(os.environ['OMP_NUM_THREADS'])"], log, tmp_path)
    assert (made.threads, log.read_text()) == (threads, f"{threads}\n")


@pytest.mark.parametrize("jobs", [1, 3])
def test_children_wait_for_their_parents_and_no_more_run_than_asked_for(tmp_path: Path, jobs: int) -> None:
    class Fake:
        def __init__(self) -> None:
            self.jobs, self.ended = jobs, list[str]()
            self.most, self.running, self.lock = 0, 0, threading.Lock()

        def train(self, job: Any) -> bool:
            with self.lock:
                assert job.parent is None or job.parent in self.ended
                self.running += 1
                self.most = max(self.most, self.running)
            time.sleep(0.02)
            with self.lock:
                self.running -= 1
                self.ended.append(job.title)
            return False

        def can_start_now(self, job: Any, parent: Any) -> bool:
            return False

    fake, todo = Fake(), chain(tmp_path, [])
    assert runner.run_all(fake, todo, None) == []
    assert sorted(fake.ended) == sorted(job.title for job in todo)
    assert fake.most == jobs


def test_a_child_starts_when_its_running_parent_has_got_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        jobs, started, there = 2, list[str](), threading.Event()

        def train(self, job: Any) -> bool:
            self.started.append(job.title)
            if job.name == "parent":
                time.sleep(0.05)
                assert self.started == ["parent-s0"]  # not before it is there
                self.there.set()
                while len(self.started) == 1:  # and then at once
                    time.sleep(0.01)
            return False

        def can_start_now(self, job: Any, parent: Any) -> bool:
            return self.there.is_set()

    monkeypatch.setattr(runner, "LOOK_EVERY", 0.01)
    jobs = [job for job in chain(tmp_path, ["child"]) if job.seed == 0]
    assert runner.run_all(Fake(), jobs, None) == []
    assert Fake.started == ["parent-s0", "child-s0"]


def test_groups_share_a_queue_though_their_runs_have_equal_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent of group one is finished, that of group two is not: only the latter is waited for."""
    keeping = ["checkpoint.every_epochs=100", "checkpoint.keep=2"]
    groups = {name: {"runs": CHAIN, "common": keeping, "seeds": [0]} for name in ("one", "two")}
    finished, started = {"one/parent-s0"}, list[str]()

    def train(self: Any, job: Any) -> bool:
        assert job.parent_key is None or job.parent_key in finished
        started.append(job.key)
        while job.key == "two/parent-s0" and "one/child-s0" not in finished:
            time.sleep(0.01)
        finished.add(job.key)
        return False

    record = {"command": "", "from": None, "figures": {}, "seconds": 0, "images_per_second": None}
    monkeypatch.setattr(runner.Runner, "train", train)
    monkeypatch.setattr(runner.Runner, "record", lambda self, job: record if job.key == "one/parent-s0" else None)
    monkeypatch.setattr(runner.Runner, "can_start", lambda self, job: job.parent_key in finished)
    places = [
        "--plan",
        str(plan_of(tmp_path, groups)),
        "--work",
        str(tmp_path / "work"),
        "--out",
        str(tmp_path / "out"),
    ]
    words = ["two", "child", "+", "one", "child", "+", "two", "parent", "other"]
    assert runner.main([*words, *places, "--jobs", "2"]) == 0
    assert sorted(started) == ["one/child-s0", "two/child-s0", "two/other-s0", "two/parent-s0"]
    said = capsys.readouterr().out
    assert "one/parent-s0: finished before" in said
    assert "two/child-s0   not run" in said
    assert runner.main(["one", "+", *places]) == 2
    assert "a + stands between two groups" in capsys.readouterr().err


def test_protocols_do_not_keep_trainings_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        jobs, trained, measured = 2, list[str](), list[str]()

        def train(self, job: Any) -> bool:
            self.trained.append(job.title)
            return job.name != "other"  # which has nothing to measure

        def can_start_now(self, job: Any, parent: Any) -> bool:
            return False

        def stop(self) -> None:
            pass

        def measure(self, job: Any) -> None:
            deadline = time.monotonic() + 10
            while len(self.trained) < len(todo) and self.jobs > 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert self.jobs == 1 or len(self.trained) == len(todo), "trainings waited for protocols"
            assert self.jobs > 1 or self.trained[-1] == job.title  # alone it is measured before the next is trained
            self.measured.append(job.title)

    monkeypatch.setattr(runner, "LOOK_EVERY", 0.01)
    todo = chain(tmp_path, [])
    for jobs in (2, 1):
        monkeypatch.setattr(Fake, "jobs", jobs)
        Fake.trained.clear()
        Fake.measured.clear()
        assert runner.run_all(Fake(), todo, None) == []
        assert sorted(Fake.trained) == sorted(job.title for job in todo)
        assert sorted(Fake.measured) == sorted(title for title in Fake.trained if "other" not in title)


def test_the_newest_metrics_are_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    assert one_run.newest_metrics(tmp_path) is None
    lines = [{"step": step, "epoch": step / 10} for step in range(200)]
    path.write_text(json.dumps(lines[0]) + "\n")
    assert one_run.newest_metrics(tmp_path) is None  # before the first step
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 200, "ep')
    monkeypatch.setattr(one_run, "TAIL", 75)
    assert one_run.newest_metrics(tmp_path) == lines[-1]
    assert one_run.step_of(tmp_path, 7) == 70
    path.write_text(path.read_text() + "\n")  # torn by a crash, then gone on from
    assert one_run.newest_metrics(tmp_path) == lines[-1]


def test_nothing_is_started_after_the_time_is_over(tmp_path: Path) -> None:
    class Slow:
        jobs = 1

        def train(self, job: Any) -> bool:
            time.sleep(0.3)
            return False

    left = runner.run_all(Slow(), chain(tmp_path, []), 0.1)
    assert [job.title for job in left] == [job.title for job in chain(tmp_path, [])][1:]


# The runner.


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A parent, a run that goes on from its first epoch, and one that fails."""
    folder = tmp_path_factory.mktemp("ran")
    late = ["inter.warmup_epochs=1", *KEEPING]
    runs = {
        "child": {"recipe": "synthetic-npidv2-interclr", "overrides": late, "from": {"run": "parent", "epoch": 1}},
        "parent": {"recipe": "synthetic-npidv2-interclr", "overrides": late, "note": "kept"},
        "fails": {"recipe": "synthetic-npidv2", "overrides": ["data.batch=1000"]},
    }
    plan = plan_of(folder, {"tiny": {"common": TINY, "seeds": [0], "evaluate": ["knn k=5"], "runs": runs}})
    return folder, again(folder, plan)


def again(folder: Path, plan: Path, *words: str) -> str:
    places = ["--plan", str(plan), "--work", str(folder / "work"), "--out", str(folder / "records")]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runner.main(["tiny", *words, *places, "--jobs", "2"])
    return said.getvalue()


def test_protocols_without_settings_share_a_process() -> None:
    assert one_run.calls_of(["knn", "linear epochs=5", "low-shot"]) == [("knn,low-shot", []), ("linear", ["epochs=5"])]
    assert one_run.calls_of(["knn k=5"]) == [("knn", ["k=5"])]
    assert one_run.calls_of([]) == []


def test_a_run_leaves_a_record_of_everything(ran: tuple[Path, str]) -> None:
    folder, said = ran
    record = record_at(folder, "parent-s0")
    result = json.loads((folder / "work" / "tiny" / "parent-s0" / "result.json").read_text())
    assert record["figures"]["knn"] == result["knn"]
    assert (record["figures"]["knn_k"], record["figures"]["knn_temperature"]) == (20, 0.1)
    assert record["figures"]["purity"] == result["purity"]
    assert record["figures"]["evaluate"]["knn"]["k"] == 5
    assert record["measured_on"] == "test"
    assert (record["note"], record["from"], record["commit"]) == ("kept", None, result["commit"])
    assert record["settings"]["schedule"]["epochs"] == 2
    assert "root" not in record["settings"]["data"]
    assert record["command"].startswith("interclr pretrain synthetic-npidv2-interclr data.source=synthetic:64 ")
    assert record["command"].endswith(" seed=0 --no-report --out OUT && interclr evaluate knn OUT k=5")
    assert str(folder) not in json.dumps(record)
    assert f"parent-s0: k-NN {result['knn']:.2f} %" in said
    assert said.splitlines()[-3:] == [line for line in said.splitlines() if "  " in line][-3:]  # the table comes last


def test_protocols_of_a_run_that_holds_images_out_do_not_look_at_the_test_set(tmp_path: Path) -> None:
    runs = {"a": {"recipe": "synthetic-npidv2", "overrides": ["data.hold_out=24"]}}
    protocols = ["knn k=5", "low-shot draws=3 sizes=[1,2]"]
    again(tmp_path, plan_of(tmp_path, {"tiny": {"common": TINY, "seeds": [0], "evaluate": protocols, "runs": runs}}))
    record = record_at(tmp_path, "a-s0")
    assert record["measured_on"] == "held-out"
    assert " && interclr evaluate knn OUT k=5 --held-out && " in record["command"]
    folder = tmp_path / "work" / "tiny" / "a-s0" / "evaluate"
    assert [path.name for path in folder.iterdir() if path.is_dir() and path.name != "features"] == ["held-out"]
    predictions = json.loads((folder / "held-out" / "knn" / "predictions.json").read_text())
    assert all(len(values) == 24 for values in predictions.values())
    assert record["figures"]["evaluate"]["knn"]["k"] == 5
    low = record["figures"]["evaluate"]["low-shot"]
    assert len(low["mAP_of_draws"]) == 3
    assert statistics.mean(low["mAP_of_draws"]) == pytest.approx(low["mAP"], rel=1e-5)


def test_epochs_are_means_of_the_logged_steps(ran: tuple[Path, str]) -> None:
    folder, _ = ran
    lines = [json.loads(line) for line in (folder / "work/tiny/parent-s0/metrics.jsonl").read_text().splitlines()]
    record = record_at(folder, "parent-s0")
    assert [row["epoch"] for row in record["epochs"]] == [0, 1, 2]
    for row in record["epochs"][1:]:
        steps = [line for line in lines if row["epoch"] - 1 < line["epoch"] <= row["epoch"] and "loss" in line]
        assert len(steps) == 2
        assert row["loss"] == pytest.approx(np.mean([line["loss"] for line in steps]), rel=1e-5)
        (monitor,) = (line for line in lines if line.get("event") == "monitor" and line["epoch"] == row["epoch"])
        assert row["knn"] == pytest.approx(monitor["knn"], rel=1e-5)
    speeds = [line["images_per_second"] for line in lines if "images_per_second" in line]
    assert record["images_per_second"] == pytest.approx(statistics.median(speeds), abs=0.1)


def test_a_run_goes_on_from_its_parents_checkpoint(ran: tuple[Path, str]) -> None:
    folder, said = ran
    child, parent = record_at(folder, "child-s0"), record_at(folder, "parent-s0")
    assert said.index("parent-s0: started") < said.index("child-s0: started")
    assert "continuing at step 4 of 8" in (folder / "work" / "tiny" / "child-s0.log").read_text()
    assert child["from"] == {"run": "parent", "epoch": 1, "step": 4, "again": False}
    assert "cp PARENT/checkpoint/step-0000000004.pt OUT/checkpoint/ && " in child["command"]
    assert child["figures"] == parent["figures"]  # the same settings, so the very same run
    assert child["epochs"] == parent["epochs"]


def test_a_failed_run_is_kept_and_tried_again_but_finished_ones_are_not(ran: tuple[Path, str]) -> None:
    folder, _ = ran
    failed = record_at(folder, "fails-s0")
    assert "1000 images a batch" in failed["error"]
    assert "figures" not in failed
    assert failed["settings"]["data"]["batch"] == 1000
    plan = folder / "plan.yaml"
    assert "left out, as 0 s are over: tiny/fails-s0\n" in again(folder, plan, "--until", "0")
    assert record_at(folder, "fails-s0") == failed
    before = record_at(folder, "parent-s0")
    said = again(folder, plan, "fails", "parent", "--set", "data.batch=8")
    assert "fails-s0: k-NN" in said
    assert "parent-s0: finished before, with another command" in said
    assert "figures" in record_at(folder, "fails-s0")
    assert "error" not in record_at(folder, "fails-s0")
    assert record_at(folder, "fails-s0")["failed_before"] == [{key: failed[key] for key in ("date", "commit", "error")}]
    assert record_at(folder, "parent-s0") == before


def test_a_finished_run_is_trained_again_only_up_to_the_checkpoint_that_is_needed(tmp_path: Path) -> None:
    late = [*TINY, *KEEPING, "schedule.epochs=200", "checkpoint.keep=300", "monitor.every_epochs=0"]
    runs = {
        "parent": {"recipe": "synthetic-npidv2", "overrides": late},
        "child": {
            "recipe": "synthetic-npidv2-interclr",
            "overrides": [*late, "inter.warmup_epochs=2"],
            "from": {"run": "parent", "epoch": 2},
        },
    }
    plan = runner.read_plan(plan_of(tmp_path, {"tiny": {"runs": runs}}))
    made = runner.Runner(tmp_path / "work", tmp_path / "records", 1)
    parent, child = runner.jobs_of(plan, "tiny", [], [], [])
    record = tmp_path / "records" / "tiny" / "parent-s0.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"command": "as it was", "figures": {"knn": 50.0}}))
    assert runner.to_do(made, [parent, child]) == [parent, child]
    before = record.read_text()
    assert not made.train(parent)  # its record is complete
    assert record.read_text() == before
    assert (tmp_path / "work/tiny/parent-s0/checkpoint/step-0000000008.pt").exists()
    assert not (tmp_path / "work/tiny/parent-s0/result.json").exists()
    assert made.can_start(child)
    assert made.is_again(child)
    lines = tmp_path / "work/tiny/parent-s0/metrics.jsonl"
    logged = [line for line in lines.read_text().splitlines() if json.loads(line)["step"] <= 8]
    lines.write_text("\n".join([*logged, ""]))  # not beyond the checkpoint yet
    assert not made.can_start_now(child, parent)
    lines.write_text("\n".join([*logged, json.dumps({"step": 10, "epoch": 2.5, "loss": 1.0}), ""]))
    assert made.can_start_now(child, parent)
    (tmp_path / "work/tiny/parent-s0/command.txt").write_text("of other settings, to be deleted")
    assert not made.can_start_now(child, parent)
    record.write_text(json.dumps({"error": "of an earlier try"}))
    assert not made.is_again(child)
    record.write_text(before)
    assert runner.to_do(made, [child]) == [child]
    assert made.starts == {}


def test_what_is_trained_is_recorded_though_it_could_not_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"a": {"recipe": "synthetic-npidv2"}}
    plan = plan_of(tmp_path, {"tiny": {"common": TINY, "seeds": [0], "evaluate": ["knn k=5"], "runs": runs}})
    (job,) = runner.jobs_of(runner.read_plan(plan), "tiny", [], [], [])
    made = runner.Runner(tmp_path / "work", tmp_path / "records", 1)

    def interrupted(*_: Any) -> None:
        assert record_at(tmp_path, "a-s0")["figures"]["knn"] > 0  # it is there already
        raise one_run.Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(runner.Runner, "_measure", interrupted)
        assert made.train(job)
        made.measure(job)
    record = record_at(tmp_path, "a-s0")
    assert record["unmeasured"] == ["knn k=5"]
    assert "evaluate" not in record["figures"]

    def failed(*_: Any) -> None:
        raise one_run.Failure("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner.Runner, "_measure", failed)
        made.measure(job)
    after = record_at(tmp_path, "a-s0")
    assert after["figures"] == record["figures"]  # what was trained is not lost by it
    assert after["unmeasured"] == ["knn k=5"]
    assert [failure["error"] for failure in after["failed_before"]] == ["no memory"]
    assert not made.finished(job)
    assert runner.to_do(made, [job]) == [job]
    said = again(tmp_path, plan)
    assert record_at(tmp_path, "a-s0")["unmeasured"] == []
    assert record_at(tmp_path, "a-s0")["figures"]["evaluate"]["knn"]["k"] == 5
    assert record_at(tmp_path, "a-s0")["epochs"] == record["epochs"]
    assert "a-s0: finished before" in again(tmp_path, plan)
    assert "to be measured: knn k=5" in said


def test_a_training_that_is_cut_off_leaves_what_it_had_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path, {"tiny": {"common": TINY, "seeds": [0], "runs": {"a": {"recipe": "synthetic-npidv2"}}}})
    (job,) = runner.jobs_of(runner.read_plan(plan), "tiny", [], [], [])
    made = runner.Runner(tmp_path / "work", tmp_path / "records", 1)
    place = tmp_path / "records" / "tiny" / "a-s0.json"
    lines = [
        {"step": 0, "epoch": 0.0, "event": "monitor", "knn": 10.0},
        {"step": 4, "epoch": 1.0, "loss": 3.5},
        {"step": 4, "epoch": 1.0, "event": "monitor", "knn": 31.5},
        {"step": 6, "epoch": 1.5, "loss": 2.5},
    ]

    def gone_on(until: int) -> None:
        text = "".join(json.dumps(line) + "\n" for line in lines[:until])
        (tmp_path / "work" / "tiny" / "a-s0" / "metrics.jsonl").write_text(text)

    def cut_off(*words: Any) -> None:
        gone_on(2)
        assert not words[-1]()
        assert not place.exists()  # nothing has been measured since the start
        gone_on(3)
        assert not words[-1]()
        assert json.loads(place.read_text())["error"] == "cut off at epoch 1.0, k-NN 31.50 % at epoch 1"
        gone_on(4)
        raise one_run.Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(runner.Runner, "_call", cut_off)
        patch.setattr(one_run, "NOTE_EVERY", -1.0)
        with pytest.raises(one_run.Interrupted):
            made.train(job)
    record = record_at(tmp_path, "a-s0")
    assert record["error"] == "cut off at epoch 1.5, k-NN 31.50 % at epoch 1"
    assert record["epochs"] == [
        {"epoch": 0, "knn": 10.0},
        {"epoch": 1, "knn": 31.5, "loss": 3.5},
        {"epoch": 2, "loss": 2.5},
    ]
    assert "figures" not in record
    assert not made.finished(job)
    assert runner.to_do(made, [job]) == [job]
    gone_on(3)  # once more, where its checkpoint is gone, and cut off earlier
    made._note(job, 0.0)
    assert record_at(tmp_path, "a-s0") == record
    assert "a-s0: k-NN" in again(tmp_path, plan)
    finished = record_at(tmp_path, "a-s0")
    assert (finished["failed_before"], "cut_off" in finished, "error" in finished) == ([], False, False)

    with monkeypatch.context() as patch:  # a record that says more stays
        patch.setattr(one_run, "so_far", lambda *_: "cut off")
        made._note(job, 0.0)
    assert record_at(tmp_path, "a-s0") == finished


def test_the_gpu_script_hands_everything_on(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"tiny": {"common": TINY, "runs": {"a": {"recipe": "synthetic-npidv2"}}}})
    words = ["tiny", "b", "--plan", str(plan), "--out", str(tmp_path / "records")]
    environment = os.environ | {"PYTHON": sys.executable, "WORK": str(tmp_path / "work"), "JOBS": "2"}
    script = [str(ROOT / "benchmarks" / "cifar10_gpu.sh"), "60"]
    wrong = subprocess.run([*script, *words], capture_output=True, text=True, env=environment)
    assert (wrong.returncode, "no run 'b' in tiny" in wrong.stderr) == (2, True), wrong.stderr
    over = subprocess.run([script[0], "1", "tiny", *words[2:]], capture_output=True, text=True, env=environment)
    assert over.returncode == 124  # long before the run could end
    assert not (tmp_path / "records" / "tiny").exists()


def detached(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "benchmarks" / "cifar10_detached.sh")
    return subprocess.run([script, *words], capture_output=True, text=True, env=environment, timeout=200)


def test_what_keeps_detached_runs_from_starting_is_told_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "WORK": str(tmp_path / "work"), "INTERCLR_COMMIT": "c0ffee"}
    plan = plan_of(tmp_path, {"tiny": {"common": TINY, "runs": {"a": {"recipe": "synthetic-npidv2"}}}})
    told = detached(environment, "start", "60", "tiny", "b", "--plan", str(plan))
    assert (told.returncode, "no run 'b' in tiny" in told.stdout) == (2, True), told
    assert "started" not in told.stdout
    told = detached(environment | {"INTERCLR_DATA": "no/such/data"}, "start", "60", "tiny", "--plan", str(plan))
    assert (told.returncode, told.stderr) == (2, "INTERCLR_DATA: there is no folder no/such/data\n")
    tools = tmp_path / "tools"  # a machine without pgrep
    tools.mkdir()
    for tool in ("bash", "dirname", "mkdir"):
        where = shutil.which(tool)
        assert where is not None
        (tools / tool).symlink_to(where)
    told = detached(environment | {"PATH": str(tools)}, "start", "60", "tiny", "--plan", str(plan))
    assert (told.returncode, told.stderr.split(" (")[0]) == (2, "pgrep is not installed")


def in_place_of_python(folder: Path, body: str) -> dict[str, str]:
    """An environment in which a shell script takes the place of the runs, which are not what is tested."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return os.environ | {"PYTHON": str(script), "WORK": str(folder / "work"), "INTERCLR_COMMIT": "c0ffee"}


def touched(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_a_second_start_keeps_the_records_and_nothing_else_of_the_first(tmp_path: Path) -> None:
    work, package = tmp_path / "work", touched(tmp_path / "packages" / "one.py").parent
    gone = [touched(work / name) for name in ("path/1/two.py", "path/2/one.py")]
    gone += [touched(work / "tree" / name / "gone.py") for name in ("interclr", "benchmarks")]
    record = touched(work / "tree" / "results" / "cifar10" / "tiny" / "a-s0.json")
    environment = in_place_of_python(tmp_path, "exit 0") | {"PYTHONPATH": str(package)}
    told = detached(environment, "start", "60", "tiny")
    assert told.returncode == 0, told
    assert [str(path) for path in gone if path.exists()] == []
    assert (work / "path" / "1" / "one.py").exists()
    assert (work / "tree" / "interclr" / "learner.py").exists()
    assert record.exists()


def test_a_checkout_is_not_replaced_by_its_own_copy(tmp_path: Path) -> None:
    kept = touched(tmp_path / "tree" / "interclr" / "learner.py")
    script = touched(tmp_path / "tree" / "benchmarks" / "cifar10_detached.sh")
    shutil.copy(ROOT / "benchmarks" / "cifar10_detached.sh", script)
    environment = in_place_of_python(tmp_path, "exit 0") | {"WORK": str(tmp_path)}
    told = subprocess.run([script, "start", "60", "tiny"], capture_output=True, text=True, env=environment)
    assert (told.returncode, "tree is this checkout itself" in told.stderr) == (2, True), told
    assert kept.exists()


def test_nothing_starts_without_a_package_that_cannot_be_copied(tmp_path: Path) -> None:
    environment = in_place_of_python(tmp_path, "exit 0") | {"PYTHONPATH": str(tmp_path)}  # the copy would lie in itself
    told = detached(environment, "start", "60", "tiny")
    assert (told.returncode, f"PYTHONPATH: {tmp_path} was not copied" in told.stderr) == (2, True), told
    assert "started" not in told.stdout
    assert not (tmp_path / "work" / "pid").exists()


def test_a_start_that_ends_without_a_word_is_none(tmp_path: Path) -> None:
    environment = in_place_of_python(
        tmp_path, 'until [ -s "$WORK/pid" ]; do sleep 0.1; done; kill -KILL "$(cat "$WORK/pid")"'
    )
    told = detached(environment, "start", "60", "tiny")
    assert (told.returncode, "it ended without a word" in told.stderr) == (1, True), told
    assert "started" not in told.stdout


def test_a_start_of_which_nothing_is_heard_is_none(tmp_path: Path) -> None:
    environment = in_place_of_python(tmp_path, f"exec {shutil.which('sleep')} 100")
    hurried = touched(tmp_path / "tools" / "sleep")  # the minute of waiting, but not what runs, is over at once
    hurried.write_text("#!/bin/sh\n")
    hurried.chmod(0o755)
    try:
        told = detached(environment | {"PATH": f"{hurried.parent}:{environment['PATH']}"}, "start", "60", "tiny")
        assert (told.returncode, "no run has started in a minute" in told.stderr) == (1, True), told
        assert "started" not in told.stdout
    finally:
        stopped = detached(environment, "stop")
    assert stopped.returncode == 0, stopped


def test_runs_go_on_between_commands_and_their_records_come_back(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"tiny": {"common": TINY, "seeds": [0], "runs": {"a": {"recipe": "synthetic-npidv2"}}}})
    environment = os.environ | {"PYTHON": sys.executable, "WORK": str(tmp_path / "work"), "INTERCLR_COMMIT": "c0ffee"}
    carried = tmp_path / "carried"  # packages that the machine lacks, in a folder that the next command replaces
    carried.mkdir()
    (carried / "sitecustomize.py").write_text("import os; os.environ['CARRIED'] = __file__\n")
    environment |= {"PYTHONPATH": f"{os.path.relpath(carried)}:{ROOT}"}

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return detached(environment, *words)

    assert "nothing was started" in call("look").stderr
    assert "nothing goes on" in call("stop").stderr
    try:
        first = call("start", "150", "tiny", "--plan", str(plan))
        assert (first.returncode, "tiny/a-s0: started" in first.stdout) == (0, True), first
        shutil.rmtree(carried)
        again = call("start", "150", "tiny", "--plan", str(plan))
        assert (again.returncode, "runs go on" in again.stderr) == (2, True)
        assert call("look", "0", str(tmp_path / "early")).returncode == 3
        (copy,) = (tmp_path / "work" / "path").iterdir()  # not of the checkout
        assert (copy / "sitecustomize.py").exists()
        assert (tmp_path / "early" / "records.tgz").exists()
    finally:
        stopped = call("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert call("look").returncode not in (0, 3)
    try:
        assert call("start", "150", "tiny", "--plan", str(plan)).returncode == 0
        done = call("look", "150", str(tmp_path / "got"))
    finally:
        call("stop")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny/a-s0: k-NN" in done.stdout
    with tarfile.open(tmp_path / "got" / "records.tgz") as packed:
        file = packed.extractfile("results/cifar10/tiny/a-s0.json")
        assert file is not None
        record = json.load(file)
    assert (record["commit"], "figures" in record) == ("c0ffee", True)
    assert not (ROOT / "results" / "cifar10" / "tiny").exists()
