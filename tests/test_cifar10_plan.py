"""The plan of the CIFAR-10 runs, and in which order they are trained."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cifar10_scripts import one_run, plan_of, runner


@pytest.mark.parametrize(
    ("group", "complaint"),
    [
        ({"seeds": [0]}, "tiny: runs: field required"),
        ({"runs": {"a": {"recipe": "cifar10-byol", "override": []}}}, "tiny.runs.a: override: unknown key"),
        ({"runs": {"a": {"overrides": []}}}, "tiny.runs.a: recipe: field required"),
        ({"runs": {"a": {"recipe": "cifar10-byo"}}}, "did you mean cifar10-byol"),
        ({"runs": {"a": {"recipe": "cifar10-byol", "overrides": ["data.bach=3"]}}}, "did you mean batch?"),
        ({"runs": {"a/b": {"recipe": "cifar10-byol"}}}, "'a/b' names a file"),
        ({"runs": {"a": {"recipe": "cifar10-byol", "classes": ["positives"], "own_target": True}}}, "two controls"),
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
