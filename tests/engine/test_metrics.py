from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import tiny, train

from interclr.engine import metrics
from interclr.engine.metrics import Averages, JsonLines, MLflow, TensorBoard, open_loggers
from interclr.run.folder import prepare_folder, read_lines
from interclr.types import UserError


def test_averages_come_one_flush_later() -> None:
    averages = Averages()
    values = [1.0, 2.0, 6.0]
    for value in values:
        averages.add({"loss": torch.tensor(value)})
    averages.add({"rare": torch.tensor(10.0)})
    assert averages.flush({"step": 3}) is None
    averages.add({"loss": torch.tensor(5.0)})
    assert averages.flush({"step": 4}) == {"step": 3, "loss": 3.0, "rare": 10.0}
    assert averages.drain() == {"step": 4, "loss": 5.0}
    assert averages.drain() is None
    assert averages.flush({"step": 5}) is None  # nothing was added
    assert averages.finished() == []


def test_an_interval_continues_where_it_was_saved() -> None:
    whole, first, second = Averages(), Averages(), Averages()
    terms = [{"loss": torch.rand(()), "intra": torch.rand(())} for _ in range(7)]
    for i, term in enumerate(terms):
        whole.add(term)
        (first if i < 3 else second).add(term) if i < 3 else None
    second.load_state(first.state(), torch.device("cpu"))
    for term in terms[3:]:
        second.add(term)
    for averages in (whole, second):
        averages.flush({"step": 7})
    assert whole.drain() == second.drain()


def test_averages_notice_what_is_not_a_number() -> None:
    averages = Averages()
    averages.add({"loss": torch.tensor(1.0)})
    assert averages.all_finite()
    averages.add({"loss": torch.tensor(math.inf)})
    assert not averages.all_finite()


def test_json_lines_drop_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, None)
    for step in (0, 5, 10, 15):
        lines.log({"step": step, "loss": step / 7})
    lines.close()
    with open(path, "a") as file:
        file.write('{"step": 20, "lo')  # torn by a crash
    assert [line["step"] for line in read_lines(path)] == [0, 5, 10, 15]
    lines = JsonLines(path, 10)
    lines.log({"step": 15, "loss": 1.0})
    lines.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 5, 10, 15]
    assert read_lines(path)[1]["loss"] == 5 / 7
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
    JsonLines(path, None).close()
    assert path.read_text() == ""


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl", None)
    lines.log({"step": 1})
    assert read_lines(tmp_path / "m.jsonl") == [{"step": 1}]
    lines.close()


def test_a_full_disk_is_a_clear_error() -> None:
    lines = JsonLines.__new__(JsonLines)
    lines.path = Path("/dev/full")
    lines._file = open("/dev/full", "a", buffering=1)  # noqa: SIM115
    with pytest.raises(UserError, match=r"/dev/full: No space left on device.*--resume"):
        lines.log({"step": 1})
    lines.close()


def test_lines_that_are_not_objects_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('12\n{"step": 1}\n"step"\n\n')
    assert read_lines(tmp_path / "m.jsonl") == [{"step": 1}]


def test_tensorboard_holds_the_same_figures(tmp_path: Path) -> None:
    logger = TensorBoard(tmp_path, None)
    for step in (1, 2, 3):
        logger.log({"step": step, "loss": step * 0.5, "event": "x", "bad": math.nan})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 1.0), (3, 1.5)]


class Service(types.ModuleType):
    """Stands for W&B's and MLflow's modules: which runs were asked for, and those it knows."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[str] = []
        self.known: list[str] = []
        self.exceptions = types.SimpleNamespace(MlflowException=RuntimeError)

    def init(self, id: str, **_: object) -> types.SimpleNamespace:
        self.asked.append(id)
        return types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    def start_run(self, run_id: str | None = None, run_name: str | None = None) -> types.SimpleNamespace:
        if run_id is None:
            self.known.append(run_id := f"{run_name}-{len(self.known)}")
        if run_id not in self.known:
            raise RuntimeError(f"no run {run_id}")
        self.asked.append(run_id)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def log_metrics(self, numbers: object, step: int) -> None: ...

    def end_run(self) -> None: ...


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_goes_on_with_the_run_of_the_folder_and_no_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    for place, resume_step in (("a", None), ("a", 3), ("b", None), ("b", 3), ("b", None), ("c", 3)):
        (tmp_path / place / "run").mkdir(parents=True, exist_ok=True)
        for logger in open_loggers([name], tmp_path / place / "run", resume_step):
            logger.close()
    first, again, other, other_again, afresh, copied = service.asked
    assert (first, other) == (again, other_again)
    assert len({first, other, afresh, copied}) == 4
    assert name == "mlflow" or copied == "run"  # by which those of before are known
    prepare_folder(tmp_path / "a" / "run", resume=False)  # an id is no run


def test_a_run_that_mlflow_has_lost_goes_on_as_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", service)
    MLflow(tmp_path, None).close()
    service.known[:] = ["not this one"]
    with pytest.warns(UserWarning, match="begins another: no run"):
        MLflow(tmp_path, 3).close()
    MLflow(tmp_path, 3).close()
    assert service.asked[1] == service.asked[2]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_says_so_before_anything_is_read_or_lost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tiny("schedule.epochs=1"), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setitem(sys.modules, name, None)
    opened = sys.modules["interclr.engine.pretrain"]
    monkeypatch.setattr(opened, "open_training_source", lambda data: pytest.fail("images were opened"))
    with pytest.raises(UserError, match=rf"interclr\[{name}\]"):
        train(tiny(f"engine.loggers=[{name}]", "schedule.epochs=2"), tmp_path, resume=True)
    assert run.finished
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_service_that_refuses_leaves_a_finished_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, resume_step: int | None) -> NoReturn:
        raise UserError("no connection")

    run = train(tiny("schedule.epochs=1"), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setitem(metrics.LOGGERS, "tensorboard", refuse)
    with pytest.raises(UserError, match="no connection"):
        train(tiny("schedule.epochs=2"), tmp_path, resume=True)
    assert run.finished
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
