"""MoCo against loops over its equations: InfoNCE, the queue, the momentum encoder, the shuffle."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_learner import batch, images_of, learner, pairs_of, pixels, plan, random_embeddings, train_step
from torch import Tensor

from interclr.intra import Margin
from interclr.models import SplitBatchNorm
from interclr.models.split_norm import split_batch_norm


def info_nce(query: Tensor, key: Tensor, queue: Tensor, temperature: float, margin: float = 0.0) -> float:
    """Mean over directions and images of −log softmax, one at a time in float64."""
    q, k, negatives = (tensor.detach().double().numpy() for tensor in (query, key, queue))
    losses = []
    for direction in range(q.shape[0]):
        for image in range(q.shape[1]):
            positive = (q[direction, image] @ k[direction, image] - margin) / temperature
            others = [q[direction, image] @ entry / temperature for entry in negatives]
            losses.append(-np.log(np.exp(positive) / (np.exp(positive) + sum(np.exp(o) for o in others))))
    return float(np.mean(losses))


@pytest.mark.parametrize("symmetric", [False, True])
def test_loss_is_info_nce_over_the_queue(symmetric: bool) -> None:
    intra = learner("mocov2", method_symmetric=symmetric, method_temperature=0.3).intra
    embeddings = intra.embed(batch())
    assert embeddings.query.shape == (1 + symmetric, 8, 16)
    expected = info_nce(embeddings.query, embeddings.target, intra.queue, 0.3)
    assert intra.loss(embeddings, None).item() == pytest.approx(expected, rel=1e-5)
    intra.margin = Margin(0.2)
    expected = info_nce(embeddings.query, embeddings.target, intra.queue, 0.3, margin=0.2)
    assert intra.loss(embeddings, None).item() == pytest.approx(expected, rel=1e-5)


def test_symmetric_keys_are_those_of_the_other_view() -> None:
    intra = learner("mocov2", method_symmetric=True).intra
    data = batch()
    embeddings = intra.embed(data)
    for direction in range(2):
        torch.testing.assert_close(embeddings.query[direction], intra.encoder(data.views[direction]).projection)
        torch.testing.assert_close(
            embeddings.target[direction], intra.key_encoder(data.views[1 - direction]).projection
        )


@pytest.mark.parametrize("queue", [40, 7, 8])
@pytest.mark.parametrize("directions", [1, 2])
def test_queue_is_first_in_first_out(queue: int, directions: int) -> None:
    intra = learner("mocov2", method_queue=queue).intra
    expected = deque((row.numpy().copy() for row in intra.queue), maxlen=queue)
    for turn, rows in enumerate([8, 8, 3, 20, 8, 1, 8, 13]):  # 20 exceeds some queues; the others wrap around
        embeddings = random_embeddings(directions, rows, 16, seed=10 * turn)
        intra.commit(embeddings)
        for direction in embeddings.target:
            expected.extend(key.numpy() for key in direction)
        oldest_first = intra.queue.roll(-int(intra.queue_position), 0)
        np.testing.assert_array_equal(oldest_first.numpy(), np.stack(expected))


def test_keys_and_queue_carry_no_gradient() -> None:
    intra = learner("mocov2").intra
    embeddings = intra.embed(batch())
    assert embeddings.query.requires_grad
    assert not embeddings.target.requires_grad
    assert not embeddings.feature.requires_grad
    intra.loss(embeddings, None).backward()
    assert all(p.grad is None and not p.requires_grad for p in intra.key_encoder.parameters())
    assert intra.queue.grad is None
    assert all(p.grad is not None for p in intra.encoder.parameters())


def test_key_encoder_follows_once_per_optimiser_step() -> None:
    model = learner("mocov2", method_momentum=0.9)
    intra, data = model.intra, pixels()
    step = train_step(model, plan(6, accumulate=2))
    for number in range(6):
        before = [p.detach().double() for p in intra.key_encoder.parameters()]
        step(images_of(number, 8, data), number)
        after = list(intra.key_encoder.parameters())
        encoder = [p.detach().double() for p in intra.encoder.parameters()]
        for old, new, fast in zip(before, after, encoder, strict=True):
            expected = 0.9 * old + 0.1 * fast if number % 2 else old
            torch.testing.assert_close(new.double(), expected, rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(k, q) for k, q in zip(after, intra.encoder.parameters(), strict=True))


def test_key_of_an_image_comes_back_to_it_after_the_shuffle() -> None:
    intra = learner("mocov2").intra  # group norm: a key depends on its image alone
    data = batch(9)
    embeddings = intra.embed(data)
    torch.testing.assert_close(embeddings.target[0], intra.key_encoder(data.views[1]).projection)
    torch.testing.assert_close(embeddings.feature, embeddings.target[0])


def test_one_process_splits_the_batch_norm_of_shuffled_keys() -> None:
    intra = learner("mocov2", norm="batch").intra
    assert not any(isinstance(m, SplitBatchNorm) for m in intra.encoder.modules())
    split = [m for m in intra.key_encoder.modules() if isinstance(m, SplitBatchNorm)]
    assert split
    assert {m.splits for m in split} == {4}
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in intra.key_encoder.modules())

    data, plain = batch(16), copy.deepcopy(intra.encoder)  # the key encoder starts as a copy of it
    order = torch.rand((1, 16), generator=torch.Generator().manual_seed(5)).argsort(1)
    expected = torch.empty(16, 16)
    for part in order.view(4, 4):
        expected[part] = plain(data.views[1][part]).projection.detach()
    intra.generator = torch.Generator().manual_seed(5)
    torch.testing.assert_close(intra.embed(data).target[0], expected, rtol=1e-4, atol=1e-5)
    whole = plain(data.views[1]).projection
    assert (expected - whole).abs().max() > 1e-2  # so the test can tell


def test_one_split_is_plain_batch_norm() -> None:
    intra = learner("mocov2", norm="batch", method_key_splits=1).intra
    assert split_batch_norm(intra.key_encoder, 1) is intra.key_encoder
    assert not any(isinstance(m, SplitBatchNorm) for m in intra.key_encoder.modules())


def test_separate_head_serves_the_inter_branch_alone() -> None:
    model = learner("mocov2", {"head": "separate"})
    intra, data = model.intra, batch()
    embeddings = intra.embed(data)
    assert not torch.allclose(embeddings.query, embeddings.inter_query)
    torch.testing.assert_close(embeddings.feature, intra.key_encoder(data.views[1]).inter_projection)
    intra.loss(embeddings, model.bank).backward(retain_graph=True)
    assert all(p.grad is None for p in intra.encoder.inter_projector.parameters())
    assert all(p.grad is not None for p in intra.encoder.projector.parameters())
    intra.zero_grad()
    intra.inter_loss(embeddings, pairs_of(model, embeddings), model.bank).backward()
    assert all(p.grad is None for p in intra.encoder.projector.parameters())
    assert all(p.grad is not None for p in intra.encoder.inter_projector.parameters())
    # The queue takes the keys of the intra head, the bank those of the inter head.
    intra.commit(embeddings)
    torch.testing.assert_close(intra.queue[:8], embeddings.target[0])


def test_shared_head_is_one_tensor() -> None:
    embeddings = learner("mocov2").intra.embed(batch())
    torch.testing.assert_close(embeddings.query, embeddings.inter_query, rtol=0, atol=0)
    assert torch.equal(replace(embeddings).feature, embeddings.target[0])
