"""2n steps equal n, resume, n: to the last bit of the last checkpoint, and line by line in the metrics."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import INTER, MOCO, Heard, final_state, same, same_run, tiny, train, write_images

import interclr
from interclr.config import Settings
from interclr.data.stream import StreamLoader
from interclr.engine.resume import changed_settings
from interclr.engine.step import TrainStep
from interclr.engine.training import Training
from interclr.labels import base
from interclr.run import checkpoint
from interclr.run.folder import Run
from interclr.types import UserError

BYOL = "method={name: byol, dim: 16, hidden: 32, momentum: 0.9}"
NPID = ("method={name: npidv2, dim: 16, hidden: 32, negatives: 20}", "views=[{jitter: 0.8, brightness: 0.4}]")
SGD = "optimiser={name: sgd, base_lr: 0.5}"
LARS = "optimiser={name: lars, base_lr: 0.5, trust: 0.01}"

KINDS: dict[str, tuple[str, ...]] = {
    "mocov2, adamw": (),
    "mocov2, sgd, symmetric": (SGD, "method.symmetric=true"),
    "mocov2, inter": INTER,
    "mocov2, inter after a warm-up": (*INTER, "inter.warmup_epochs=1"),
    "mocov2, inter offline, lars": (*INTER, LARS, "inter.labels={name: offline}"),
    "npidv2": NPID,
    "npidv2 from features": (*NPID, "method.bank_start=features"),
    "npidv2, inter, sgd": (*NPID, *INTER, SGD),
    "byol, inter, two micro-batches, lars": (BYOL, *INTER, LARS, "engine.accumulate=2"),
    "bank in bfloat16": (*INTER, "inter.bank_dtype=bfloat16"),
    "mocov2, soft targets of a view of their own": (*INTER, "inter.loss=soft", "inter.target_view={}"),
    "npidv2, soft targets seen by a slow copy": (*NPID, *INTER, "inter.loss=soft", "inter.target_view={}"),
    "bf16": ("engine.precision=bf16",),
}
ODD = {"mocov2, inter"}  # cut at several places


@pytest.mark.parametrize(("kind", "cut"), [(k, c) for k in KINDS for c in ((1, 4, 5) if k in ODD else (5,))])
def test_cut_and_resumed(kind: str, cut: int, tmp_path: Path) -> None:
    """3 epochs of 4 steps, a line every 3: step 5 is in the middle of an epoch and of an interval."""
    settings = tiny(*KINDS[kind], "schedule.epochs=3")
    train(settings, tmp_path / "whole")
    stopped = train(settings, tmp_path / "cut", stop_after=cut)
    assert not stopped.finished
    expected = cut + cut % settings.engine.accumulate  # only between optimiser steps
    assert final_state(stopped.folder)["step"] == expected
    resumed = train(settings, tmp_path / "cut", resume=True)
    assert resumed.finished
    same_run(tmp_path / "whole", tmp_path / "cut")
    drop = {"seconds", "command", "continued_by"}
    same(*({k: v for k, v in Run(tmp_path / name).result.items() if k not in drop} for name in ("whole", "cut")))
    whole, again = (torch.load(checkpoint.find(tmp_path / n / "checkpoint")[-1]) for n in ("whole", "cut"))
    assert whole["averages"]["steps"] == again["averages"]["steps"]


def test_cut_at_every_step(tmp_path: Path) -> None:
    settings = tiny(*INTER, "engine.accumulate=2", BYOL)
    train(settings, tmp_path / "whole")
    for _ in range(4):
        train(settings, tmp_path / "cut", stop_after=1, resume=(tmp_path / "cut").exists())
    same_run(tmp_path / "whole", tmp_path / "cut") if Run(tmp_path / "cut").finished else None
    train(settings, tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_crash_and_resume_from_an_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at step 7 without a word: resumed from step 4, and the lines after it are not there twice."""
    settings = tiny(*INTER)
    train(settings, tmp_path / "whole")
    with monkeypatch.context() as patch:
        at_step(patch, 6, crash)
        with pytest.raises(ZeroDivisionError):
            train(settings, tmp_path / "cut")
    assert final_state(tmp_path / "cut")["step"] == 4
    train(settings, tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_damaged_newest_checkpoint_costs_only_time(tmp_path: Path) -> None:
    settings = tiny("schedule.epochs=3")
    train(settings, tmp_path / "whole")
    train(settings, tmp_path / "cut", stop_after=9)
    newest = checkpoint.find(tmp_path / "cut" / "checkpoint")[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    heard = Heard()
    train(settings, tmp_path / "cut", resume=True, screen=heard.screen)
    assert f"{newest.name} cannot be read" in heard.text
    same_run(tmp_path / "whole", tmp_path / "cut")


def crash() -> None:
    raise ZeroDivisionError


def at_step(patch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    original = TrainStep.__call__

    def step(self: TrainStep, images: object, current: int) -> object:
        if current == number:
            act()
        return original(self, images, current)

    patch.setattr(TrainStep, "__call__", step)


# Signals.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_signal_stops_after_the_step_and_resumes(
    number: signal.Signals, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny(*INTER, f"engine.accumulate={accumulate}")
    train(settings, tmp_path / "whole")
    if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("tests that run under nohup, where a run goes on as well")
    handler, heard = signal.getsignal(number), Heard()
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda: os.kill(os.getpid(), number))
        run = train(settings, tmp_path / "cut", screen=heard.screen)
    assert signal.getsignal(number) == handler
    assert not run.finished
    assert final_state(run.folder)["step"] == (5 if accumulate == 1 else 6)
    assert "continue with --resume" in heard.text
    train(settings, tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("method", [MOCO, ("method={name: npidv2, negatives: 8, dim: 16, hidden: 32}",)])
@pytest.mark.parametrize("during", ["embed", "cluster"])
@pytest.mark.parametrize(("late", "accumulate", "stopped"), [(0, 1, 0), (1, 1, 4), (1, 3, 6)])
def test_a_signal_while_clusters_start_stops_before_them(
    late: int,
    accumulate: int,
    stopped: int,
    during: str,
    method: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With many images that takes minutes, in which there is no step to wait for, unless gradients are half-summed."""
    if during == "embed" and late and method != MOCO:
        pytest.skip("a bank of its own is what clusters start from")
    settings = tiny(*method, *INTER, f"inter.warmup_epochs={late}", f"engine.accumulate={accumulate}")
    train(settings, tmp_path / "whole")

    owner, name = (Training, "_embed_all") if during == "embed" else (base, "kmeans")
    original = getattr(owner, name)

    def interrupted(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        run = train(settings, tmp_path / "cut")
    assert not run.finished
    assert final_state(run.folder)["step"] == stopped
    assert final_state(run.folder)["clusters_started"] == (accumulate > 1)
    train(settings, tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_second_signal_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(monkeypatch, 6, twice)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path / "run")
    assert final_state(tmp_path / "run")["step"] == 4


def test_a_signal_while_compiling_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's processes may have died of it, and a run that waits for them never ends."""
    monkeypatch.setattr(Training, "_announce_compiling", lambda self: self.step + 3)
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), tmp_path / "early")
    at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert final_state(train(tiny(), tmp_path / "later").folder)["step"] == 4


def test_workers_that_die_of_the_same_signal_do_not_spoil_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = folder(write_images(tmp_path / "images", 24), "data.resident=false")
    train(settings, tmp_path / "whole")
    original = StreamLoader.iterate

    def iterate(self: StreamLoader, first: int, last: int) -> object:
        for i, images in enumerate(original(self, first, last)):
            if first == 0 and i == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")
            yield images

    with monkeypatch.context() as patch:
        patch.setattr(StreamLoader, "iterate", iterate)
        assert not train(settings, tmp_path / "cut").finished
    train(settings, tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_sigterm_to_the_command_line(tmp_path: Path) -> None:
    """The whole way: a process is started, told to stop, and continued with --resume."""
    words = [f"data.source={json.dumps('synthetic:64')}", "data.batch=16", "model.width=8", "schedule.epochs=400"]
    words += ["method.queue=32", "engine.device=cpu", "monitor.every_epochs=0", "checkpoint.every_epochs=400"]
    command = [sys.executable, "-m", "interclr.cli", "pretrain", *words, "--out", str(tmp_path / "run")]
    # Sums depend on the number of threads in their last bits; this process has one.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any("loss" in line for line in lines_of(tmp_path / "run")):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "continue with --resume" in out
    assert "Traceback" not in err
    step = final_state(tmp_path / "run")["step"]
    assert 0 < step < 1600
    settings = Run(tmp_path / "run").settings
    train(settings, tmp_path / "run", resume=True, stop_after=3)
    train(settings, tmp_path / "whole", stop_after=step + 3)
    same(*(final_state(tmp_path / name)["learner"] for name in ("run", "whole")))


def lines_of(path: Path) -> list[dict[str, object]]:
    return Run(path).metrics if (path / "metrics.jsonl").exists() else []


# What cannot be resumed, and what need not.


def folder(path: Path, *overrides: str) -> Settings:
    return tiny(f"data.source={path}", "data.batch=8", "data.workers=0", "data.max_side=64", *overrides)


def test_streamed_unreadable_images_are_remembered(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 24)
    for i in (2, 9, 17):
        (images / f"{i:03d}.png").write_bytes(b"broken")
    settings = folder(images, *INTER, "data.resident=false", "engine.log_every=1")
    train(settings, tmp_path / "whole")
    train(settings, tmp_path / "cut", stop_after=4)
    (run,) = (train(settings, tmp_path / "cut", resume=True),)
    same_run(tmp_path / "whole", tmp_path / "cut")
    assert len(run.result["unreadable"]) == 3
    train(settings, tmp_path / "cut", resume=True)
    assert len(run.result["unreadable"]) == 3


def test_changed_data_are_refused(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 16)
    train(folder(images), tmp_path / "run", stop_after=1)
    shutil.copy(images / "003.png", images / "0035.png")
    with pytest.raises(UserError, match=r"the data are not those .*: there were 16 images and are 17 now, and"):
        train(folder(images), tmp_path / "run", resume=True)
    with pytest.raises(UserError, match=rf"{tmp_path}/other is not {images}, there were 16 images and are 18 now"):
        train(folder(write_images(tmp_path / "other", 18)), tmp_path / "run", resume=True)
    (images / "0035.png").rename(images / "003.png")
    (images / "004.png").rename(images / "005x.png")
    with pytest.raises(UserError, match=rf"names of the images of {images}, or labels .*, have changed"):
        train(folder(images), tmp_path / "run", resume=True)
    (images / "005x.png").rename(images / "004.png")
    assert train(folder(images), tmp_path / "run", resume=True).finished


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.batch=8", r"data\.batch: 16 → 8"),
        ("seed=3", "seed: 0 → 3"),
        ("optimiser={name: lars}", r"optimiser\.name: adamw → lars"),
        ("optimiser={name: sgd}", r"optimiser\.name: adamw → sgd"),
        ("method={name: byol, dim: 16, hidden: 32}", r"method\.name: mocov2 → byol"),
        ("model.width=16", r"model\.width: 8 → 16"),
        ("model.stem=small", r"model\.stem: strided → small"),
        ("engine.accumulate=2", r"engine\.accumulate: 1 → 2"),
        ("method.dim=8", "does not fit these settings"),
        ("method.queue=16", "does not fit these settings"),
        ("schedule.epochs=1", "beyond the 4 steps"),
    ],
)
def test_incompatible_settings_are_refused_and_nothing_is_touched(
    change: str, says: str, stopped: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=says) as caught:
        train(tiny("schedule.epochs=3", change), run, resume=True)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stopped") / "run"
    train(tiny("schedule.epochs=3"), path, stop_after=5)
    return path


def test_a_changed_rate_or_decay_counts_and_is_said(stopped: Path, tmp_path: Path) -> None:
    run, heard = shutil.copytree(stopped, tmp_path / "run"), Heard()
    settings = tiny("schedule.epochs=4", "optimiser.base_lr=1e-4", "optimiser.weight_decay=0.2", "monitor.k=3")
    train(settings, run, resume=True, screen=heard.screen)
    for line in ("schedule.epochs: 3 → 4", "optimiser.base_lr: 0.003 → 0.0001", "optimiser.weight_decay: 0.0001 → 0.2"):
        assert line in heard.text
    assert "monitor.k" not in heard.text.replace("chosen", "")
    state = final_state(run)
    assert state["step"] == 16
    assert [group["weight_decay"] for group in state["optimiser"]["param_groups"]] == [0.2, 0.0]
    assert state["settings"] == (run / "resolved.yaml").read_text()


def test_another_number_of_processes_is_said_and_kept(tmp_path: Path) -> None:
    train(tiny(), tmp_path / "run", stop_after=3)
    checkpoint.save(tmp_path / "run" / "checkpoint", 3, final_state(tmp_path / "run") | {"processes": 2}, 1)
    heard = Heard()
    run = train(tiny(), tmp_path / "run", resume=True, screen=heard.screen)
    assert "not as in the run so far, processes: 2 → 1" in heard.text
    assert (run.result["processes"], run.result["changes"]) == (1, ["processes: 2 → 1"])


@pytest.mark.parametrize("kind", ["mocov2", "npidv2"])
@pytest.mark.parametrize("before", [(), (INTER[0].replace("clusters: 4", "clusters: 3"), "inter.warmup_epochs=2")])
def test_the_inter_branch_can_be_added_or_changed_before_it_begins(
    kind: str, before: tuple[str, ...], tmp_path: Path
) -> None:
    """A plain run continued with the branch is the run that had it, with a warm-up, from its first step."""
    method = NPID if kind == "npidv2" else ()
    branch = (*INTER, "inter.warmup_epochs=2")
    train(tiny(*method, *branch, "schedule.epochs=3"), tmp_path / "whole")
    train(tiny(*method, *before, "schedule.epochs=3"), tmp_path / "cut", stop_after=7 if before else 8)
    heard = Heard()
    train(tiny(*method, *branch, "schedule.epochs=3"), tmp_path / "cut", resume=True, screen=heard.screen)
    assert "the inter branch has not begun" in heard.text
    assert "the result will differ" not in heard.text
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_branch_that_should_have_begun_begins_with_the_next_epoch(tmp_path: Path) -> None:
    """And the settings say so, so that the run can be made again from them."""
    train(tiny("schedule.epochs=4"), tmp_path / "late", stop_after=6)
    heard = Heard()
    branch = (*INTER, "inter.warmup_epochs=1", "schedule.epochs=4")
    run = train(tiny(*branch), tmp_path / "late", resume=True, screen=heard.screen)
    assert "the run is past 1, so the branch begins at 2" in heard.text
    assert run.settings.inter is not None
    assert run.settings.inter.warmup_epochs == 2
    train(tiny(*INTER, "inter.warmup_epochs=2", "schedule.epochs=4"), tmp_path / "whole")
    same_run(tmp_path / "whole", tmp_path / "late")
    train(tiny("schedule.epochs=2"), tmp_path / "over")
    with pytest.raises(UserError, match="has reached its last epoch without an inter branch"):
        train(tiny(*INTER, "inter.warmup_epochs=1", "schedule.epochs=2"), tmp_path / "over", resume=True)


def test_a_separate_head_cannot_be_added_later(tmp_path: Path) -> None:
    train(tiny(), tmp_path / "run", stop_after=2)
    with pytest.raises(UserError, match=r"--resume cannot change inter\.head: shared → separate"):
        train(tiny(*INTER, "inter.head=separate", "inter.warmup_epochs=1"), tmp_path / "run", resume=True)


def test_a_view_that_a_slow_copy_sees_cannot_be_given_to_a_branch_that_has_begun(tmp_path: Path) -> None:
    soft = tiny(*NPID, *INTER, "inter.loss=soft")
    train(soft, tmp_path / "run", stop_after=2)
    with pytest.raises(UserError, match=r"inter\.target_view cannot be given to a branch that has begun"):
        train(tiny(*NPID, *INTER, "inter.loss=soft", "inter.target_view={}"), tmp_path / "run", resume=True)


def test_a_branch_that_has_begun_cannot_be_taken_away(tmp_path: Path) -> None:
    train(tiny(*NPID, *INTER, "inter.loss=soft", "inter.target_view={}"), tmp_path / "run", stop_after=2)
    with pytest.raises(UserError, match=r"the inter branch of this run has begun and cannot be taken away"):
        train(tiny(*NPID), tmp_path / "run", resume=True)


def test_a_view_that_is_given_is_one_change(tmp_path: Path) -> None:
    train(tiny(*INTER, "inter.loss=soft"), tmp_path / "run", stop_after=2)
    given, changes = tiny(*INTER, "inter.loss=soft", "inter.target_view={}"), []
    for settings, told in (
        (given, "None → a view of its own"),
        (tiny(*INTER, "inter.loss=soft"), "a view of its own → None"),
    ):
        changes.append(f"inter.target_view: {told}")
        train(settings, tmp_path / "run", resume=True, stop_after=1)
        assert final_state(tmp_path / "run")["changes"] == changes


@pytest.mark.parametrize(("change", "differs"), [("bank_momentum=0.9", True), ("bank_momentum=0.5", False)])
def test_a_bank_at_work_before_the_branch_is_not_changed_without_a_word(
    change: str, differs: bool, tmp_path: Path
) -> None:
    train(tiny(*NPID), tmp_path / "run", stop_after=2)
    heard = Heard()
    branch = tiny(*NPID, *INTER, f"inter.{change}", "inter.warmup_epochs=1")
    train(branch, tmp_path / "run", resume=True, screen=heard.screen, stop_after=3)
    assert ("the bank, at work from the first step on" in heard.text) == differs


def test_unchanged_settings_are_not_mentioned(stopped: Path, tmp_path: Path) -> None:
    run, heard = shutil.copytree(stopped, tmp_path / "run"), Heard()
    train(tiny("schedule.epochs=3"), run, resume=True, screen=heard.screen)
    assert "not as in the run so far" not in heard.text
    assert "continuing at step 5 of 12" in heard.text


def test_settings_that_say_only_where_and_how_may_change(stopped: Path) -> None:
    saved = final_state(stopped)["settings"]
    settings = Run(stopped).settings
    free = settings.model_copy(
        update={
            "engine": settings.engine.model_copy(update={"device": "cuda", "loggers": ()}),
            "data": settings.data.model_copy(update={"workers": 7}),
            "checkpoint": settings.checkpoint.model_copy(update={"keep": 9}),
        }
    )
    assert changed_settings(saved, free) == []


def test_a_finished_run_resumed_loses_nothing(tmp_path: Path) -> None:
    settings = tiny(*INTER)
    train(settings, tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    heard = Heard()
    run = train(settings, tmp_path / "run", resume=True, screen=heard.screen)
    assert run.finished
    assert "is finished" in heard.text
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_a_run_killed_while_it_was_measured_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from interclr.engine.monitor import Monitor

    settings = tiny("monitor.every_epochs=0")
    train(settings, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Monitor, "health", lambda *_: crash())
        with pytest.raises(ZeroDivisionError):
            train(settings, tmp_path / "cut")
    assert final_state(tmp_path / "cut")["step"] == 8
    train(settings, tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_resuming_where_nothing_is_starts_and_says_so(tmp_path: Path) -> None:
    heard = Heard()
    run = train(tiny("schedule.epochs=1"), tmp_path / "new", resume=True, screen=heard.screen)
    assert run.finished
    assert "nothing to resume" in heard.text


def test_a_branch_that_has_begun_goes_on_when_auto_means_later(tmp_path: Path) -> None:
    wishes = (*INTER, "inter.warmup_epochs=auto")
    train(tiny(*wishes), tmp_path / "run", stop_after=6)  # of 2 epochs of 4 steps: it began after the first
    heard = Heard()
    run = train(tiny(*wishes, "schedule.epochs=6"), tmp_path / "run", resume=True, screen=heard.screen)
    assert "the inter branch has begun: inter.warmup_epochs stays 1" in heard.text
    assert run.settings.inter is not None
    assert run.settings.inter.warmup_epochs == 1
    losses = {line["step"]: "inter_loss" in line for line in run.metrics if "loss" in line}
    assert all(has for step, has in losses.items() if step > 6)
    assert max(losses) == 24


def test_a_finished_run_that_goes_on_is_not_finished(tmp_path: Path) -> None:
    """Neither by its result nor by the weights that others would load."""
    out = tmp_path / "run"
    assert train(tiny(), out).finished
    longer = tiny("schedule.epochs=4", "optimiser.base_lr=0.1")
    stopped = train(longer, out, resume=True, stop_after=3)
    assert not stopped.finished
    assert not (out / "backbone.safetensors").exists()
    state = final_state(out)["learner"]
    loaded = interclr.load(out).state_dict()
    assert all(torch.equal(loaded[name], state[f"intra.encoder.backbone.{name}"]) for name in loaded)
    assert train(longer, out, resume=True).finished


def test_a_checkpoint_that_lacks_something_is_passed_over(tmp_path: Path) -> None:
    run = train(tiny(*INTER), tmp_path, stop_after=6)
    torch.save({"format": 1, "step": 7}, run.folder / "checkpoint" / "step-0000000007.pt")
    heard = Heard()
    train(tiny(*INTER), tmp_path, resume=True, screen=heard.screen)
    assert "step-0000000007.pt cannot be read and is passed over: it lacks learner, optimiser" in heard.text
    assert "continuing at step 6" in heard.text


def test_an_odd_folder_is_no_damaged_backbone(tmp_path: Path) -> None:
    run = train(tiny("schedule.epochs=1"), Path(os.fsdecode(os.fsencode(tmp_path) + b"/o\xffdd")))
    assert interclr.load(run.folder).features == 64
