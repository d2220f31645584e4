"""The control that relates no images: soft targets by the method's own loss, and nothing else is changed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cifar10_scripts import ROOT
from small_learner import SIDE, batch, learner, seed

control = importlib.import_module("with_own_target")  # beside the scripts that cifar10_scripts puts on the path

TINY = [
    *("data.source=synthetic:64", "data.batch=16", "model.backbone=resnet10", "model.width=8", "schedule.epochs=1"),
    *("schedule.warmup_epochs=0", "engine.device=cpu", "inter.warmup_epochs=0", "inter.clusters=4", "inter.loss=soft"),
]


def call(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "with_own_target.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, check=False)


def test_the_branch_is_the_methods_own_loss_of_the_target_view() -> None:
    extra = torch.randn(8, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(9))
    for method in ("mocov2", "byol", "npidv2"):
        model = learner(method, {"loss": "soft", "target_view": {}})
        more = replace(batch(), views=(*batch().views, extra))
        _, embeddings, _ = model.loss(more, 0)
        seed(model, 3)
        found = control.own_loss(model, embeddings, more, model.bank).item()
        assert "target_of" not in vars(model.intra)
        target = model._seen(extra).double()  # (B, D)
        query = embeddings.inter_query.detach().double()  # (V, B, D)
        positive = (query * target).sum(-1)
        if method == "byol":
            expected = (2 - 2 * positive).mean() * 2  # both directions
        else:
            if method == "npidv2":
                seed(model, 3)
                size, generator = (model.intra.negatives,), model.intra.generator
                drawn = torch.randint(len(model.bank.features), size, generator=generator)
                negative = query @ model.bank.features[drawn].double().T  # (V, B, K)
                negative = negative.masked_fill(drawn == embeddings.index[:, None], -torch.inf)
            else:
                negative = query @ model.intra.queue.double().T  # (V, B, Q)
            logits = torch.cat([positive[..., None], negative], dim=-1) / model.intra.temperature
            expected = -logits.log_softmax(-1)[..., 0].mean()
        assert found == pytest.approx(expected.item(), rel=1e-4)


def test_a_training_runs_so_and_says_by_what(tmp_path: Path) -> None:
    done = call("pretrain", "synthetic-byol-interclr", *TINY, "inter.target_view={}", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["command"].startswith("python benchmarks/with_own_target.py pretrain synthetic-byol-interclr ")
    losses = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("inter_loss" in line for line in losses)


def test_what_has_no_such_view_is_refused(tmp_path: Path) -> None:
    done = call("pretrain", "synthetic-mocov2-interclr", *TINY, "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "needs inter.loss=soft and an inter.target_view" in done.stderr
