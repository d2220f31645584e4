"""A run folder when things go wrong: two writers, lost or damaged files, a full disk, a terminal that has gone."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import INTER, final_state, tiny, train

from interclr.engine import pretrain
from interclr.engine.step import TrainStep
from interclr.run import checkpoint
from interclr.run import folder as run_folder
from interclr.run.folder import Run
from interclr.screen import Screen
from interclr.types import UserError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tiny(*INTER), tmp_path_factory.mktemp("finished") / "run")


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["result.json", "backbone.safetensors"])
def test_what_is_left_of_a_run_is_not_overwritten(resume: bool, name: str, finished: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(finished.folder / name, tmp_path / "run")
    with pytest.raises(UserError, match="no checkpoint to go on from"):
        train(tiny(*INTER), tmp_path / "run", stop_after=2, resume=resume)
    assert (tmp_path / "run" / name).exists()


def test_one_process_at_a_time_trains_in_a_folder(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_ATTEMPTS", 2)
    monkeypatch.setattr(run_folder, "LOCK_PAUSE", 0.01)
    out.mkdir()
    with run_folder.sole_writer(out), pytest.raises(UserError, match="another process is training"):
        train(tiny(*INTER), out, stop_after=2)
    assert train(tiny(*INTER), out, stop_after=2).metrics is not None


def test_a_refused_run_leaves_nothing_that_was_not_there(tmp_path: Path) -> None:
    too_many = tiny("data.batch=65")
    with pytest.raises(UserError, match=r"data\.batch: 65"):
        train(too_many, tmp_path / "runs" / "new")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"data\.batch: 65"):
        train(too_many, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_who_waits_for_a_run_that_is_refused_has_the_folder_alone(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock's file goes with the run that is refused; a lock on what is no longer there would let others in."""
    monkeypatch.setattr(run_folder, "LOCK_PAUSE", 0.01)
    monkeypatch.setattr(run_folder, "LOCK_ATTEMPTS", 1000)
    inside, leave = threading.Event(), threading.Event()

    def second() -> None:
        with run_folder.sole_writer(out):
            inside.set()
            leave.wait(20)

    waiting = threading.Thread(target=second)

    def refused() -> None:
        with run_folder.left_as_found(out), run_folder.sole_writer(out):
            waiting.start()
            time.sleep(0.1)
            assert not inside.is_set()
            raise UserError("refused")

    with pytest.raises(UserError, match="refused"):
        refused()
    assert inside.wait(20)
    monkeypatch.setattr(run_folder, "LOCK_ATTEMPTS", 2)
    with pytest.raises(UserError, match="another process is training"), run_folder.sole_writer(out):
        pass
    leave.set()
    waiting.join()


def test_a_failed_run_does_not_keep_the_folder(out: Path) -> None:
    """Workers of a run that failed may live on, held by its traceback; they have inherited the lock's file."""
    out.mkdir()
    with run_folder.sole_writer(out):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with run_folder.sole_writer(out):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_terminal_that_has_gone_does_not_keep_a_run_from_its_checkpoint(out: Path) -> None:
    class Gone(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(5, "Input/output error")
            return super().write(text)

        def isatty(self) -> bool:
            return True

    terminal = Gone()
    screen = Screen(Console(file=terminal, force_terminal=True))
    with pytest.MonkeyPatch.context() as patch:
        real = TrainStep.__call__

        def step(self: TrainStep, images: object, number: int) -> object:
            terminal.gone = number >= 2
            return real(self, images, number)

        patch.setattr(TrainStep, "__call__", step)
        run = pretrain(tiny(*INTER), out, screen=screen, stop_after=5)
    assert not run.finished
    assert final_state(out)["step"] == 5
    assert screen.silent


def test_lost_settings_are_those_of_the_checkpoint(finished: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(finished.folder, tmp_path / "copy")
    before = (copy / "resolved.yaml").read_text()
    for damage in (lambda path: path.unlink(), lambda path: path.write_text("")):
        damage(copy / "resolved.yaml")
        run_folder.restore_settings(copy)
        assert (copy / "resolved.yaml").read_text() == before


def test_damaged_lines_of_the_log_do_not_keep_a_run_from_going_on(out: Path) -> None:
    train(tiny(*INTER), out, stop_after=4)
    with open(out / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": null}\n\xff\xfe\n{"step": 3, "lo')
    run = train(tiny(*INTER), out, resume=True)
    assert run.finished
    assert all(isinstance(line["step"], int) for line in run.metrics)


def test_a_run_goes_on_without_tensorboard_where_it_cannot_write(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    with pytest.warns(UserWarning, match="no more lines for TensorBoard"):
        run = train(tiny("schedule.epochs=1"), out)
    assert run.finished


def test_a_later_checkpoint_that_was_passed_over_does_not_push_out_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "step-0000000014.pt").write_bytes(b"junk")
    for step in (8, 9):
        checkpoint.save(tmp_path, step, {"format": 1, "step": step}, keep=1)
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert found[0]["step"] == 9
    assert len(found[2]) == 1
