"""SimCLR's NT-Xent against loops over 2B views."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_learner import batch, learner, random_embeddings


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_nt_xent_by_hand(temperature: float) -> None:
    model, data = learner("simclr", method_temperature=temperature), batch(6)
    embeddings = model.intra.embed(data)
    z = embeddings.query.detach().double().flatten(0, 1).numpy()  # views 0..5 are the first, 6..11 the second
    losses = []
    for i in range(12):
        twin = (i + 6) % 12
        terms = [np.exp(z[i] @ z[j] / temperature) for j in range(12) if j != i]
        assert len(terms) == 1 + 2 * 6 - 2
        losses.append(-np.log(np.exp(z[i] @ z[twin] / temperature) / sum(terms)))
    assert model.intra.loss(embeddings, None).item() == pytest.approx(float(np.mean(losses)), rel=1e-5)


def test_gradient_flows_through_positives_and_negatives_on_both_sides() -> None:
    intra = learner("simclr", method_temperature=0.5).intra
    own = random_embeddings(2, 6, 16)
    raw = own.query.detach().double().requires_grad_()

    def plain(z: torch.Tensor) -> torch.Tensor:
        flat = z.flatten(0, 1)
        logits = (flat @ flat.T / 0.5).masked_fill(torch.eye(12, dtype=torch.bool), -torch.inf)
        return torch.nn.functional.cross_entropy(logits, torch.arange(12).roll(6))

    plain(raw).backward()
    query = own.query.detach().requires_grad_()
    intra.loss(replace(own, query=query, target=query.flip(0)), None).backward()
    torch.testing.assert_close(query.grad.double(), raw.grad, rtol=1e-4, atol=1e-6)


def test_another_copy_of_the_same_image_is_no_negative() -> None:
    intra = learner("simclr").intra
    embeddings = random_embeddings(2, 4, 16)
    twice = replace(embeddings, index=torch.tensor([3, 3, 8, 9]))
    z, images = embeddings.query.detach().double().flatten(0, 1).numpy(), [3, 3, 8, 9] * 2
    target = embeddings.target.double().flatten(0, 1).numpy()
    losses = []
    for i in range(8):
        positive = np.exp(z[i] @ target[i] / 0.2)
        others = sum(np.exp(z[i] @ z[j] / 0.2) for j in range(8) if images[j] != images[i])
        losses.append(-np.log(positive / (positive + others)))
    assert intra.loss(twice, None).item() == pytest.approx(float(np.mean(losses)), rel=1e-5)


def test_batch_norm_sees_both_views_together() -> None:
    intra, data = learner("simclr", norm="batch").intra, batch()
    expected = intra.encoder(torch.cat(data.views)).projection.view(2, 8, 16)
    embeddings = intra.embed(data)
    torch.testing.assert_close(embeddings.query, expected)
    torch.testing.assert_close(embeddings.target, expected.flip(0))
    mean = expected.mean(0)
    torch.testing.assert_close(embeddings.feature, mean / mean.norm(dim=1, keepdim=True))
