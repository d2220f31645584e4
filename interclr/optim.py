"""Optimisers, their parameter groups, and schedules as functions of the step (so resume needs only the step)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from interclr.types import Config

Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0)]
Unit = Annotated[float, Field(ge=0, lt=1)]
REFERENCE_BATCH = 256


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017) over SGD with momentum.

    For a group with ``adapt``: g ← g + wd·w;  g ← η·‖w‖/‖g‖·g (1 where a norm is 0);  v ← μ·v + g;  w ← w − lr·v.
    Groups without ``adapt`` (biases and normalisation) take plain SGD with momentum. No host synchronisation.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": True}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "LARS takes no closure"
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            gradients: list[Tensor] = [p.grad.clone() for p in weights]
            if group["weight_decay"] > 0:
                torch._foreach_add_(gradients, weights, alpha=group["weight_decay"])
            if group["adapt"]:
                weight_norms = torch.stack(torch._foreach_norm(weights))
                gradient_norms = torch.stack(torch._foreach_norm(gradients))
                ratio = group["trust"] * weight_norms / gradient_norms
                usable = (weight_norms > 0) & (gradient_norms > 0)
                torch._foreach_mul_(gradients, list(ratio.masked_fill(~usable, 1.0).unbind()))
            for p in weights:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [self.state[p]["momentum_buffer"] for p in weights]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, gradients)
            if isinstance(group["lr"], Tensor):  # a captured step cannot be handed a number
                torch._foreach_sub_(weights, torch._foreach_mul(buffers, group["lr"]))
            else:
                torch._foreach_add_(weights, buffers, alpha=-group["lr"])


class SGDConfig(Config):
    """``base_lr`` is the rate at 256 images; the rate used is base_lr · effective batch / 256."""

    name: Literal["sgd"] = "sgd"
    base_lr: Rate = 0.03
    momentum: Unit = 0.9
    weight_decay: Decay = 1e-4
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=true needs a momentum above 0")
        return self

    def build(self, module: nn.Module, lr: float) -> torch.optim.Optimizer:
        # The methods that use SGD decay every parameter, as MoCo and NPID do.
        return torch.optim.SGD(
            [p for p in module.parameters() if p.requires_grad],
            lr=lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            fused=True,
        )


class LARSConfig(Config):
    name: Literal["lars"] = "lars"
    base_lr: Rate = 0.3
    momentum: Unit = 0.9
    weight_decay: Decay = 1e-6
    trust: Rate = 0.001

    def build(self, module: nn.Module, lr: float) -> torch.optim.Optimizer:
        decayed, plain = weights_and_others(module)
        groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0, "adapt": False}]
        return LARS(groups, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay, trust=self.trust)


class AdamWConfig(Config):
    name: Literal["adamw"] = "adamw"
    base_lr: Rate = 1e-3
    weight_decay: Decay = 0.05
    betas: tuple[Unit, Unit] = (0.9, 0.999)

    def build(self, module: nn.Module, lr: float) -> torch.optim.Optimizer:
        decayed, plain = weights_and_others(module)
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        on_gpu = decayed[0].is_cuda
        return torch.optim.AdamW(
            groups, lr=lr, betas=self.betas, weight_decay=self.weight_decay, fused=True, capturable=on_gpu
        )


OptimiserConfig = Annotated[SGDConfig | LARSConfig | AdamWConfig, Field(discriminator="name")]


def weights_and_others(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split into matrices and kernels, which decay, and biases and normalisation scales, which do not."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    return [p for p in trainable if p.ndim > 1], [p for p in trainable if p.ndim <= 1]


def cosine(step: int, total: int, start: float, end: float = 0.0) -> float:
    """Half a cosine from ``start`` at step 0 to ``end`` at step ``total``."""
    progress = min(max(step / max(total, 1), 0.0), 1.0)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))


def learning_rate(step: int, total: int, warmup: int, peak: float) -> float:
    """Linear warm-up over ``warmup`` steps, then a cosine to zero at ``total``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return cosine(step - warmup, total - warmup, peak)


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float | Tensor) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
