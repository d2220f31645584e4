"""Split BatchNorm with the residual and the ReLU behind it, by the kernels of ``kernels/norm.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interclr import kernels
from interclr.models.split_norm import SplitBatchNorm

if TYPE_CHECKING:
    from interclr.kernels.norm import Moments, Norm


class FusedBatchNorm(SplitBatchNorm):
    """The same function as ``SplitBatchNorm``; ``fused`` does what follows it in a ResNet as well."""

    def forward(self, x: Tensor) -> Tensor:
        """In a head. A ResNet calls ``fused``; where it cannot, all of the network takes the plain way."""
        return self.fused(x)[0] if self.training and x.ndim == 2 and self.fits(x) else super().forward(x)

    def fits(self, batch: Tensor) -> bool:
        """Whether the kernels can take this batch: on a GPU, in equal parts."""
        return kernels.usable(batch) and self.weight is not None and len(batch) % self.parts(len(batch)) == 0

    def fused(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        relu: bool = False,
        residual_norm: FusedBatchNorm | None = None,
        quarter: bool = False,
        found: Moments | None = None,
    ) -> tuple[Tensor, Tensor]:
        """relu(norm(x) + residual), twice: a tensor for each of its uses, so that their gradients need no sum.

        With ``residual_norm`` the residual is normalised as well. With ``quarter`` the second is every second row and
        column only: what a 1×1 convolution with stride 2 takes. ``found`` are the moments of x where they are known.
        """
        other = (residual_norm.weight, residual_norm.bias) if residual_norm is not None else (None, None)
        first, second = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, residual, self.weight, self.bias, *other, self, residual_norm, relu, quarter, found
        )
        return first, second

    def layer(self) -> Norm:
        from interclr.kernels.norm import Norm

        return Norm(
            self.weight, self.bias, self.running_mean, self.running_var, self.num_batches_tracked, self.momentum,
            self.eps,
        )  # fmt: skip


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        residual_weight: Tensor | None,
        residual_bias: Tensor | None,
        norm: FusedBatchNorm,
        residual_norm: FusedBatchNorm | None,
        relu: bool,
        quarter: bool,
        found: Moments | None,
    ) -> tuple[Tensor, Tensor]:
        from interclr.kernels.norm import moments, normalise

        parts = norm.parts(len(x))
        residual = None if residual is None else residual.to(x.dtype)
        found, its = found or moments(rows_of(x), parts), None
        if residual_norm is not None:
            assert residual is not None
            its = moments(rows_of(residual), parts), residual_norm.layer()
        size = (x.shape[2], x.shape[3]) if quarter else None
        rows = None if residual is None else rows_of(residual)
        whole, part = normalise(rows_of(x), found, norm.layer(), norm.views, rows, its, relu, size)
        output = images_of(whole, x)
        saved = (output if residual is not None else None, residual if its is not None else None)
        others = (weight, bias, residual_weight, residual_bias)  # not read, but it is noticed if they are changed
        ctx.save_for_backward(x, *saved, *found, *(its[0] if its is not None else (None, None)), *others)
        ctx.norm, ctx.residual_norm, ctx.relu, ctx.size = norm, residual_norm, relu, size
        ctx.set_materialize_grads(False)
        return output, output.detach() if part is None else images_of(part, x[:, :, ::2, ::2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        from interclr.kernels.norm import Moments, normalise_backward

        x, output, other, mean, variance, its_mean, its_variance, *_ = ctx.saved_tensors
        first, second = gradients
        if first is None:
            if second is None:
                return (None,) * 11
            first, second = (second, None) if ctx.size is None else (torch.zeros_like(x), second)
        size = ctx.size if second is not None else None
        places = 1  # that one number of ``first`` stands for
        if output is not None and first.ndim == 4 and first.stride()[2:] == (0, 0):
            places, first = first.shape[2] * first.shape[3], first[:, :, 0, 0]
        second = None if second is None else rows_of(second)
        result = normalise_backward(
            rows_of(first), second, rows_of(x), None if output is None else rows_of(output), Moments(mean, variance),
            ctx.norm.layer(), ctx.relu, size, places,
        )  # fmt: skip
        residual, weight, bias = result.residual, None, None
        if ctx.residual_norm is not None:
            assert residual is not None
            its = Moments(its_mean, its_variance)
            of = normalise_backward(residual, None, rows_of(other), None, its, ctx.residual_norm.layer(), relu=False)
            residual, weight, bias = of.input, of.weight, of.bias
        residual = None if residual is None else images_of(residual, x)
        return images_of(result.input, x), residual, result.weight, result.bias, weight, bias, *[None] * 5


def rows_of(images: Tensor) -> Tensor:
    """(B, C, H, W) or (B, C) → (B·H·W, C) one after the other, without a copy where channels come last in memory."""
    rows = images if images.ndim == 2 else images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])
    return rows.contiguous()  # a gradient may be one number seen many times


def images_of(rows: Tensor, like: Tensor) -> Tensor:
    if like.ndim == 2:
        return rows
    count, channels, height, width = like.shape
    return rows.view(count, height, width, channels).permute(0, 3, 1, 2)
