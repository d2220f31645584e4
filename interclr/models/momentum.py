"""The slowly moving copy of an encoder that MoCo calls key and BYOL calls target, and which sees soft targets' view."""

from __future__ import annotations

import copy
import weakref
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
    target, source = _parameters_of_both(clone, module)
    if isinstance(momentum, float):
        torch._foreach_lerp_(target, source, 1 - momentum)
        return
    step = torch._foreach_sub(source, target)  # the fused lerp takes no 0-d tensor as its weight
    torch._foreach_mul_(step, 1 - momentum)
    torch._foreach_add_(target, step)


@torch.no_grad()
def update_seeing_copy(clone: nn.Module, module: nn.Module, momentum: float) -> None:
    """The same, and of running statistics: for a copy without training passes that it could have some of its own by."""
    update_momentum_copy(clone, module, momentum)
    if statistics := running_statistics(clone):
        torch._foreach_lerp_(statistics, running_statistics(module), 1 - momentum)


def running_statistics(module: nn.Module) -> list[Tensor]:
    """BatchNorm's, which are what a network evaluates by. Looked for every time: moving a network makes new ones."""
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


def _parameters_of_both(clone: nn.Module, module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of the copy and those they follow, found once: looking for them takes longer than the update.

    They stay the same objects when a model moves to a device or loads a state.
    """
    known = _known.get(clone)
    if known is None or known[0]() is not module:
        slow, fast = dict(clone.named_parameters()), dict(module.named_parameters())
        known = _known[clone] = (weakref.ref(module), list(slow.values()), [fast[name] for name in slow])
    return known[1], known[2]


_known: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], list[Tensor], list[Tensor]]] = (
    weakref.WeakKeyDictionary()
)
