"""The slowly moving copy of an encoder that MoCo calls key and BYOL calls target."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def momentum_copy(module: M) -> M:
    """A copy that takes no gradient. Its BatchNorm buffers are its own: they follow its own forward passes."""
    clone = copy.deepcopy(module)
    for parameter in clone.parameters():
        parameter.requires_grad_(False)
    return clone


@torch.no_grad()
def update_momentum_copy(clone: nn.Module, module: nn.Module, momentum: float | Tensor) -> None:
    """clone ← momentum·clone + (1 − momentum)·module, all parameters in fused calls; buffers are left alone."""
    slow = dict(clone.named_parameters())
    fast = {name: parameter for name, parameter in module.named_parameters() if name in slow}
    target: list[Tensor] = list(slow.values())
    source: list[Tensor] = [fast[name] for name in slow]
    if isinstance(momentum, float):
        torch._foreach_lerp_(target, source, 1 - momentum)
        return
    step = torch._foreach_sub(source, target)  # the fused lerp takes no 0-d tensor as its weight
    torch._foreach_mul_(step, 1 - momentum)
    torch._foreach_add_(target, step)
