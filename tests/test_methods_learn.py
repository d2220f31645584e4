"""A short run of each method, with and without InterCLR, on the embedded set: the loss falls and k-NN rises.

Views, batches and epochs were chosen per method on the very k-NN asserted here, and lengthened where a run failed it
(BYOL, SimSiam): that a setting exists in which each method learns is all this shows. It compares no methods.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from interclr.config import settings_from
from interclr.data.synthetic import generate
from interclr.data.view_parameters import View
from interclr.data.views import Views, centre_crop
from interclr.engine.build import build_learner
from interclr.engine.step import Plan, TrainStep
from interclr.features import embed_all
from interclr.knn import knn_accuracy
from interclr.learner import Learner
from interclr.models import Encoded
from interclr.types import Images

CLASSES = (0, 4, 7, 9)  # disc, cross, bars, dots: a few, so that minutes are not needed
IMAGES, QUERIES, SIZE = 768, 800, 24
BATCH = {"npidv2": 32, "mocov2": 32, "byol": 32, "simclr": 32, "simsiam": 64}
EPOCHS = {"npidv2": 18, "mocov2": 9, "byol": 20, "simclr": 9, "simsiam": 24}  # NPID encodes one view, others two
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
METHODS: dict[str, dict[str, Any]] = {
    "npidv2": {"name": "npidv2", "negatives": 256, "hidden": 128, "dim": 64},
    "mocov2": {
        "name": "mocov2",
        "queue": 256,
        "temperature": 0.2,
        "momentum": 0.99,
        "symmetric": True,
        "hidden": 128,
        "dim": 64,
    },
    "byol": {"name": "byol", "momentum": 0.95, "hidden": 128, "dim": 64},
    "simclr": {"name": "simclr", "temperature": 0.1, "hidden": 128, "dim": 64},
    "simsiam": {"name": "simsiam", "hidden": 32, "dim": 128, "layers": 2},
}
MILD = View(
    crop_scale=(0.5, 1.0), jitter=0.8, brightness=0.4, contrast=0.4, grey=0.2
)  # SimSiam and BYOL learn slowly from more
VIEW = View(crop_scale=(0.3, 1.0), jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grey=0.2)


@functools.cache
def data() -> tuple[Images, Images]:
    return some(IMAGES, seed=0), some(QUERIES, seed=1)


def some(count: int, seed: int) -> Images:
    pixels, labels = generate(count * 10 // len(CLASSES), seed, SIZE)
    mine = torch.isin(labels, torch.tensor(CLASSES)).nonzero().flatten()
    assert len(mine) == count
    return Images(torch.arange(count), pixels[mine], label=labels[mine])


def knn(model: Learner) -> float:
    def features(images: Images) -> torch.Tensor:
        return embed_all(model.intra.encoder.backbone, [images], lambda i: centre_crop(i, SIZE, MEAN, STD))

    bank, queries = data()
    return knn_accuracy(features(bank), bank.label, features(queries), queries.label, k=20)


@pytest.mark.parametrize("inter", [False, True], ids=["plain", "interclr"])
@pytest.mark.parametrize("method", list(METHODS))
def test_a_short_run_learns(method: str, inter: bool) -> None:
    sampler = {"name": "semi_hard", "negatives": 32, "pool_fraction": 0.1}
    tree = {
        "model": {"backbone": "resnet10", "width": 16, "stem": "strided"},
        "method": METHODS[method],
        "inter": {"clusters": 32, "sampler": sampler} if inter else None,
    }
    model = build_learner(settings_from(tree), IMAGES)
    images, _ = data()
    before = knn(model)
    if model.inter is not None:
        features = embed_all(
            model.intra.bank_encoder(), [images], lambda i: centre_crop(i, SIZE, MEAN, STD), pick=inter_projection
        )
        model.start_clusters(features, torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(model.intra.encoder.parameters(), lr=3e-3, weight_decay=1e-4)
    epochs, batch = EPOCHS[method], BATCH[method]
    per_epoch = IMAGES // batch
    plan = Plan(epochs, per_epoch, 1, 0.5, 3e-3, seed=0)
    views = Views([MILD if method in ("simsiam", "byol") else VIEW] * model.intra.views_needed, SIZE, MEAN, STD)
    step = TrainStep(model.train(), views, optimiser, plan, torch.device("cpu"), "fp32", False)
    losses: dict[str, list[float]] = {"intra_loss": [], "inter_loss": []}
    for epoch in range(epochs):
        order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch)).view(-1, batch)
        for number, rows in enumerate(order, start=epoch * per_epoch):
            terms = step(Images(rows, images.pixels[rows]), number)
            for name in losses.keys() & terms.keys():
                losses[name].append(float(terms[name]))
        model.end_epoch(epoch, torch.Generator().manual_seed(epoch))
    after = knn(model)
    for name, values in losses.items():
        if values:
            second, last = (sum(values[e * per_epoch : (e + 1) * per_epoch]) / per_epoch for e in (1, epochs - 1))
            # From the second epoch on, when NPID's bank and MoCo's queue hold more than random vectors.
            assert last < second - (0.1 if name == "intra_loss" else 0.03), name
    assert bool(losses["inter_loss"]) == inter
    assert after > before + 3, f"k-NN {before:.1f} % before, {after:.1f} % after"


def inter_projection(output: object) -> torch.Tensor:
    assert isinstance(output, Encoded)
    return output.inter_projection
