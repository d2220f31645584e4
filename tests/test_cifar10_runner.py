"""One run of the CIFAR-10 plan, in trainings of seconds."""

from __future__ import annotations

import contextlib
import io
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cifar10_scripts import KEEPING, TINY, one_run, plan_of, record_at, runner


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
