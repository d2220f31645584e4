"""NPID against a loop over its equation, and what it does to the bank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_learner import IMAGES, batch, images_of, learner, pixels, plan, random_embeddings, train_step
from torch import Tensor

from interclr.bank import MemoryBank


def by_hand(query: Tensor, index: Tensor, bank: Tensor, drawn: Tensor, temperature: float, margin: float) -> float:
    q, features = query.detach().double().numpy(), bank.double().numpy()
    losses = []
    for row, image in zip(q, index.tolist(), strict=True):
        positive = np.exp((row @ features[image] - margin) / temperature)
        others = sum(np.exp(row @ features[other] / temperature) for other in drawn.tolist() if other != image)
        losses.append(-np.log(positive / (positive + others)))
    return float(np.mean(losses))


def draw(seed: int, size: int, count: int) -> Tensor:
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("margin", [0.0, 0.3, -0.5])
def test_loss_by_hand_with_the_own_entry_left_out(margin: float) -> None:
    model = learner("npidv2", method_negatives=200, margin=margin)  # of 96: own entries are among the drawn
    intra, bank = model.intra, model.bank
    embeddings = random_embeddings(1, 8, 16)
    drawn = draw(4, IMAGES, 200)
    assert any(image in drawn.tolist() for image in embeddings.index.tolist())
    intra.generator = torch.Generator().manual_seed(4)
    loss = intra.loss(embeddings, bank)
    expected = by_hand(embeddings.query[0], embeddings.index, bank.features, drawn, 0.1, margin)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert embeddings.query.grad.isfinite().all()


def test_every_entry_drawn_is_the_own_one() -> None:
    intra = learner("npidv2").intra
    bank = MemoryBank(1, 16, 0)
    embeddings = random_embeddings(1, 1, 16)
    embeddings.index.zero_()
    loss = intra.loss(embeddings, bank)
    loss.backward()
    assert loss.item() == 0
    assert embeddings.query.grad.isfinite().all()


def test_one_view_and_its_own_encoder_in_the_bank() -> None:
    intra = learner("npidv2").intra
    data = batch()
    embeddings = intra.embed(data)
    torch.testing.assert_close(embeddings.query[0], intra.encoder(data.views[0]).projection)
    assert torch.equal(embeddings.feature, embeddings.query[0])
    assert not embeddings.feature.requires_grad
    assert intra.views_needed == 1
    assert intra.bank_encoder() is intra.encoder


@pytest.mark.parametrize("inter", [None, {}])
def test_steps_read_the_bank_from_before_and_write_with_momentum_one_half(inter: dict[str, object] | None) -> None:
    model, data = learner("npidv2", inter), pixels()
    seen = {}
    commit, schedule = model.commit, plan(4)
    model.commit = lambda embeddings, *rest: seen.update(e=embeddings) or commit(embeddings, *rest)  # type: ignore[method-assign]
    step = train_step(model, schedule)
    for number in range(4):
        before = model.bank.features.clone()
        terms = step(images_of(number, 8, data), number)
        query, index = seen["e"].query[0], seen["e"].index
        drawn = draw(schedule.seed_of(number, 2), IMAGES, 24)
        assert terms["intra_loss"].item() == pytest.approx(by_hand(query, index, before, drawn, 0.1, 0.0), rel=1e-5)
        mean_cosine = float((query.detach() * before[index]).sum(1).mean())
        assert terms["alignment"].item() == pytest.approx(2 - 2 * mean_cosine, rel=1e-4)
        expected = before.double().numpy()
        for row, image in zip(query.detach().double().numpy(), index.tolist(), strict=True):
            mixed = 0.5 * expected[image] + 0.5 * row
            expected[image] = mixed / np.linalg.norm(mixed)
        np.testing.assert_allclose(model.bank.features.numpy(), expected, atol=1e-6)


def test_plain_npid_keeps_a_bank_of_features_only() -> None:
    model = learner("npidv2")
    assert model.bank.clusters == 0
    assert model.bank.momentum == 0.5
    assert model.labels is None
    assert model.sampler is None
    assert torch.allclose(model.bank.features.norm(dim=1), torch.ones(IMAGES))


def test_a_separate_head_is_refused() -> None:
    with pytest.raises(ValueError, match="shared"):
        learner("npidv2", {"head": "separate"})
