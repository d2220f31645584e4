"""Learners small enough to be checked by hand, built the way the engine builds them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interclr import dist
from interclr.config import Settings, settings_from
from interclr.data.view_parameters import View
from interclr.data.views import Views
from interclr.engine.build import build_learner
from interclr.engine.step import Plan, TrainStep
from interclr.learner import Learner
from interclr.types import Batch, Embeddings, Images, Pairs

METHODS: dict[str, dict[str, Any]] = {
    "npidv2": {"name": "npidv2", "negatives": 24, "hidden": 32, "dim": 16},
    "mocov2": {"name": "mocov2", "queue": 40, "hidden": 32, "dim": 16, "momentum": 0.9},
    "byol": {"name": "byol", "hidden": 32, "dim": 16},
    "simclr": {"name": "simclr", "hidden": 32, "dim": 16},
    "simsiam": {"name": "simsiam", "hidden": 8, "dim": 16, "layers": 2},
}
IMAGES, SIDE = 96, 16
INTER: dict[str, Any] = {"clusters": 6, "sampler": {"name": "semi_hard", "negatives": 8, "pool_fraction": 0.3}}
VIEW = View(crop_scale=(0.4, 1.0), jitter=0.8, brightness=0.4, contrast=0.4)


def settings(method: str, inter: dict[str, Any] | None = None, norm: str = "group", **extra: Any) -> Settings:
    """``inter`` are changes to ``INTER``; None is the plain method. ``method_*`` in ``extra`` are for the method."""
    own = {key.removeprefix("method_"): extra.pop(key) for key in list(extra) if key.startswith("method_")}
    tree = {
        "model": {"backbone": "resnet10", "width": 8, "stem": "strided", "norm": norm},
        "method": METHODS[method] | own,
        "inter": None if inter is None else INTER | inter,
        "optimiser": {"name": "sgd"},
    }
    return settings_from(tree | extra)


def learner(method: str, inter: dict[str, Any] | None = None, norm: str = "group", **extra: Any) -> Learner:
    """Seeded; with the inter branch also clustered, on random features."""
    result = build_learner(settings(method, inter, norm, **extra), IMAGES)
    result.intra.generator, result.generator = torch.Generator(), torch.Generator()
    seed(result, 0)
    if result.inter is not None:
        result.start_clusters(unit(IMAGES, result.intra.dim, seed=7), torch.Generator().manual_seed(0))
    return result.train()


def seed(model: Learner, number: int) -> None:
    """As the engine does before every step."""
    assert model.intra.generator is not None
    assert model.generator is not None
    model.intra.generator.manual_seed(number)
    model.generator.manual_seed(number + 1000)


def pairs_of(model: Learner, embeddings: Embeddings) -> Pairs:
    return model._complete_draw(embeddings, model._prepare_draw(embeddings.index))


def pixels(count: int = IMAGES, seed: int = 0) -> Tensor:
    noise = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return (F.interpolate(noise, size=SIDE, mode="bilinear") * 255).to(torch.uint8)


def batch(rows: int = 8, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    views = tuple(torch.randn(rows, 3, SIDE, SIDE, generator=generator) for _ in range(2))
    return Batch(torch.randperm(IMAGES, generator=generator)[:rows], views)


def images_of(step: int, rows: int, data: Tensor) -> Images:
    """This rank's share of the global batch of ``step``."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))[:rows]
    mine = order[dist.slice_of_rank(rows)]
    return Images(mine, data[mine])


def train_step(model: Learner, plan: Plan, optimiser: torch.optim.Optimizer | None = None) -> TrainStep:
    optimiser = optimiser or torch.optim.SGD(model.intra.encoder.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    views = Views([VIEW] * model.intra.views_needed, SIDE, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    return TrainStep(model, views, optimiser, plan, torch.device("cpu"), "fp32", False)


def plan(steps: int, epochs: int = 1, accumulate: int = 1, rate: float = 0.05) -> Plan:
    return Plan(epochs, steps, accumulate, 0.0, rate, 3)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def random_embeddings(directions: int, rows: int, dim: int, seed: int = 0) -> Embeddings:
    """As a method would return them, but out of thin air; the queries are leaves of the graph."""
    query, target, inter_query = (unit(directions, rows, dim, seed=seed + i) for i in range(3))
    index = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(seed))[:rows]
    feature = unit(rows, dim, seed=seed + 3)
    return Embeddings(index, query.requires_grad_(), target, inter_query.requires_grad_(), feature)


def without_batch_norm(module: nn.Module) -> nn.Module:
    """BatchNorm1d of heads becomes a normalisation of each row: then ranks compute exactly what one process does."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d):
            setattr(module, name, nn.GroupNorm(1, child.num_features, affine=child.affine))
        else:
            without_batch_norm(child)
    return module


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of everything but BatchNorm's running statistics, which any forward in training mode moves."""
    own = ("running_mean", "running_var", "num_batches_tracked")
    return {key: value.clone() for key, value in model.state_dict().items() if not key.endswith(own)}


def digests(model: Learner) -> dict[str, str]:
    """Every tensor of the state to the bit."""
    return {
        key: hashlib.sha256(value.contiguous().view(-1).numpy().tobytes()).hexdigest()
        for key, value in state(model).items()
    }
