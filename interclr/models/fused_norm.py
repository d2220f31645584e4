"""Split BatchNorm with the residual and the ReLU behind it, by the kernels of ``kernels/norm.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interclr import kernels
from interclr.models.split_norm import SplitBatchNorm


class FusedBatchNorm(SplitBatchNorm):
    """The same function as ``SplitBatchNorm``; ``fused`` does what follows it in a ResNet as well."""

    def forward(self, x: Tensor) -> Tensor:
        """In a head. A ResNet calls ``fused``; where it cannot, all of the network takes the plain way."""
        return self.fused(x)[0] if self.training and x.ndim == 2 and self.fits(x) else super().forward(x)

    def fits(self, batch: Tensor) -> bool:
        """Whether the kernels can take this batch: on a GPU, in equal parts."""
        return kernels.usable(batch) and self.weight is not None and len(batch) % self.parts(len(batch)) == 0

    def fused(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> tuple[Tensor, Tensor]:
        """relu(norm(x) + residual), twice: a tensor for each of its uses, so that their gradients need no sum."""
        first, second = _Normalise.apply(x, residual, self.weight, self.bias, self, relu)  # type: ignore[no-untyped-call]
        return first, second


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, norm: SplitBatchNorm, relu: bool
    ) -> tuple[Tensor, Tensor]:
        from interclr.kernels.norm import normalise as run

        rows, parts = _rows(x), norm.parts(len(x))
        result = run(
            rows, parts, norm.views, weight, bias, norm.running_mean, norm.running_var,
            norm.num_batches_tracked, norm.momentum, norm.eps,
            None if residual is None else _rows(residual.to(x.dtype)), relu,
        )  # fmt: skip
        output = _images(result.output, x)
        ctx.save_for_backward(x, output if residual is not None else None, result.mean, result.variance, weight, bias)
        ctx.eps, ctx.relu = norm.eps, relu
        ctx.set_materialize_grads(False)
        return output, output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        from interclr.kernels.norm import normalise_backward as run

        x, output, mean, variance, weight, bias = ctx.saved_tensors
        first, second = sorted(gradients, key=lambda gradient: gradient is None)
        if first is None:
            return (None,) * 6
        result = run(
            _rows(first), None if second is None else _rows(second), _rows(x),
            None if output is None else _rows(output), mean, variance, weight, bias, ctx.eps, ctx.relu,
        )  # fmt: skip
        residual = None if result.residual is None else _images(result.residual, x)
        return _images(result.input, x), residual, result.weight, result.bias, None, None


def _rows(images: Tensor) -> Tensor:
    """(B, C, H, W) or (B, C) → (B·H·W, C) one after the other, without a copy where channels come last in memory."""
    rows = images if images.ndim == 2 else images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])
    return rows.contiguous()  # a gradient may be one number seen many times


def _images(rows: Tensor, like: Tensor) -> Tensor:
    if like.ndim == 2:
        return rows
    count, channels, height, width = like.shape
    return rows.view(count, height, width, channels).permute(0, 3, 1, 2)
