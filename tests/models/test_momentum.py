from __future__ import annotations

import pytest
import torch
from torch import nn

from interclr.models import momentum_copy, update_momentum_copy


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_copy_is_equal_takes_no_gradient_and_shares_nothing() -> None:
    module = network()
    clone = momentum_copy(module)
    for (name, slow), fast in zip(clone.state_dict().items(), module.state_dict().values(), strict=True):
        assert torch.equal(slow, fast), name
        assert slow.data_ptr() != fast.data_ptr(), name
    assert not any(p.requires_grad for p in clone.parameters())
    assert all(p.requires_grad for p in module.parameters())
    assert not clone(torch.randn(5, 3)).requires_grad
    clone(torch.randn(5, 3))
    assert torch.equal(module[1].running_mean, torch.zeros(4))  # the copy's statistics are its own


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999, 1.0])
def test_update_formula_over_several_steps(momentum: float) -> None:
    torch.manual_seed(0)
    module = network()
    clone = momentum_copy(module)
    expected = [p.detach().double().clone() for p in clone.parameters()]
    for _ in range(4):
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn_like(p))
            module[1].running_mean.fill_(7)
        update_momentum_copy(clone, module, momentum)
        expected = [
            momentum * e + (1 - momentum) * p.detach().double()
            for e, p in zip(expected, module.parameters(), strict=True)
        ]
    for slow, value in zip(clone.parameters(), expected, strict=True):
        torch.testing.assert_close(slow.double(), value, rtol=1e-5, atol=1e-6)
        assert not slow.requires_grad
    assert torch.equal(clone[1].running_mean, torch.zeros(4))


def test_a_copy_may_lack_parts_of_the_original() -> None:
    """BYOL's target has no predictor."""
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    clone = momentum_copy(module)
    del clone["b"]
    with torch.no_grad():
        module["a"].weight.add_(1)
    update_momentum_copy(clone, module, 0.0)
    assert torch.equal(clone["a"].weight, module["a"].weight)


def test_a_copy_follows_whichever_original_it_is_given() -> None:
    """Parameters are looked for once; loading a state and another original must still be seen."""
    module, other = network(), network()
    clone = momentum_copy(module)
    update_momentum_copy(clone, module, 0.0)
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
    update_momentum_copy(clone, module, 0.0)
    assert torch.equal(clone[0].weight, module[0].weight)
    update_momentum_copy(clone, other, 0.0)
    assert torch.equal(clone[0].weight, other[0].weight)


def test_momentum_in_a_tensor_is_the_same_momentum() -> None:
    fast = network()
    slow = [momentum_copy(fast) for _ in range(2)]
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.add_(1.0)
    update_momentum_copy(slow[0], fast, 0.9)
    update_momentum_copy(slow[1], fast, torch.tensor(0.9))
    for one, other in zip(slow[0].parameters(), slow[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)
