"""The control that trains with labels: its pairs are right, and nothing else is changed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cifar10_scripts import ROOT
from torch.nn import functional as F
from torchvision.io import write_png

from interclr import MemoryBank
from interclr.samplers import SemiHard, select_positive
from interclr.types import Pairs

control = importlib.import_module("with_classes")  # beside the scripts that cifar10_scripts puts on the path


@pytest.fixture
def bank() -> MemoryBank:
    generator = torch.Generator().manual_seed(0)
    bank = MemoryBank(300, 8, 12)
    bank.fill(F.normalize(torch.randn(300, 8, generator=generator), dim=1))
    bank.assign(torch.arange(300) % 12)
    return bank


TINY = [
    *("data.source=synthetic:64", "data.batch=16", "model.backbone=resnet10", "model.width=8", "schedule.epochs=1"),
    *("schedule.warmup_epochs=0", "engine.device=cpu", "inter.warmup_epochs=0", "inter.clusters=4"),
]
CLASSES = torch.arange(300) // 7 % 5


def test_positives_are_of_the_cluster_and_of_the_class_uniformly(bank: MemoryBank) -> None:
    anchor = 40
    mates = {j for j in range(300) if bank.labels[j] == bank.labels[anchor] and CLASSES[j] == CLASSES[anchor]}
    assert len(mates) > 3
    cut = control.within_classes(bank, CLASSES, 5)
    index = torch.full((8000,), anchor)
    lots = torch.randint(2**62, (8000,), generator=torch.Generator().manual_seed(1))
    drawn, times = select_positive(index, cut.labels[index], cut, lots).unique(return_counts=True)
    assert set(drawn.tolist()) == mates - {anchor}
    expected = 8000 / (len(mates) - 1)
    assert times.float().sub(expected).abs().max() < 5 * expected**0.5


def test_a_share_of_the_draws_is_right_and_the_others_are_of_the_whole_cluster(bank: MemoryBank) -> None:
    anchor, draws, share = 40, 20_000, 0.6
    together = {j for j in range(300) if bank.labels[j] == bank.labels[anchor] and j != anchor}
    mates = {j for j in together if CLASSES[j] == CLASSES[anchor]}
    assert 2 < len(mates) < len(together)
    index = torch.full((draws,), anchor)
    lots = torch.randint(2**62, (draws,), generator=torch.Generator().manual_seed(3))
    drawn = control.positives_of_class(index, bank, lots, CLASSES, 5, share)
    image, times = drawn.unique(return_counts=True)
    assert set(image.tolist()) == together
    for each, count in zip(image.tolist(), times.tolist(), strict=True):
        expected = draws * ((1 - share) / len(together) + (each in mates) * share / len(mates))
        assert abs(count - expected) < 5 * expected**0.5


def test_an_image_that_is_alone_of_its_class_in_its_cluster_is_its_own_positive(bank: MemoryBank) -> None:
    classes = torch.zeros(300, dtype=torch.long)
    classes[17] = 1
    cut = control.within_classes(bank, classes, 2)
    index = torch.tensor([17])
    assert select_positive(index, cut.labels[index], cut, torch.tensor([12345])).tolist() == [17]


def test_negatives_of_the_class_are_left_out_and_others_stay(bank: MemoryBank) -> None:
    anchors = torch.tensor([3, 100, 299])
    drawn = SemiHard(negatives=20, pool_fraction=0.3).draw(
        bank.features[anchors], anchors, bank, torch.Generator().manual_seed(2)
    )
    cosine = torch.arange(60.0).view(3, 20)
    right = control.right_pairs(Pairs(drawn.positive, drawn.negative, cosine), anchors, CLASSES)
    wrong = CLASSES[drawn.negative] == CLASSES[anchors][:, None]
    assert wrong.any()
    assert (~wrong).any()
    assert right.negative.equal(torch.where(wrong, -1, drawn.negative))
    assert right.cosine is not None
    assert right.cosine.equal(torch.where(wrong, -torch.inf, cosine))
    assert right.positive.equal(drawn.positive)


def call(*words: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "benchmarks" / "with_classes.py")
    return subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=300)


def test_a_training_with_it_says_what_it_is(tmp_path: Path) -> None:
    done = call(
        *("positives,negatives", "pretrain", "synthetic-mocov2-interclr", *TINY),
        *("inter.sampler.negatives=30", "inter.sampler.pool_fraction=1", "--out", str(tmp_path / "run")),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["negatives_wrong"] == 0.0
    assert "with_classes.py positives,negatives pretrain" in result["command"]
    assert not (tmp_path / "run" / "report.html").exists()  # it would draw from images whose classes it does not know


WATCHED = """
import sys
import torch
import with_classes
from interclr.cli import main
from interclr.engine.training import Training
from interclr.learner import Learner

if sys.argv.pop() == "right":
    with_classes.install(["positives", "negatives"] if "synthetic-mocov2-interclr" in sys.argv else ["positives"])
runs, pairs, drawn, draw, end, start = [], [], [], Learner._prepare_draw, Learner._complete_draw, Training.__init__

def starts(self, *given, **named):
    start(self, *given, **named)
    runs.append(self)

def draws(self, index):
    prepared = draw(self, index)
    pairs.append((index.repeat(self.intra.directions), prepared.positive, self.bank.labels.clone()))
    return prepared

def ends(self, embeddings, prepared):
    completed = end(self, embeddings, prepared)
    drawn.append((embeddings.index.repeat(self.intra.directions), completed.negative))
    return completed

Training.__init__, Learner._prepare_draw, Learner._complete_draw = starts, draws, ends
try:
    main()
except SystemExit as ended:
    assert not ended.code
classes = runs[0].data.labels
right = torch.cat([classes[anchor] == classes[positive] for anchor, positive, _ in pairs])
together = torch.cat([labels[anchor] == labels[positive] for anchor, positive, labels in pairs])
wrong = negatives = 0
for anchor, negative in drawn:
    wrong += int(((classes[negative] == classes[anchor][:, None]) & (negative >= 0)).sum())
    negatives += int((negative >= 0).sum())
print("share", right.float().mean().item(), together.all().item(), len(right), wrong, negatives)
"""


@pytest.mark.parametrize("method", ["mocov2", "byol"])
def test_every_pair_of_a_training_is_right_and_positives_are_of_the_cluster(tmp_path: Path, method: str) -> None:
    words = ["pretrain", f"synthetic-{method}-interclr", *TINY, "--no-report", "--out"]
    found = {}
    for which in ("right", "any"):
        command = [sys.executable, "-c", WATCHED, *words, str(tmp_path / which), which]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        found[which] = done.stdout.split("share ")[1].split()
    assert found["right"][:2] == ["1.0", "True"]
    assert float(found["any"][0]) < 0.9  # so that the control does something
    assert found["right"][2] == found["any"][2]
    (none_wrong, with_it), (wrong, without_it) = (
        [int(each) for each in found[which][3:]] for which in ("right", "any")
    )
    assert none_wrong == 0
    assert {wrong > 0, with_it > 0, without_it > 0} == {method == "mocov2"}  # BYOL draws none


def test_what_draws_no_pairs_has_none_to_be_right(tmp_path: Path) -> None:
    done = call("negatives", "pretrain", "synthetic-byol-interclr", *TINY, "--out", str(tmp_path / "run"))
    assert (done.returncode, "byol has no negatives" in done.stderr) == (2, True)
    soft = ("inter.loss=soft", "--out", str(tmp_path / "run"))
    done = call("positives", "pretrain", "synthetic-mocov2-interclr", *TINY, *soft)
    assert (done.returncode, "this run draws no pairs" in done.stderr) == (2, True)


def test_without_classes_or_with_an_unknown_part_it_says_so(tmp_path: Path) -> None:
    assert "usage: " in call("pretrain", "default").stderr
    torch.manual_seed(0)
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(4):
        write_png(torch.randint(256, (3, 32, 32), dtype=torch.uint8), str(folder / f"{number}.png"))
    done = call("positives", "pretrain", "folder", "--data", str(folder), "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "this control needs the class of every image" in done.stderr
