"""Several processes do what one does: identical banks on every rank, the losses of one process on the global batch.

Processes are started by hand over gloo. Group normalisation, and heads whose BatchNorm is replaced, make every image's
embedding independent of the others on its rank: only then can losses equal those of one process. With BatchNorm left
in (as in ``batch-norm``) each rank has statistics of its own, and only the equality of ranks is checked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
import torch.multiprocessing as multiprocessing
from small_learner import (
    IMAGES,
    METHODS,
    digests,
    images_of,
    learner,
    pixels,
    plan,
    train_step,
    without_batch_norm,
)
from tiny_runs import final_state, tiny, write_images
from tiny_runs import train as tiny_train
from torch import nn

from interclr import dist
from interclr.engine import ranks, training
from interclr.engine.step import TrainStep
from interclr.models import Backbone, BackboneConfig
from interclr.types import UserError

BATCH = 16  # global


@dataclasses.dataclass(frozen=True)
class Case:
    method: str
    steps: int = 20
    network: str = "resnet"
    inter: tuple[tuple[str, Any], ...] = ()
    epochs: int = 1  # ``steps`` each
    accumulate: int = 1
    batch_norm: bool = False
    worlds: tuple[int, ...] = (2, 4)
    method_extra: tuple[tuple[str, Any], ...] = ()


CASES: dict[str, Case] = {
    **{method: Case(method) for method in METHODS},
    "mocov2-long": Case("mocov2", 240, "mlp"),
    **{f"{method}-long": Case(method, 240, "mlp", worlds=(2,)) for method in ("npidv2", "byol")},
    "mocov2-symmetric": Case("mocov2", network="mlp", method_extra=(("symmetric", True),), worlds=(2,)),
    "simclr-accumulate": Case("simclr", network="mlp", accumulate=2, worlds=(2,)),
    "offline": Case("npidv2", 6, "mlp", inter=(("labels", {"name": "offline"}),), epochs=3, worlds=(2,)),
    **{
        f"{method}-warm-up": Case(
            method, 6, "mlp", inter=(("head", "separate"), ("warmup_epochs", 1)), epochs=2, worlds=(2,)
        )
        for method in ("mocov2", "byol", "simclr", "simsiam")
    },
    **{f"{method}-batch-norm": Case(method, batch_norm=True, worlds=(2,)) for method in ("mocov2", "byol", "simsiam")},
}


def mlp_backbone(_: BackboneConfig) -> Backbone:
    layers = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 32), nn.ReLU()]
    return Backbone(nn.Sequential(*layers), 32)


def train(case: Case, stop_after: int | None = None) -> dict[str, Any]:
    """Losses averaged over ranks, and digests of all state, of this process."""
    original = BackboneConfig.build
    try:
        if case.network == "mlp":
            BackboneConfig.build = mlp_backbone  # type: ignore[method-assign]
        norm = "batch" if case.batch_norm else "group"
        extra = {f"method_{name}": value for name, value in case.method_extra}
        model = learner(case.method, dict(case.inter), norm, **extra)
    finally:
        BackboneConfig.build = original  # type: ignore[method-assign]
    if not case.batch_norm:
        without_batch_norm(model)
    step = train_step(model, plan(case.steps, case.epochs, case.accumulate, 0.05))
    data, losses, changed = pixels(), [], 0.0
    for number in range(stop_after or case.steps * case.epochs)[: case.steps * case.epochs]:
        terms = step(images_of(number, BATCH, data), number)
        losses.append(float(dist.all_reduce_mean(terms["loss"])))
        changed += float(terms.get("labels_changed", 0.0))
        if (number + 1) % case.steps == 0:
            epoch = number // case.steps
            model.end_epoch(epoch, torch.Generator().manual_seed(epoch))
    return {"losses": losses, "digests": digests(model), "changed": changed}


def worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    try:
        for name, case in CASES.items():
            if world in case.worlds:
                try:
                    found[name] = train(case)
                except Exception:  # every rank meets the same error, so the others need not wait
                    found[name] = {"error": traceback.format_exc()}
    finally:
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        torch_dist.destroy_process_group()


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """For 2 and 4 processes, what each rank found."""
    result = {}
    for world in (2, 4):
        folder = tmp_path_factory.mktemp(f"world{world}")
        multiprocessing.spawn(worker, (world, str(folder)), world)
        result[world] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return result


@pytest.mark.parametrize(("name", "world"), [(name, world) for name, case in CASES.items() for world in case.worlds])
def test_ranks_agree_to_the_bit_and_with_one_process(
    name: str, world: int, several: dict[int, list[dict[str, Any]]]
) -> None:
    ranks, case = [rank[name] for rank in several[world]], CASES[name]
    assert "error" not in ranks[0], ranks[0].get("error")
    kept = {"bank.features", "bank.labels", "bank.centroids", "bank.counts", "bank.sums"}
    assert kept <= ranks[0]["digests"].keys()
    assert ("intra.queue" in ranks[0]["digests"]) == (case.method == "mocov2")
    for other in ranks[1:]:
        assert other == ranks[0]
    if case.inter == ():
        assert ranks[0]["changed"] > 0  # or the labels would agree because nothing happened
    if case.batch_norm:
        return
    alone = one_process(name)
    # Rounding differs, and grows; once it tips a label or a negative at the edge of a pool the two runs part a little.
    assert ranks[0]["losses"][:10] == pytest.approx(alone["losses"][:10], rel=1e-4, abs=1e-5)
    assert ranks[0]["losses"][:20] == pytest.approx(alone["losses"][:20], rel=2e-2, abs=1e-3)


_ALONE: dict[str, dict[str, Any]] = {}


def one_process(name: str) -> dict[str, Any]:
    if name not in _ALONE:
        _ALONE[name] = train(CASES[name], stop_after=20)
    return _ALONE[name]


def test_one_process_needs_no_launcher() -> None:
    assert (dist.rank(), dist.world(), dist.is_main()) == (0, 1, True)
    tensor = torch.arange(3.0)
    for function in (dist.all_gather, dist.all_gather_with_gradient, dist.broadcast, dist.all_reduce_mean):
        assert function(tensor) is tensor
    dist.broadcast_all([tensor, tensor.double()])
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert dist.slice_of_rank(IMAGES) == slice(0, IMAGES)


# The command line under torchrun.

TINY = [
    "data.source=synthetic:128",
    "data.batch=32",
    "model.backbone=resnet10",
    "model.width=8",
    "schedule.epochs=4",
    "method.queue=64",
    "inter.clusters=6",
    "inter.sampler.negatives=4",
    "checkpoint.every_epochs=2",
    "monitor.every_epochs=0",
    "engine.log_every=2",
]


def torchrun(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "interclr.cli", "pretrain", *more, "--out", str(folder), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def losses_of(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert len(steps) == len(set(steps)), "a step was logged by more than one rank"
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize(
    ("recipe", "inter"),
    [
        # Clusters start after the checkpoint that is gone on from: from features that all processes make together.
        ("synthetic-mocov2-interclr", ["inter.warmup_epochs=3"]),
        # They have started before it, and targets are seen by running statistics, of which a checkpoint has one rank's.
        ("synthetic-mocov2-interclr", ["inter.warmup_epochs=1", "inter.loss=soft", "inter.target_view={}"]),
        # The same with a copy of the encoder, which begins with the branch.
        ("synthetic-npidv2-interclr", ["inter.warmup_epochs=1", "inter.loss=soft", "inter.target_view={}"]),
    ],
)
def test_torchrun_trains_writes_once_and_resumes(recipe: str, inter: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [each for each in TINY if "mocov2" in recipe or not each.startswith("method.queue")]
    done = torchrun(folder, recipe, *words, *inter)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done in") == 1  # one rank speaks
    first = losses_of(folder)
    assert list(first) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert json.loads((folder / "result.json").read_text())["steps"] == 16
    assert len(list(folder.rglob("events.out.tfevents*"))) == 1

    before = final_state(folder)["learner"]
    # As if the run had been killed after the checkpoint of step 8.
    saved = sorted((folder / "checkpoint").iterdir())
    assert len(saved) == 2, saved
    saved[-1].unlink()
    (folder / "result.json").unlink()
    again = torchrun(folder, "--resume")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "continuing at step 8" in again.stdout
    assert losses_of(folder) == pytest.approx(first, rel=1e-6)
    for name, tensor in final_state(folder)["learner"].items():
        assert torch.equal(tensor, before[name]), name
    result = json.loads((folder / "result.json").read_text())
    assert result["finished"]
    assert (result["processes"], result["changes"]) == (2, [])
    assert result["continued_by"][0].startswith("torchrun --nproc-per-node 2 -m interclr.cli pretrain --resume")


ELSEWHERE = """
import os, sys
os.chdir(os.path.join(sys.argv[1], "node" + os.environ["RANK"]))
sys.argv[1:] = sys.argv[2:]
from interclr.cli import main
main()
"""


def on_two_nodes(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Two processes, each in a folder of its own: what a path names differs between them."""
    (folder / "elsewhere.py").write_text(ELSEWHERE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(folder / "elsewhere.py"), str(folder), "pretrain", *words, "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def test_machines_that_see_different_things_are_told_apart(tmp_path: Path) -> None:
    plain = [each for each in TINY[1:] if not each.startswith("inter.")]
    settings = ["synthetic-mocov2", *plain, "schedule.epochs=1", "checkpoint.every_epochs=1", "--no-report"]
    for node, seed in enumerate((1, 2)):
        write_images(tmp_path / f"node{node}" / "same", 64, seed=1)
        write_images(tmp_path / f"node{node}" / "other", 64, seed=1)
        for path in sorted((tmp_path / f"node{node}" / "other").iterdir())[: 2 * seed]:
            path.rename(path.with_name(f"another{seed}{path.name}"))
    other = on_two_nodes(tmp_path, "--data", "other", "--out", "run", *settings)
    assert other.returncode != 0
    assert "process 1 has another set of images" in other.stderr
    (tmp_path / "node1" / "other" / "more.png").write_bytes((tmp_path / "node1" / "same" / "000.png").read_bytes())
    more = on_two_nodes(tmp_path, "--data", "other", "--out", "run2", *settings)
    assert "process 1 has another number of images" in more.stderr
    done = on_two_nodes(tmp_path, "--data", "same", "--out", "run3", *settings)
    assert done.returncode == 0, done.stderr[-2000:]
    again = on_two_nodes(tmp_path, "--data", "same", "--out", "run3", "--resume", *settings)
    assert again.returncode != 0
    assert "--out has to be a folder that all machines share" in again.stderr


def test_processes_of_other_settings_are_told_apart(tmp_path: Path) -> None:
    """Each node reads its own recipe file, and they differ."""
    for node, clusters in enumerate((4, 6)):
        folder = write_images(tmp_path / f"node{node}" / "same", 64, seed=1).parent
        (folder / "mine.yaml").write_text(f"extends: synthetic-mocov2-interclr\ninter: {{clusters: {clusters}}}\n")
    plain = [each for each in TINY[1:] if not each.startswith("inter.")]
    failed = on_two_nodes(tmp_path, "mine.yaml", *plain, "--data", "same", "--out", "run", "--no-report")
    assert failed.returncode != 0
    assert "process 1 has inter.clusters=6, process 0 has 4: start all processes with the same" in failed.stderr


def test_unreadable_images_of_all_processes_are_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos", 64)
    broken = sorted(folder.iterdir())[5:60:9]
    for path in broken:
        path.write_bytes(b"not an image")
    plain = [each for each in TINY[1:] if not each.startswith("inter.")]
    words = ["synthetic-mocov2", "--data", str(folder), *plain, "data.resident=false", "--no-report"]
    done = torchrun(tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "run" / "result.json").read_text())["unreadable"]
    assert {Path(name).name for name in found} == {path.name for path in broken}
    # And while it trains: by the log, by a line on the screen, and by a checkpoint, which one of them writes.
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["unreadable"] for line in lines if "unreadable" in line][-1] == len(broken)
    assert final_state(tmp_path / "run")["unreadable"].keys() == found.keys()
    for path in broken:
        assert f"{path.name}: " in done.stdout


def test_a_process_that_loses_another_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:1: Connection reset by peer")
    assert not ranks.lost_another(lost)  # there is no other
    with monkeypatch.context() as patch:
        patch.setattr(dist, "world", lambda: 2)
        assert ranks.lost_another(lost)
        assert ranks.lost_another(torch_dist.DistBackendError("remote process exited"))
        assert not ranks.lost_another(RuntimeError("shapes do not fit"))

    def fail(*_: object) -> None:
        raise lost

    monkeypatch.setattr(training, "lost_another", lambda error: error is lost)
    monkeypatch.setattr(TrainStep, "__call__", fail)
    with pytest.raises(UserError, match=r"another process of this run has ended.*--resume"):
        tiny_train(tiny(), tmp_path / "run")


def test_each_process_embeds_its_share_and_all_have_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[training.Training] = []
    monkeypatch.setattr(training.Training, "run", lambda self, stop_after: made.append(self))
    tiny_train(tiny("data.source=synthetic:65"), tmp_path / "run")
    (run,) = made
    whole = run._embed_all("all")
    assert len(whole) == 65
    world, sent = 4, dict[int, torch.Tensor]()
    monkeypatch.setattr(dist, "world", lambda: world)

    def gather(own: torch.Tensor) -> torch.Tensor:
        sent[dist.rank()] = own
        return torch.cat([sent.get(rank, own) for rank in range(world)])

    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source=0: tensor)
    for rank in range(world):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        everyone = run._embed_all("a share")
    assert [int((part != 0).any(1).sum()) for part in sent.values()] == [16, 16, 16, 17]
    torch.testing.assert_close(everyone, whole)
