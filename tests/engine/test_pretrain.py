from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import INTER, MOCO, Heard, final_state, folder_settings, same, tiny, train, write_images
from torch import Tensor

import interclr
from interclr import dist
from interclr.bank import MemoryBank
from interclr.config import Settings, load_settings
from interclr.data.builtin import open_source
from interclr.engine import training
from interclr.engine.build import build_learner
from interclr.engine.metrics import Averages, Record
from interclr.engine.step import TrainStep
from interclr.export import export
from interclr.learner import Learner
from interclr.run import checkpoint
from interclr.run.files import save_tensors
from interclr.run.folder import Run
from interclr.screen import Screen, TrainingBar
from interclr.types import UserError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    folder, heard = tmp_path_factory.mktemp("finished") / "deep" / "run", Heard()
    return train(tiny(*INTER), folder, screen=heard.screen), heard.text


def test_a_recipe_by_its_name_goes_to_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = interclr.pretrain(tiny(), screen=Screen(quiet=True), stop_after=1)
    assert run.folder.parent == Path("runs")
    assert run.folder.name.startswith("mocov2-")
    (tmp_path / "mine.yaml").write_text((run.folder / "resolved.yaml").read_text())
    named = interclr.pretrain(Path("mine.yaml"), screen=Screen(quiet=True), stop_after=1)
    assert named.folder.name.startswith("mine-")
    assert named.settings == run.settings


@pytest.mark.parametrize("late", [(), (*INTER, "inter.warmup_epochs=1")])
def test_a_bank_that_starts_from_features_starts_from_those_of_the_first_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: tuple[str, ...]
) -> None:
    """Devices may round differently, and no bank may differ from another by a bit."""
    first = torch.nn.functional.normalize(torch.randn(64, 16, generator=torch.Generator().manual_seed(7)), dim=1)
    monkeypatch.setattr(dist, "broadcast", lambda tensor: tensor.copy_(first))
    method = "method={name: npidv2, negatives: 8, dim: 16, hidden: 32, bank_start: features}"
    bank = final_state(train(tiny(method, *late), tmp_path, stop_after=1).folder)["learner"]
    untouched = (bank["bank.features"] == first).all(1)
    assert int(untouched.sum()) == 64 - 16  # all but the images of the one step
    if late:
        own = MemoryBank(64, 16, 4)
        own.load_state_dict({name.removeprefix("bank."): value for name, value in bank.items() if "bank." in name})
        before = own.sums.clone()
        own.rebuild()
        assert torch.equal(own.sums, before)


def test_short_runs_have_curves_to_their_last_step(tmp_path: Path) -> None:
    for every, logged in ((3, [3, 6, 8]), (4, [4, 8]), (5, list(range(1, 9)))):
        run = train(tiny(f"engine.log_every={every}"), tmp_path / f"every{every}")
        assert [line["step"] for line in run.metrics if "loss" in line] == logged


def test_the_bar_shows_the_epoch_from_the_first_step_and_every_figure(out: Path) -> None:
    """Also where every epoch ends, and is measured, before the second record would bring up the first."""
    seen: list[str] = []

    class Bar(TrainingBar):
        def advance(self, step: int, epoch: str) -> None:
            seen.append(epoch)

        def show(self, epoch: str, record: dict[str, Any]) -> None:
            seen.append(f"{epoch} step {record['step']}")

    class Watched(Screen):
        @contextmanager
        def training(self, total: int, first: int) -> Iterator[TrainingBar]:
            yield Bar(self, total, first)

    train(tiny("engine.log_every=4", "schedule.epochs=3"), out, screen=Watched(quiet=True))
    assert seen == [
        *(["1/3"] * 4 + ["1/3 step 4"]),
        *(["2/3"] * 4 + ["2/3 step 8"]),
        *(["3/3"] * 4),
    ]


def test_the_line_of_an_epoch_tells_how_training_does(finished: tuple[Run, str]) -> None:
    (line,) = (line for line in finished[1].splitlines() if line.startswith("epoch 2/2"))
    logged = next(line for line in reversed(finished[0].metrics) if line["step"] == 6)
    for words in (f"loss {logged['loss']:.3f}", f"alignment {logged['alignment']:.2f}", "relabelled "):
        assert words in line


def test_a_warm_up_that_does_not_end_is_said_aloud(tmp_path: Path) -> None:
    heard = Heard()
    train(tiny("schedule.warmup_epochs=50"), tmp_path / "run", screen=heard.screen)
    assert "a warm-up of 50 epochs does not end in 2" in " ".join(heard.text.split())


def test_a_run_folder_is_complete(finished: tuple[Run, str]) -> None:
    folder = finished[0].folder
    assert {path.name for path in folder.iterdir()} == {
        "resolved.yaml",
        "metrics.jsonl",
        "tensorboard",
        "checkpoint",
        "result.json",
        "backbone.safetensors",
        ".lock",
    }
    assert [path.name for path in checkpoint.find(folder / "checkpoint")] == [
        "step-0000000004.pt",
        "step-0000000008.pt",
    ]
    assert not list(folder.rglob("*.tmp"))


def test_resolved_settings_reload_and_leave_nothing_to_guess(finished: tuple[Run, str]) -> None:
    run = finished[0]
    text = (run.folder / "resolved.yaml").read_text()
    assert "auto" not in text.replace("torchauto", "")
    assert run.settings == load_settings(str(run.folder / "resolved.yaml"))
    assert run.settings.data.batch == 16
    assert final_state(run.folder)["settings"] == text


def test_result_and_metrics_tell_the_same(finished: tuple[Run, str]) -> None:
    run = finished[0]
    result = json.loads((run.folder / "result.json").read_text())
    assert run.finished
    assert result["finished"] is True
    assert (result["images"], result["steps"], result["epochs"], result["method"]) == (64, 8, 2, "mocov2")
    lines = run.metrics
    assert [line["step"] for line in lines] == [0, 3, 4, 6, 8, 8]  # the last interval is a shorter one
    assert lines[0]["knn_before"] == result["knn_before"]
    assert lines[0]["knn_pixels"] == result["knn_pixels"]
    assert lines[-1]["event"] == "monitor"
    for figure in ("knn", "rank_me", "uniformity", "nmi", "purity", "cluster_entropy"):
        assert lines[-1][figure] == result[figure]
    for line in (lines[1], lines[3]):
        assert math.isclose(line["loss"], 0.75 * line["intra_loss"] + 0.25 * line["inter_loss"], rel_tol=1e-5)
        assert line["unreadable"] == 0
        assert 0 <= line["data_wait"] <= 1
    for text in ("random weights", "k-NN (k=", "done in", str(run.folder)):
        assert text in finished[1]


def test_tensorboard_has_the_loss(finished: tuple[Run, str]) -> None:
    events = EventAccumulator(str(finished[0].folder / "tensorboard"))
    events.Reload()
    expected = [(line["step"], line["loss"]) for line in finished[0].metrics if "loss" in line]
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("loss")] == expected


def test_the_backbone_loads_to_identical_outputs(finished: tuple[Run, str], tmp_path: Path) -> None:
    run = finished[0]
    backbone = interclr.load(run.folder)
    assert not backbone.training
    state = final_state(run.folder)["learner"]
    prefix = "intra.encoder.backbone."
    reference = run.settings.model.build().eval()
    reference.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    images = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8)
    inputs = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(backbone(inputs), reference(inputs))
    features = interclr.embed(backbone, images)
    assert features.shape == (5, 64)
    mean, std = (torch.tensor(values)[:, None, None] for values in (run.settings.data.mean, run.settings.data.std))
    with torch.no_grad():
        torch.testing.assert_close(features, reference((images / 255 - mean) / std), rtol=1e-3, atol=1e-4)
    copy = shutil.copytree(run.folder, tmp_path / "copy")
    (copy / "backbone.safetensors").unlink()  # an unfinished run: the newest checkpoint serves
    with torch.no_grad():
        assert torch.equal(interclr.load(copy)(inputs), backbone(inputs))


def test_files_of_weights_load_as_the_run_does(finished: tuple[Run, str], tmp_path: Path) -> None:
    run, _ = finished
    whole, inputs = interclr.load(run.folder), torch.randn(2, 3, 32, 32)
    older = tmp_path / "older"  # its names began with network.
    shutil.copytree(run.folder, older)
    save_tensors(older / "backbone.safetensors", whole.state_dict(), whole.description())
    exported = export(whole, tmp_path / "exported.safetensors").path
    shutil.copy(run.folder / "backbone.safetensors", tmp_path / "alone.safetensors")
    assert load_file(tmp_path / "alone.safetensors").keys() == whole.network.state_dict().keys()
    for path in (exported, tmp_path / "alone.safetensors", run.folder / "backbone.safetensors", older):
        found = interclr.load(path)
        assert not found.training
        assert (found.image_size, found.mean) == (whole.image_size, whole.mean)
        with torch.no_grad():
            assert torch.equal(found(inputs), whole(inputs))
    save_tensors(tmp_path / "other.safetensors", {"conv1.weight": torch.zeros(1)})
    with pytest.raises(UserError, match="does not say what network"):
        interclr.load(tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match=r"broken.safetensors cannot be read"):
        interclr.load(tmp_path / "broken.safetensors")


def test_load_says_what_is_missing(tmp_path: Path, finished: tuple[Run, str]) -> None:
    with pytest.raises(UserError, match="neither a run folder"):
        interclr.load(tmp_path)
    shutil.copy(finished[0].folder / "resolved.yaml", tmp_path)
    with pytest.raises(UserError, match="no checkpoint"):
        interclr.load(tmp_path)


def test_the_same_settings_give_the_same_run_and_another_seed_another(finished: tuple[Run, str], out: Path) -> None:
    train(tiny(*INTER), out)
    same(final_state(out)["learner"], final_state(finished[0].folder)["learner"])
    other = train(tiny(*INTER, "seed=1", "schedule.epochs=1"), out.with_name("other"))
    assert other.metrics[1]["loss"] != finished[0].metrics[1]["loss"]


def test_weights_move_and_the_bank_is_filled(finished: tuple[Run, str]) -> None:
    states = [checkpoint.load(path)["learner"] for path in checkpoint.find(finished[0].folder / "checkpoint")]
    moved = [k for k in states[0] if not torch.equal(states[0][k], states[1][k])]
    assert any(k.startswith("intra.encoder.") for k in moved)
    assert any(k.startswith("intra.key_encoder.") for k in moved)
    assert {"bank.features", "bank.sums", "intra.queue"} <= set(moved)
    torch.testing.assert_close(states[1]["bank.features"].norm(dim=1), torch.ones(64))


def test_npids_bank_may_start_from_features(tmp_path: Path) -> None:
    """The first step's writes do not depend on the loss, so the bank is that of an inter branch that begins at once."""

    def bank(name: str, *overrides: str) -> Tensor:
        settings = tiny("method={name: npidv2, dim: 16, hidden: 32, negatives: 20}", *overrides)
        run = train(settings, tmp_path / name, stop_after=1)
        return final_state(run.folder)["learner"]["bank.features"]

    at_once, random = bank("at once", *INTER), bank("random")
    from_features = ("method.bank_start=features",)
    assert torch.equal(bank("plain", *from_features), at_once)
    assert torch.equal(bank("late", *from_features, *INTER, "inter.warmup_epochs=1"), at_once)
    assert (random == at_once).all(1).sum() == 0


def test_npids_bank_stays_when_the_inter_branch_begins(tmp_path: Path) -> None:
    """Four steps are an epoch; the fifth, the branch's first, writes 16 of 64 entries."""

    def bank(name: str, steps: int, *overrides: str) -> Tensor:
        settings = tiny("method={name: npidv2, dim: 16, hidden: 32, negatives: 20}", *overrides)
        run = train(settings, tmp_path / name, stop_after=steps)
        return final_state(run.folder)["learner"]["bank.features"]

    before, after = bank("plain", 4), bank("late", 5, *INTER, "inter.warmup_epochs=1")
    assert (before - after).abs().amax(1).lt(1e-6).sum() == 48


def test_inter_starts_after_its_warm_up(out: Path) -> None:
    run = train(tiny(*INTER, "inter.warmup_epochs=1", "engine.log_every=2"), out)
    lines = [line for line in run.metrics if "loss" in line]
    assert ["inter_loss" in line for line in lines] == [False, False, True, True]
    assert ["nmi" in line for line in run.metrics if line.get("event") == "monitor"] == [False, True]
    assert lines[0]["loss"] == lines[0]["intra_loss"]


def test_lambda_one_is_the_plain_method(out: Path, tmp_path: Path) -> None:
    plain = train(tiny(), out)
    weighted = train(tiny(*INTER, "inter.intra_weight=1"), tmp_path / "weighted")
    same(final_state(plain.folder)["learner"], final_state(weighted.folder)["learner"])


def test_accumulation_steps_the_optimiser_once(out: Path) -> None:
    train(tiny("engine.accumulate=2", "schedule.epochs=1"), out)
    optimiser = final_state(out)["optimiser"]
    assert {int(entry["step"]) for entry in optimiser["state"].values()} == {2}


@pytest.mark.parametrize("precision", ["bf16"])
def test_half_precision_trains(precision: str, out: Path) -> None:
    run = train(tiny(f"engine.precision={precision}", "schedule.epochs=1"), out)
    assert run.finished
    assert all(v.dtype != torch.bfloat16 for v in final_state(out)["learner"].values())


# Data of all kinds.


def test_streaming_equals_resident(out: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 24, classes=2)
    resident = train(folder_settings(folder, *INTER, "data.resident=true"), out)
    stream = train(folder_settings(folder, *INTER, "data.resident=false"), tmp_path / "stream")
    same(final_state(resident.folder)["learner"], final_state(stream.folder)["learner"])
    assert resident.result["knn"] == stream.result["knn"]
    assert not stream.settings.data.resident
    assert resident.settings.data.resident


def test_images_of_several_sizes(out: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 10, side=40)
    write_images(folder / "small", 10, side=20)
    assert train(folder_settings(folder, "data.resident=false"), out).finished
    assert train(folder_settings(folder, "data.resident=true"), tmp_path / "resident").finished


@pytest.mark.parametrize("resident", [True, False])
def test_unreadable_files_in_the_middle(resident: bool, out: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 20)
    (folder / "007.png").write_bytes(b"not an image")
    heard = Heard()
    settings = folder_settings(folder, *INTER, f"data.resident={str(resident).lower()}", "data.batch=5")
    run = train(settings, out, screen=heard.screen)
    assert list(run.result["unreadable"]) == ["007.png"]
    assert run.result["images"] == (19 if resident else 20)
    assert "007.png" in heard.text
    assert "unreadable images: 1" in heard.text
    with pytest.raises(UserError, match=r"007\.png"):
        train(
            settings.model_copy(update={"data": settings.data.model_copy(update={"unreadable": "fail"})}),
            tmp_path / "b",
        )


@pytest.mark.parametrize("images", [2, 3, 9])
def test_a_handful_of_images_trains_by_the_folder_recipe(images: int, out: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", images)
    settings = load_settings(
        "folder",
        [f"data.source={folder}", "schedule.epochs=2", "model.width=8", "method.hidden=32", "engine.device=cpu"],
    )
    assert train(settings, out).finished  # and without a warning, which is an error here


# What cannot work is said before or without loss.


def refused(settings: Settings, out: Path, says: str, **options: object) -> None:
    with pytest.raises(UserError, match=says) as caught:
        train(settings, out, **options)
    assert "\n" not in str(caught.value)


def test_bad_data(out: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(folder_settings(tmp_path / "empty"), out, "no images in")
    refused(folder_settings(write_images(tmp_path / "one", 1)), out, "at least 2")
    refused(folder_settings(tmp_path / "nowhere"), out, "does not exist")
    for resident in ("true", "false"):
        (tmp_path / resident).mkdir()
        for i in range(4):
            (tmp_path / resident / f"{i}.png").write_bytes(b"broken")
        refused(folder_settings(tmp_path / resident, f"data.resident={resident}"), out, "can be read")
    assert not (out / "checkpoint").exists()


def test_bad_numbers(out: Path) -> None:
    refused(tiny("data.batch=65"), out, r"data\.batch: 65")
    refused(tiny(*INTER, "inter.clusters=65"), out, r"inter\.clusters: 65")
    refused(tiny("engine.accumulate=9"), out, r"engine\.accumulate: 9")
    refused(tiny("model.backbone=resnet11"), out, r"model\.backbone='resnet11'")


def test_a_bank_that_memory_does_not_hold_is_told_in_its_size(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        torch.empty(2**59)  # in torch's own words, as no machine has that

    monkeypatch.setattr("interclr.engine.build.MemoryBank", refuse)
    refused(tiny(*INTER), out, r"the memory bank of 64 images × 16 numbers takes 0\.0 GB, .*inter\.bank_dtype=bfloat16")
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"100,000,000,000,000 images × 16 numbers takes 6,400,000\.0 GB, more than"):
        build_learner(tiny(*INTER), 10**14)


def test_what_else_fails_in_a_bank_is_not_told_as_lack_of_memory(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("interclr.engine.build.MemoryBank", fail)
    with pytest.raises(RuntimeError, match=r"^shapes do not fit$"):
        train(tiny(*INTER), out)


def test_the_backbone_is_kept_where_the_last_measurement_fails(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory for that")

    monkeypatch.setattr("interclr.engine.monitor.Monitor.health", fail)
    with pytest.raises(RuntimeError, match="no memory for that"):
        train(tiny("monitor.every_epochs=0"), out)
    assert not (out / "result.json").exists()
    assert sum(parameter.numel() for parameter in interclr.load(out).parameters()) > 1000
    assert (out / "backbone.safetensors").stat().st_size > 4000
    monkeypatch.undo()
    assert train(tiny("monitor.every_epochs=0"), out, resume=True).finished


def test_as_many_clusters_as_files_but_not_as_readable_ones(out: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 20)
    (folder / "019.png").write_bytes(b"broken")
    refused(folder_settings(folder, *INTER, "inter.clusters=20"), out, r"inter\.clusters: 20, but only 19 images")


def test_bad_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(tiny(), tmp_path / "file", "cannot write to")
    refused(tiny(), tmp_path / "file" / "run", "cannot write to")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "tpu", "mps", "meta"])
def test_a_device_that_is_not_there(device: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(tiny(f"engine.device={device}"), out, r"^engine\.device: ")
    assert not out.exists()


def test_an_existing_run_is_not_overwritten(finished: tuple[Run, str], tmp_path: Path) -> None:
    copy = shutil.copytree(finished[0].folder, tmp_path / "copy")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    refused(tiny(*INTER), copy, "already holds a run: add --resume")
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("bad_step", [4, 5, 7])
def test_nan_ends_the_run_and_leaves_good_checkpoints(
    bad_step: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is NaN from some step on: in the middle, at the end of an epoch, at the very last step."""
    original, calls = Learner.loss, []

    def loss(self: Learner, *arguments: object) -> object:
        calls.append(1)
        value, *rest = original(self, *arguments)
        return (value * math.nan if len(calls) > bad_step else value, *rest)

    monkeypatch.setattr(Learner, "loss", loss)
    refused(tiny(), out, r"NaN or infinite.*optimiser\.base_lr")
    good = final_state(out)
    assert good["step"] == 4
    assert all(value.isfinite().all() for value in good["learner"].values())
    monkeypatch.undo()
    assert train(tiny(), out, resume=True).finished


def test_weights_that_have_overflowed_are_not_saved(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the last step before a checkpoint is finite, its update is not."""
    original = TrainStep.__call__

    def step(self: TrainStep, images: object, number: int) -> object:
        terms = original(self, images, number)
        if number == 7:
            with torch.no_grad():
                next(self.learner.intra.encoder.parameters()).fill_(math.inf)
        return terms

    monkeypatch.setattr(TrainStep, "__call__", step)
    refused(tiny(), out, "NaN or infinite")
    assert [path.name for path in checkpoint.find(out / "checkpoint")] == ["step-0000000004.pt"]


def test_an_absurd_learning_rate(out: Path) -> None:
    refused(tiny("optimiser={name: sgd, base_lr: 1e30}", "schedule.warmup_epochs=0"), out, "NaN or infinite")


def test_a_checkpoint_that_cannot_be_written(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.save

    def save(state: dict[str, object], file: object) -> None:
        if state["step"] == 8:
            raise OSError(28, "No space left on device")
        original(state, file)

    monkeypatch.setattr(torch, "save", save)
    refused(tiny(), out, r"step-0000000008\.pt: .*No space left on device")
    monkeypatch.undo()
    assert final_state(out)["step"] == 4
    assert train(tiny(), out, resume=True).finished


def test_offline_labels_and_other_methods_run(tmp_path: Path) -> None:
    for name, overrides in {
        "offline": [*INTER, "inter.labels={name: offline}"],
        "separate": [*INTER, "inter.head=separate"],
        "simclr": ["method={name: simclr, dim: 16, hidden: 32}", *INTER],
        "simsiam": ["method={name: simsiam}", *INTER],
        "group": ["model.norm=group"],
    }.items():
        run = train(tiny("schedule.epochs=1", *overrides), tmp_path / name)
        assert run.finished, name


def test_the_data_are_those_named(finished: tuple[Run, str]) -> None:
    assert final_state(finished[0].folder)["data"] == open_source("synthetic:64").fingerprint()


def test_epoch_checkpoints_are_written_under_accumulation(tmp_path: Path) -> None:
    """64 images in batches of 16 make 4 steps an epoch; with 3 micro-batches the boundary is rarely a multiple."""
    settings = tiny(*MOCO, "engine.accumulate=3", "schedule.epochs=6", "checkpoint={every_epochs: 1, keep: 20}")
    train(settings, tmp_path / "run")
    steps = [int(path.stem.removeprefix("step-")) for path in checkpoint.find(tmp_path / "run" / "checkpoint")]
    assert steps == [6, 9, 12, 18, 21, 24]  # the first multiple of 3 at or after 4, 8, 12, 16, 20, and the end


def test_the_speed_counts_the_time_in_which_the_device_catches_up(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is given work ahead of time, and the host waits for it where it reads the figures."""
    now = [0.0]
    flush = Averages.flush

    def slow(averages: Averages, record: Record) -> Record | None:
        now[0] += 6.0
        return flush(averages, record)

    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: now[0] + 1e-9 * next(ticks)))
    monkeypatch.setattr(Averages, "flush", slow)
    ticks = itertools.count(1)
    run = train(tiny("schedule.epochs=1", "data.source=synthetic:144", "monitor.every_epochs=0"), out)
    speeds = [line["images_per_second"] for line in run.metrics if "images_per_second" in line]
    assert len(speeds) == 3  # nine steps of 16 images, logged every three
    assert speeds[1:] == pytest.approx([3 * 16 / 6.0] * 2)


def test_damaged_files_of_a_run_are_one_line(finished: tuple[Run, str], tmp_path: Path) -> None:
    copy = shutil.copytree(finished[0].folder, tmp_path / "copy")
    weights = copy / "backbone.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged"):
        interclr.load(copy)
    (copy / "result.json").write_text("")
    assert not Run(copy).finished


def test_embed_normalises_as_the_run_did(tmp_path: Path) -> None:
    run = train(tiny("data.mean=[0.1, 0.2, 0.3]", "data.std=[0.3, 0.2, 0.1]", "schedule.epochs=1"), tmp_path / "run")
    backbone, images = interclr.load(run.folder), torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    expected = interclr.embed(backbone, images, settings=run.settings)
    assert torch.equal(interclr.embed(backbone, images), expected)
    assert not torch.equal(interclr.embed(backbone, images, settings=Settings()), expected)
    for wrapped in (torch.nn.Sequential(backbone), torch.nn.DataParallel(backbone), torch.compile(backbone)):
        assert torch.equal(interclr.embed(wrapped, images), expected)
    for dtype in (torch.float64, torch.bfloat16):
        torch.testing.assert_close(interclr.embed(backbone.to(dtype), images), expected, rtol=0.1, atol=0.05)


def test_the_callers_random_numbers_and_choices_are_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(1234)
    expected = torch.rand(3)
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.manual_seed(1234)
    train(tiny("schedule.epochs=1"), tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == before


def test_a_backbone_that_cannot_be_is_said_before_images_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = sys.modules["interclr.engine.pretrain"]
    monkeypatch.setattr(reading, "prepare", lambda *_: pytest.fail("images were read"))
    with pytest.raises(UserError, match="resnet1O"):
        train(tiny("model.backbone=resnet1O"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_no_recipe_is_told_what_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"load_settings\(…\), not dict"):
        interclr.pretrain({"seed": 1}, tmp_path / "run")  # type: ignore[arg-type]
