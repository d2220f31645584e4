from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from interclr.engine.step import Plan
from interclr.optim import (
    LARS,
    AdamWConfig,
    LARSConfig,
    SGDConfig,
    cosine,
    learning_rate,
    set_learning_rate,
    weights_and_others,
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 5)).double()


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lars_against_its_formula_in_numpy(decay: float) -> None:
    """Five steps: kernels adapt and decay, biases and scales do neither; a zero gradient and a zero weight occur."""
    module, momentum, trust = network(), 0.9, 0.02
    with torch.no_grad():
        module[3].weight.zero_()
    optimiser = LARSConfig(momentum=momentum, weight_decay=decay, trust=trust).build(module, 1.0)
    parameters = list(module.parameters())
    weights = [p.detach().numpy().copy() for p in parameters]
    velocity = [np.zeros_like(w) for w in weights]
    random = np.random.default_rng(0)
    for step in range(5):
        rate = 0.3 / (step + 1)
        set_learning_rate(optimiser, rate)
        for i, parameter in enumerate(parameters):
            zero = step == 2 or (step == 3 and i == 0)
            gradient = np.zeros_like(weights[i]) if zero else random.normal(size=weights[i].shape)
            parameter.grad = torch.from_numpy(gradient.copy())
            if weights[i].ndim > 1:
                gradient = gradient + decay * weights[i]
                sizes = np.sqrt((weights[i] ** 2).sum()), np.sqrt((gradient**2).sum())
                if min(sizes) > 0:
                    gradient = gradient * trust * sizes[0] / sizes[1]
            velocity[i] = momentum * velocity[i] + gradient
            weights[i] = weights[i] - rate * velocity[i]
        given = [p.grad.clone() for p in parameters]
        optimiser.step()
        for parameter, expected, gradient in zip(parameters, weights, given, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-12, atol=1e-14)
            assert torch.equal(parameter.grad, gradient)  # the caller's gradients are left alone


def test_lars_leaves_parameters_without_gradient_alone_and_its_state_can_be_saved() -> None:
    first, second = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimiser = LARS([first, second], lr=0.1)
    first.grad = torch.full((2, 2), 0.5)
    optimiser.step()
    assert torch.equal(second, torch.ones(2, 2))
    assert not torch.equal(first, torch.ones(2, 2))
    copies = [nn.Parameter(p.detach().clone()) for p in (first, second)]
    other = LARS(copies, lr=0.1)
    other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    for p in (first, copies[0]):
        p.grad = torch.full((2, 2), -0.25)
    optimiser.step()
    other.step()
    assert torch.equal(first, copies[0])


def test_matrices_and_kernels_decay_biases_and_scales_do_not() -> None:
    module = network()
    module[3].bias.requires_grad_(False)
    decayed, plain = weights_and_others(module)
    assert {id(p) for p in decayed} == {id(module[0].weight), id(module[3].weight)}
    assert {id(p) for p in plain} == {id(module[0].bias), id(module[1].weight), id(module[1].bias)}
    for config in (LARSConfig(weight_decay=0.3), AdamWConfig(weight_decay=0.3)):
        groups = config.build(module, 0.1).param_groups
        assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
        assert [len(group["params"]) for group in groups] == [2, 3]
    sgd = SGDConfig(weight_decay=0.3).build(module, 0.1)  # as MoCo and NPID: every parameter
    assert [group["weight_decay"] for group in sgd.param_groups] == [0.3]
    assert len(sgd.param_groups[0]["params"]) == 5


def test_learning_rate_warms_up_linearly_and_ends_at_zero() -> None:
    rates = [learning_rate(step, 100, 10, 2.0) for step in range(101)]
    np.testing.assert_allclose(rates[:10], [2.0 * (step + 1) / 10 for step in range(10)])
    assert rates[10] == 2.0
    np.testing.assert_allclose(rates[10:], [1 + math.cos(math.pi * i / 90) for i in range(91)], atol=1e-12)
    assert rates[100] == pytest.approx(0, abs=1e-12)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert learning_rate(0, 100, 0, 2.0) == 2.0
    assert learning_rate(3, 5, 10, 2.0) == pytest.approx(0.8)  # shorter than its warm-up
    assert math.isfinite(learning_rate(5, 5, 5, 2.0))


def test_cosine_reaches_both_ends_and_stays_there() -> None:
    assert cosine(0, 10, 0.99, 1.0) == pytest.approx(0.99)
    assert cosine(10, 10, 0.99, 1.0) == 1.0
    assert cosine(11, 10, 0.99, 1.0) == 1.0
    assert cosine(5, 10, 1.0) == pytest.approx(0.5)
    assert math.isfinite(cosine(0, 0, 1.0))


def test_rate_and_random_numbers_of_a_run_are_functions_of_the_step() -> None:
    plan = Plan(epochs=4, steps_per_epoch=5, accumulate=2, warmup_epochs=1, peak_rate=1.0, seed=3)
    assert (plan.total, plan.updates) == (20, 10)
    rates = [plan.rate(step) for step in range(20)]
    assert rates[::2] == rates[1::2]  # one rate for the micro-batches of one optimiser step
    assert rates[0] == 0.5
    assert rates[2] == 1.0
    assert [plan.rate(step) for step in range(7, 20)] == rates[7:]
    seeds = {plan.seed_of(step, stream) for step in range(20) for stream in (1, 2, 3)}
    assert len(seeds) == 60
    assert [plan.epoch(step) for step in (0, 4, 5, 19)] == [0, 0, 1, 3]


def test_the_largest_seed_still_seeds_generators() -> None:
    plan = Plan(1, 1, 1, 0, 1.0, seed=2**32 - 1)
    torch.Generator().manual_seed(plan.seed_of(10**9, 3))


@pytest.mark.parametrize("name", ["sgd", "lars", "adamw"])
def test_a_rate_in_a_tensor_is_the_same_rate(name: str) -> None:
    """A captured step cannot be handed numbers: it reads them from tensors."""
    networks = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    kind = {"sgd": SGDConfig, "lars": LARSConfig, "adamw": AdamWConfig}[name]
    optimisers = [kind().build(network, 0.1) for network in networks]
    data = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    for step in range(4):
        rate = 0.1 / (step + 1)
        for network, optimiser, given in zip(networks, optimisers, (rate, torch.tensor(rate)), strict=True):
            network(data).square().sum().backward()
            set_learning_rate(optimiser, given)
            optimiser.step()
            optimiser.zero_grad()
    for one, other in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)
