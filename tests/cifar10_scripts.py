"""What the tests of the CIFAR-10 scripts share: the scripts themselves, which are no package, and small plans."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent

sys.path.append(str(ROOT / "benchmarks"))
runner, one_run, page, study, results = (
    importlib.import_module(name)
    for name in ("cifar10", "cifar10_runner", "cifar10_page", "cifar10_study", "cifar10_results")
)


def plan_of(folder: Path, tree: Any) -> Path:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


TINY = [
    *("data.source=synthetic:64", "data.batch=16", "model.backbone=resnet10", "model.width=8", "schedule.epochs=2"),
    *("schedule.warmup_epochs=0", "engine.log_every=2", "engine.device=cpu", "monitor.every_epochs=1"),
]
KEEPING = ["checkpoint.every_epochs=1", "checkpoint.keep=2"]


def record_at(folder: Path, name: str) -> dict[str, Any]:
    text = (folder / "records" / "tiny" / f"{name}.json").read_text()
    assert len(text) < 100_000
    return dict(json.loads(text))
