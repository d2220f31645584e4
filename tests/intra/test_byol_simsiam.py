"""The methods without negatives: BYOL and SimSiam against their equations."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_learner import batch, images_of, learner, pairs_of, pixels, plan, random_embeddings, train_step
from torch import Tensor

from interclr.types import Embeddings, Pairs


def cosine(a: Tensor, b: Tensor) -> float:
    x, y = a.detach().double().numpy(), b.detach().double().numpy()
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def mean_cosine(query: Tensor, target: Tensor) -> float:
    return float(np.mean([cosine(q, t) for q, t in zip(query, target, strict=True)]))


def test_byol_loss_is_two_directions_of_two_minus_two_cosines() -> None:
    model, data = learner("byol"), batch()
    encoder, target_encoder = (copy.deepcopy(e) for e in (model.intra.encoder, model.intra.target_encoder))
    embeddings = model.intra.embed(data)
    # From the layers themselves: predictor of the projector online, projector alone for the target.
    predictions = [encoder.predictor(encoder.projector(encoder.backbone(view))) for view in data.views]
    targets = [target_encoder.projector(target_encoder.backbone(view)) for view in data.views]
    expected = (2 - 2 * mean_cosine(predictions[0], targets[1])) + (2 - 2 * mean_cosine(predictions[1], targets[0]))
    assert model.intra.loss(embeddings, None).item() == pytest.approx(expected, rel=1e-5)


def test_byol_target_has_no_gradient_and_no_predictor() -> None:
    intra = learner("byol", {"head": "separate"}).intra
    assert intra.target_encoder.predictor is None
    assert intra.target_encoder.inter_predictor is None
    embeddings = intra.embed(batch())
    assert not embeddings.target.requires_grad
    assert not embeddings.feature.requires_grad
    intra.loss(embeddings, None).backward()
    assert all(p.grad is None and not p.requires_grad for p in intra.target_encoder.parameters())
    assert all(p.grad is not None for p in intra.encoder.predictor.parameters())
    assert intra.bank_encoder() is intra.target_encoder


@pytest.mark.parametrize(("momentum", "accumulate"), [(0.99, 1), (0.5, 2)])
def test_byol_momentum_rises_to_one_by_a_cosine(momentum: float, accumulate: int) -> None:
    model, data, steps = learner("byol", method_momentum=momentum), pixels(), 8
    step, intra = train_step(model, plan(steps, accumulate=accumulate)), model.intra
    updates = steps // accumulate
    for number in range(steps):
        before = {name: p.detach().double() for name, p in intra.target_encoder.named_parameters()}
        step(images_of(number, 8, data), number)
        k = number // accumulate
        tau = 1 - (1 - momentum) * (math.cos(math.pi * k / updates) + 1) / 2
        if (number + 1) % accumulate:
            tau = 1.0
        online = dict(intra.encoder.named_parameters())
        for name, new in intra.target_encoder.named_parameters():
            expected = tau * before[name] + (1 - tau) * online[name].detach().double()
            torch.testing.assert_close(new.double(), expected, rtol=1e-5, atol=1e-7)
    assert len(before) < len(online)  # the predictor has no slow copy


def test_byol_bank_takes_the_mean_of_both_target_views() -> None:
    embeddings = learner("byol").intra.embed(batch())
    mean = embeddings.target.double().mean(0)
    torch.testing.assert_close(embeddings.feature.double(), mean / mean.norm(dim=1, keepdim=True), rtol=1e-5, atol=1e-6)


def on_bank(embeddings: Embeddings, positive: Tensor, features: Tensor) -> list[float]:
    """Mean cosine to the drawn positives, for each direction."""
    drawn = features[positive].view_as(embeddings.inter_query)
    return [mean_cosine(q, t) for q, t in zip(embeddings.inter_query, drawn, strict=True)]


@pytest.mark.parametrize("method", ["byol", "simsiam"])
def test_inter_loss_uses_positives_only(method: str) -> None:
    model = learner(method, {"margin": -0.5})
    embeddings = random_embeddings(2, 8, 16)
    positive = torch.arange(16)
    choices = (torch.arange(16, 64).repeat(16, 1), torch.empty(16, 0, dtype=torch.int64))
    losses = [model.intra.inter_loss(embeddings, Pairs(positive, drawn), model.bank).item() for drawn in choices]
    first, second = on_bank(embeddings, positive, model.bank.features)
    expected = 4 - 2 * (first + second) if method == "byol" else -(first + second) / 2
    assert losses == pytest.approx([expected, expected], rel=1e-5)


@pytest.mark.parametrize("method", ["byol", "simsiam"])
def test_no_negative_is_ever_looked_for(method: str) -> None:
    model = learner(method, {})

    def refuse(*_: object) -> None:
        raise AssertionError("the paper draws no negatives here")

    model.sampler.draw = model.sampler.prepare = model.sampler.check = refuse  # type: ignore[method-assign]
    for seed in range(20):
        data = batch(seed=seed)
        loss, embeddings, terms = model.loss(data, 0)
        pairs = pairs_of(model, embeddings)
        assert pairs.negative.shape == (16, 0)
        assert torch.equal(model.bank.labels[pairs.positive], model.bank.labels[data.index.repeat(2)])
        assert not (pairs.positive == data.index.repeat(2)).any()  # no cluster here has one member only
        assert torch.allclose(loss, 0.75 * terms["intra_loss"] + 0.25 * terms["inter_loss"])
    model.end_epoch(0, torch.Generator())


def test_positives_are_uniform_over_the_cluster() -> None:
    model = learner("byol", {})
    anchor = 5
    mates = [i for i in range(96) if model.bank.labels[i] == model.bank.labels[anchor] and i != anchor]
    query = torch.zeros(2, 500, 16)
    embeddings = replace(random_embeddings(2, 8, 16), index=torch.full((500,), anchor), inter_query=query)
    counts = torch.zeros(96)
    for _ in range(10):
        drawn = pairs_of(model, embeddings).positive
        counts += torch.bincount(drawn, minlength=96)
    assert counts.sum() == 10_000
    expected = 10_000 / len(mates)
    chi_square = sum((float(counts[i]) - expected) ** 2 / expected for i in mates)
    assert float(counts.sum() - counts[mates].sum()) == 0
    assert chi_square < len(mates) + 5 * math.sqrt(2 * len(mates))


def test_simsiam_loss_is_half_of_two_negative_cosines() -> None:
    model, data = learner("simsiam"), batch()
    encoder = copy.deepcopy(model.intra.encoder)
    raw = [encoder.projector(encoder.backbone(view)) for view in data.views]
    predictions = [encoder.predictor(z) for z in raw]
    expected = -0.5 * mean_cosine(predictions[0], raw[1]) - 0.5 * mean_cosine(predictions[1], raw[0])
    assert model.intra.loss(model.intra.embed(data), None).item() == pytest.approx(expected, rel=1e-5)


def test_simsiam_stops_the_gradient_of_the_target() -> None:
    model, data = learner("simsiam"), batch()
    reference = copy.deepcopy(model.intra.encoder)
    embeddings = model.intra.embed(data)
    assert not embeddings.target.requires_grad
    model.intra.loss(embeddings, None).backward()

    with torch.no_grad():
        constants = [reference.projector(reference.backbone(view)) for view in data.views]
    loss = 0
    for view, other in ((0, 1), (1, 0)):
        prediction = reference.predictor(reference.projector(reference.backbone(data.views[view])))
        loss = loss - 0.5 * torch.nn.functional.cosine_similarity(prediction, constants[other]).mean()
    loss.backward()
    for own, expected in zip(model.intra.encoder.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-3, atol=1e-6)


def test_simsiam_heads_are_the_papers() -> None:
    projector = learner("simsiam", method_layers=3).intra.encoder.projector
    kinds = [type(layer).__name__ for layer in projector]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear", "BatchNorm1d"]
    assert projector[-1].weight is None  # the last normalisation has no scale of its own


def test_synchronised_norm_reaches_the_target_of_byol() -> None:
    intra = learner("byol", norm="batch").intra
    intra.synchronise_norm()
    for encoder in (intra.encoder, intra.target_encoder):
        kinds = {type(m).__name__ for m in encoder.modules() if "BatchNorm" in type(m).__name__}
        assert kinds == {"SyncBatchNorm"}
