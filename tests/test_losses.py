from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from interclr import losses
from interclr.losses import arc_margin, byol_mse, cosines, margin_nce, soft_labels
from interclr.types import Pairs

cosine = st.floats(-1, 1, width=32)


def formula(positive, negative, temperature, margin, kind):
    """MarginNCE as it is written, one anchor at a time, in extended precision so that nothing overflows."""
    result = []
    for cos, row in zip(positive, negative, strict=True):
        if kind == "cosine":
            cos = cos - margin
        else:
            angle = math.acos(cos) + margin
            if angle > math.pi:
                cos = -1 + cos - math.cos(math.pi - margin)
            elif angle < 0:
                cos = 1 + cos - math.cos(-margin)
            else:
                cos = math.cos(angle)
        up = np.exp(np.longdouble(cos) / temperature)
        down = sum(np.exp(np.longdouble(c) / temperature) for c in row)
        result.append(float(-np.log(up / (up + down))))
    return np.array(result)


@settings(max_examples=150, deadline=None)
@given(
    positive=st.lists(cosine, min_size=3, max_size=3),
    negative=st.integers(1, 6).flatmap(
        lambda k: st.lists(st.lists(cosine, min_size=k, max_size=k), min_size=3, max_size=3)
    ),
    temperature=st.floats(0.01, 10),
    margin=st.floats(-1.5, 1.5),
    kind=st.sampled_from(["cosine", "arc"]),
)
def test_margin_nce_is_the_formula(positive, negative, temperature, margin, kind):
    args = torch.tensor(positive, dtype=torch.float64), torch.tensor(negative, dtype=torch.float64)
    expected = formula(positive, negative, temperature, margin, kind)
    # where sin θ < 1e-6 the arc margin takes it as 1e-6
    tolerance = 1e-9 if kind == "cosine" else 2e-6 / temperature
    for reduction, reduce in [("none", lambda x: x), ("mean", np.mean), ("sum", np.sum)]:
        loss = margin_nce(*args, temperature, margin, kind, reduction)
        np.testing.assert_allclose(loss.numpy(), reduce(expected), rtol=1e-9, atol=3 * tolerance)


@pytest.mark.parametrize("kind", ["cosine", "arc"])
@pytest.mark.parametrize("margin", [-0.5, 0.0, 0.3])
def test_margin_nce_gradient_is_the_numerical_one(kind, margin):
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(6, generator=generator, dtype=torch.float64) * 1.8 - 0.9
    negative = torch.rand(6, 5, generator=generator, dtype=torch.float64) * 1.8 - 0.9
    args = positive.requires_grad_(), negative.requires_grad_()
    assert torch.autograd.gradcheck(lambda p, n: margin_nce(p, n, 0.2, margin, kind, "none"), args)


def test_absent_negatives_equal_dropped_ones():
    positive = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    full = torch.tensor([[0.1, -math.inf, 0.5], [-math.inf] * 3, [0.2, 0.4, -math.inf]], requires_grad=True)
    loss = margin_nce(positive, full, 0.1, -0.5, reduction="none")
    for row in range(3):
        kept = full[row][full[row].isfinite()][None]
        assert torch.allclose(loss[row], margin_nce(positive[row : row + 1], kept, 0.1, -0.5))
    assert loss[1] == 0
    loss.sum().backward()
    assert positive.grad.isfinite().all()
    assert (full.grad[full.detach().isinf()] == 0).all()
    assert (full.grad[full.detach().isfinite()] > 0).all()


@pytest.mark.parametrize("temperature", [1e-8, 1e-4, 1e4, 1e8])
@pytest.mark.parametrize("kind", ["cosine", "arc"])
def test_extreme_temperatures_and_cosines_stay_finite(temperature, kind):
    positive = torch.tensor([-1.0, 1.0, 1.0000001, -1.0000001, 0.0], requires_grad=True)
    negative = torch.tensor([[1.0, -1.0]]).repeat(5, 1).requires_grad_()
    for margin in (-0.5, 0.0, 0.5):
        loss = margin_nce(positive, negative, temperature, margin, kind)
        assert loss.isfinite()
        for gradient in torch.autograd.grad(loss, [positive, negative]):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("margin", [-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0])
def test_arc_margin_is_continuous_and_increasing(margin):
    cos = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    step = arc_margin(cos, margin).diff()
    assert (step >= -1e-6).all()
    assert step.max() < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    positive, negative = torch.rand(4).to(dtype), torch.rand(4, 8).to(dtype)
    loss = margin_nce(positive, negative, 0.07)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, margin_nce(positive.float(), negative.float(), 0.07))


def test_refuses_what_cannot_be():
    args = torch.zeros(2), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="temperature"):
        margin_nce(*args, 0.0)
    with pytest.raises(ValueError, match="kind"):
        margin_nce(*args, 1.0, kind="angle")
    with pytest.raises(ValueError, match="reduction"):
        margin_nce(*args, 1.0, reduction="average")
    with pytest.raises(ValueError, match="radians"):
        margin_nce(*args, 1.0, margin=4.0, kind="arc")


def test_byol_mse_is_the_squared_distance_of_normalised_vectors():
    torch.manual_seed(0)
    prediction, target = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    expected = (F.normalize(prediction, dim=-1) - F.normalize(target, dim=-1)).square().sum(-1).mean()
    assert torch.allclose(byol_mse(prediction, target), expected)
    assert torch.allclose(byol_mse(F.normalize(prediction, dim=-1), target), expected)
    assert byol_mse(prediction.half(), target.half()).dtype == torch.float32


@pytest.mark.parametrize("dense_up_to", [0, 64])  # gathered rows, product with the whole bank
@pytest.mark.parametrize("workspace", [1, 1000, 2**28])
def test_cosines_and_gradient_equal_naive_autograd(dense_up_to, workspace, monkeypatch):
    monkeypatch.setattr(losses, "_DENSE_UP_TO", dense_up_to)
    torch.manual_seed(0)
    bank = F.normalize(torch.randn(30, 6, dtype=torch.float64), dim=1)
    query = F.normalize(torch.randn(7, 6, dtype=torch.float64), dim=1).requires_grad_()
    pairs = Pairs(torch.randint(30, (7,)), torch.randint(-1, 30, (7, 9)))
    absent = pairs.negative < 0
    assert absent.any()

    positive, negative = cosines(query, bank, pairs, workspace)
    naive_positive = (query * bank[pairs.positive]).sum(1)
    naive_negative = torch.einsum("ad,akd->ak", query, bank[pairs.negative]).masked_fill(absent, -math.inf)
    assert torch.allclose(positive, naive_positive)
    assert torch.allclose(negative, naive_negative)

    (gradient,) = torch.autograd.grad(margin_nce(positive, negative, 0.1, -0.5), query)
    (naive,) = torch.autograd.grad(margin_nce(naive_positive, naive_negative, 0.1, -0.5), query)
    assert torch.allclose(gradient, naive)

    present = Pairs(pairs.positive, pairs.negative.clamp_min(0))
    assert torch.autograd.gradcheck(lambda q: cosines(q, bank, present, workspace), query)


@pytest.mark.parametrize("dense_up_to", [0, 64])
def test_cosines_under_autocast_and_from_half_precision(dense_up_to, monkeypatch):
    monkeypatch.setattr(losses, "_DENSE_UP_TO", dense_up_to)
    torch.manual_seed(0)
    bank, query = F.normalize(torch.randn(30, 6), dim=1), F.normalize(torch.randn(7, 6), dim=1)
    pairs = Pairs(torch.randint(30, (7,)), torch.randint(30, (7, 9)))
    expected = cosines(query, bank, pairs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        query.requires_grad_()
        positive, negative = cosines(query, bank, pairs)
        negative.sum().backward()
    assert torch.allclose(negative, expected[1], atol=1e-6)
    assert torch.allclose(query.grad, bank[pairs.negative].sum(1), atol=1e-5)

    bank = bank.bfloat16()
    expected = cosines(query.detach(), bank.float(), pairs)[1]
    for workspace in (1, 400, 2**28):  # the first two are too small for a copy of the bank in float32
        query.grad = None
        positive, negative = cosines(query, bank, pairs, workspace)
        assert positive.dtype == negative.dtype == torch.float32
        assert torch.allclose(negative, expected, atol=1e-6)
        negative.sum().backward()
        assert torch.allclose(query.grad, bank.float()[pairs.negative].sum(1), atol=1e-5)

    half = query.detach().half().requires_grad_()
    cosines(half, bank, pairs)[1].sum().backward()
    assert half.grad.dtype == torch.float16


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_by_the_caller_the_gradient_is_the_same(backend):
    torch.manual_seed(0)
    bank, query = F.normalize(torch.randn(30, 6), dim=1), F.normalize(torch.randn(7, 6), dim=1)
    pairs = Pairs(torch.randint(30, (7,)), torch.randint(-1, 30, (7, 9)))

    def loss(query):
        return margin_nce(*cosines(query, bank, pairs), 0.2, -0.5)

    gradients = []
    for function in (loss, torch.compile(loss, backend=backend)):
        leaf = query.clone().requires_grad_()
        function(leaf).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_a_temperature_may_be_learnt():
    generator = torch.Generator().manual_seed(0)
    positive, negative = torch.rand(5, generator=generator), torch.rand(5, 7, generator=generator)
    learnt = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    loss = margin_nce(positive.double(), negative.double(), learnt)
    assert loss.item() == pytest.approx(margin_nce(positive.double(), negative.double(), 0.2).item())
    loss.backward()
    step = 1e-6
    around = [margin_nce(positive.double(), negative.double(), 0.2 + d).item() for d in (step, -step)]
    assert learnt.grad.item() == pytest.approx((around[0] - around[1]) / (2 * step), rel=1e-5)
    with pytest.raises(ValueError, match="positive"):
        margin_nce(positive, negative, torch.tensor(-1.0))


def test_soft_labels_are_the_cross_entropy_of_two_divisions_over_the_clusters() -> None:
    generator = torch.Generator().manual_seed(3)
    query, target = (F.normalize(torch.randn(6, 8, generator=generator), dim=1) for _ in range(2))
    centroids = 0.3 * torch.randn(5, 8, generator=generator)  # means of unit vectors are shorter than they are
    query, target = query.requires_grad_(), target.requires_grad_()
    loss = soft_labels(query, target, centroids, 0.2, 0.07)
    expected = 0.0
    for q, t in zip(query.detach().double().numpy(), target.detach().double().numpy(), strict=True):
        length = np.linalg.norm(centroids.double().numpy(), axis=1)
        ours, theirs = (centroids.double().numpy() @ each / length for each in (q, t))
        p, found = np.exp(theirs / 0.07), np.exp(ours / 0.2)
        expected -= float((p / p.sum() * np.log(found / found.sum())).sum()) / len(query)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert target.grad is None
    assert query.grad is not None
    assert query.grad.abs().max() > 0
    halves = soft_labels(query.detach().bfloat16(), target.detach().bfloat16(), centroids, 0.2, 0.07)
    assert (halves.dtype, halves.item()) == (torch.float32, pytest.approx(expected, rel=0.02))
    for wrong in ((0.0, 0.05), (0.1, -1.0)):
        with pytest.raises(ValueError, match="positive"):
            soft_labels(query, target, centroids, *wrong)


def test_soft_labels_are_least_where_the_query_is_the_target() -> None:
    """At one temperature; a target that is surer asks the query to be nearer to its clusters still."""
    centroids = torch.eye(3)
    target = F.normalize(torch.tensor([[1.0, 0.4, 0.1]]), dim=1)
    at_target = soft_labels(target, target, centroids, 0.1, 0.1)
    others = F.normalize(target + 0.2 * torch.randn(200, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    assert all(soft_labels(other[None], target, centroids, 0.1, 0.1) > at_target for other in others)
    nearer = F.normalize(torch.tensor([[1.0, 0.3, 0.0]]), dim=1)
    assert soft_labels(nearer, target, centroids, 0.1, 0.05) < soft_labels(target, target, centroids, 0.1, 0.05)
