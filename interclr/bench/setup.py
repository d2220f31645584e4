"""A training step of a recipe, built as training builds it, on data that are there or made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interclr.config import Settings, load_settings
from interclr.data.canvas import Canvas
from interclr.data.loader import Loader, Order, ResidentLoader
from interclr.engine.build import build_step, set_determinism
from interclr.engine.dataset import Facts
from interclr.engine.mode import engine_mode
from interclr.engine.settle import settle
from interclr.engine.step import TrainStep
from interclr.learner import Learner
from interclr.types import Images


@dataclass
class Prepared:
    settings: Settings
    learner: Learner
    step: TrainStep
    loader: Loader
    batch: int


def prepare(
    recipe: str,
    overrides: Sequence[str],
    pixels: Tensor,
    images: int,
    device: torch.device,
    labels: Tensor | None = None,
) -> Prepared:
    """``pixels`` (n, 3, H, W) bytes stand for ``images`` images: the bank has that many entries.

    An inter branch works from the first step on, whenever the recipe would begin with it.
    """
    settings = load_settings(recipe, overrides)
    if settings.inter is not None:
        settings = load_settings(recipe, [*overrides, "inter.warmup_epochs=0"])
    settings, _ = settle(settings, Facts(images, min(pixels.shape[2:]), device.type))
    mode, _ = engine_mode(settings, images, device)
    settings = settings.model_copy(update={"engine": settings.engine.model_copy(update={"mode": mode})})
    set_determinism(settings.engine.deterministic)
    batch = int(settings.data.batch)
    step = build_step(settings, images, device)
    learner = step.learner.train()
    if learner.labels is not None and learner.bank is not None:
        learner.start_clusters(clustered_features(learner.bank.size, learner.bank.dim, device), torch.Generator())
    canvas = Canvas(pixels, None, labels).to(device)
    kind = _Repeated if len(pixels) < images else ResidentLoader
    loader = kind(canvas, Order(images, batch, settings.seed))
    return Prepared(settings, learner, step, loader, batch)


def stepper(prepared: Prepared) -> Callable[[], object]:
    """One step after the other, on four batches in turn."""
    batches, numbers = itertools.cycle(list(prepared.loader.iterate(0, 4))), itertools.count()

    def work() -> None:
        prepared.step(prepared.step.fetch(batches), next(numbers))

    return work


class _Repeated(ResidentLoader):
    """Fewer pixels than images: indices run over all images, pixels repeat."""

    def iterate(self, first_step: int, last_step: int) -> Iterator[Images]:
        for step in range(first_step, last_step):
            index = self.order.indices(step).to(self.canvas.pixels.device)
            taken = self.canvas.take(index % len(self.canvas))
            yield Images(index, taken.pixels, taken.size, taken.label)


def clustered_features(size: int, dim: int, device: torch.device) -> Tensor:
    """Unit vectors around as many random directions as an hundredth of them: something that k-means can find."""
    generator = torch.Generator(device).manual_seed(0)
    centres = torch.randn(max(2, size // 100), dim, generator=generator, device=device)
    rows = torch.randint(len(centres), (size,), generator=generator, device=device)
    noise = torch.randn(size, dim, generator=generator, device=device)
    return torch.nn.functional.normalize(centres[rows] + noise, dim=1)
