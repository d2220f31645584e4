"""The smallest runs that are still whole: helpers of the engine's tests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from interclr.config import Settings, load_settings
from interclr.engine import pretrain
from interclr.run import checkpoint
from interclr.run.folder import Run
from interclr.screen import Screen

TINY = (
    "optimiser={name: adamw, base_lr: 3.0e-3, weight_decay: 1.0e-4}",
    "data.source=synthetic:64",
    "data.batch=16",
    "data.image_size=32",
    "model.backbone=resnet10",
    "model.width=8",
    "model.stem=strided",
    "schedule.epochs=2",
    "schedule.warmup_epochs=0.5",
    "engine.log_every=3",
    "engine.device=cpu",
    "monitor.every_epochs=1",
)
MOCO = ("method={name: mocov2, queue: 32, dim: 16, hidden: 32, momentum: 0.9}",)
INTER = ("inter={clusters: 4, sampler: {name: semi_hard, negatives: 2, pool_fraction: 0.5}, labels: {name: online}}",)
TIMING = {"images_per_second", "data_wait"}


def tiny(*overrides: str) -> Settings:
    """Plain MoCo v2 on 64 images with a network of 8 channels, changed by ``overrides``. No recipe has a say in it."""
    return load_settings("views/synthetic", (*TINY, *MOCO, *overrides))


def folder_settings(folder: Path, *overrides: str) -> Settings:
    """The same on the images of a folder."""
    return tiny(
        f"data.source={json.dumps(str(folder))}", "data.batch=8", "data.workers=0", "data.max_side=64", *overrides
    )


class Heard:
    """A screen whose words a test can read."""

    def __init__(self) -> None:
        self.stream = StringIO()
        self.screen = Screen(Console(file=self.stream, width=500))

    @property
    def text(self) -> str:
        return self.stream.getvalue()


def train(settings: Settings, folder: Path, **options: Any) -> Run:
    return pretrain(settings, folder, **({"screen": Screen(quiet=True)} | options))


def final_state(folder: Path) -> checkpoint.State:
    found = checkpoint.load_latest(folder / "checkpoint")
    assert found is not None
    return found[0]


def same(left: Any, right: Any, path: str = "") -> None:
    """Equal to the last bit, all the way down."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), path
        assert left.dtype == right.dtype, path
        assert torch.equal(left, right), path
    elif isinstance(left, Mapping):
        assert list(left) == list(right), path
        for key in left:
            same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for i, pair in enumerate(zip(left, right, strict=True)):
            same(*pair, f"{path}/{i}")
    elif isinstance(left, float) and math.isnan(left):
        assert math.isnan(right), path
    else:
        assert left == right, f"{path}: {left} != {right}"


def same_run(left: Path, right: Path) -> None:
    """The final checkpoints and the metrics of two runs are equal, but for the time they took and what was typed."""
    states = [final_state(folder) for folder in (left, right)]
    for state in states:
        del state["seconds"], state["commands"]
    same(*states)
    lines = [
        [{k: v for k, v in line.items() if k not in TIMING} for line in Run(folder).metrics] for folder in (left, right)
    ]
    same(*lines)


def write_images(folder: Path, count: int, side: int = 32, classes: int = 0, seed: int = 0) -> Path:
    """PNGs of noise over a colour; with ``classes`` in that many subfolders."""
    generator = np.random.default_rng(seed)
    for i in range(count):
        home = folder / f"class{i % classes}" if classes else folder
        home.mkdir(parents=True, exist_ok=True)
        colour = generator.integers(0, 200, 3)
        pixels = (colour + generator.integers(0, 56, (side, side, 3))).astype(np.uint8)
        Image.fromarray(pixels).save(home / f"{i:03d}.png")
    return folder
