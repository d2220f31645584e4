"""A subject, data and a context small enough for tests of evaluations."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from interclr.data.source import ArraySource
from interclr.data.synthetic import CLASSES, generate
from interclr.evaluate.base import Context, LabelledData, Subject
from interclr.models import BackboneConfig
from interclr.screen import Screen

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def subject(width: int = 8, seed: int = 0) -> Subject:
    torch.manual_seed(seed)
    backbone = BackboneConfig(backbone="resnet8", width=width, stem="strided").build()
    return Subject(backbone, "tiny", 32, MEAN, STD)


def synthetic(train: int = 200, test: int = 100) -> LabelledData:
    sources = [
        ArraySource(*generate(count, seed), name=f"synthetic {split}", classes=CLASSES)
        for split, count, seed in (("train", train, 0), ("test", test, 1))
    ]
    return LabelledData(*sources, "synthetic")


def labelled(train: list[int], test: list[int]) -> LabelledData:
    """Noise with the given labels."""

    def source(labels: list[int], name: str) -> ArraySource:
        generator = torch.Generator().manual_seed(len(labels))
        pixels: Tensor = torch.randint(0, 256, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=generator)
        return ArraySource(pixels, torch.tensor(labels), name=name)

    return LabelledData(source(train, "noise train"), source(test, "noise test"), "noise")


def context(folder: Path, screen: Screen | None = None, seed: int = 0) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(folder, torch.device("cpu"), screen or Screen(quiet=True), seed)
