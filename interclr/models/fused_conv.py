"""A network's convolutions in autocast's precision, each with what the kernels can do on the way.

The first convolution and those of the first stage of a network for small images have kernels of their own
(``kernels/stem.py``, ``kernels/small_conv.py``), which also find the moments that the BatchNorm behind them wants. The
gradient of a weight, which nobody waits for, is worked out beside the rest of the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from interclr.models.fused_norm import FusedBatchNorm, images_of, rows_of
from interclr.streams import join_side_streams, start_beside, wait_for_started

if TYPE_CHECKING:
    from interclr.kernels.norm import Moments

MOST_CHANNELS = 128  # of a stem that a tile of our kernel holds


class Convolutions:
    """A network's convolutions in autocast's precision, all weights (and later their gradients) cast in one go.

    Those of the second half of the layers, which are most of them, are cast beside the first layers.
    """

    def __init__(self, network: nn.Module, device: str) -> None:
        layers = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
        weights = tuple(layer.weight for layer in layers)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights[0].dtype
        weights = _Cast.apply(dtype, len(layers) // 2, *weights)  # type: ignore[no-untyped-call]
        self.weights = dict(zip(layers, weights, strict=True))
        self.beside = set(layers[len(layers) // 2 :])

    def __call__(
        self, layer: nn.Conv2d, x: Tensor, norm: FusedBatchNorm | None = None, stride: tuple[int, ...] | None = None
    ) -> tuple[Tensor, Moments | None]:
        """The convolution, and the moments for the ``norm`` behind it where they are found on the way."""
        weight = self._take(layer)
        x, stride = x.to(weight.dtype), stride or layer.stride
        if norm is not None and _is_small(layer, x, weight, stride):
            return _with_moments(_SmallConvolve.apply(x, weight, norm.parts(len(x))))  # type: ignore[no-untyped-call]
        return _Convolve.apply(x, weight, layer, stride), None  # type: ignore[no-untyped-call]

    def behind(
        self, norm: FusedBatchNorm, x: Tensor, found: Moments | None, layer: nn.Conv2d, following: FusedBatchNorm
    ) -> tuple[Tensor, Moments | None]:
        """The convolution of relu(norm(x)), where ``found`` are the moments of x if they are known."""
        if not _is_small(layer, x, self.weights[layer], layer.stride):
            return self(layer, norm.fused(x, relu=True, found=found)[0], following)
        from interclr.kernels.norm import moments

        weight, parts = self._take(layer), norm.parts(len(x))
        found = found or moments(rows_of(x.detach()), parts)
        return _with_moments(
            _NormalisedConvolve.apply(  # type: ignore[no-untyped-call]
                x, weight, norm.weight, norm.bias, *found, norm, following.parts(len(x))
            )
        )

    def stem(self, layer: nn.Conv2d, images: Tensor, norm: FusedBatchNorm) -> tuple[Tensor, Moments | None]:
        """The first convolution, otherwise as others."""
        if not _is_small_stem(layer, images, self.weights[layer]):
            return self(layer, images, norm)
        return _with_moments(
            _Stem.apply(images, self._take(layer), layer.stride[0], norm.parts(len(images)))  # type: ignore[no-untyped-call]
        )

    def _take(self, layer: nn.Conv2d) -> Tensor:
        """Once: gradients of two uses would be added before the side stream is joined."""
        weight: Tensor = self.weights.pop(layer)
        if layer in self.beside:
            wait_for_started()
            self.beside.clear()
        return weight


def _with_moments(results: tuple[Tensor, Tensor | None, Tensor | None]) -> tuple[Tensor, Moments | None]:
    from interclr.kernels.norm import Moments

    output, mean, variance = results
    return output, None if mean is None or variance is None else Moments(mean, variance)


class _Convolve(torch.autograd.Function):
    """The library's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: nn.Conv2d, stride: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.stride = layer, stride
        return F.conv2d(x, weight, None, stride, layer.padding, layer.dilation, layer.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors

        def part(*wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
            layer = ctx.layer
            return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
                gradient, x, weight, None, ctx.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups,
                [*wanted, False],
            )  # fmt: skip

        of_input, of_weight = ctx.needs_input_grad[:2]
        later = start_beside(lambda: part(False, True)[1], x, gradient, weight) if of_weight else None
        return part(True, False)[0] if of_input else None, later, None, None


def _is_small(layer: nn.Conv2d, x: Tensor, weight: Tensor, stride: tuple[int, ...]) -> bool:
    from interclr import kernels

    if not kernels.installed():
        return False
    from interclr.kernels import small_conv

    return small_conv.fits(x, weight, stride, layer.padding, layer.dilation, layer.groups)


class _SmallConvolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        from interclr.kernels import small_conv

        output, found = small_conv.convolve(x, weight, parts)
        ctx.save_for_backward(x, weight)
        ctx.mark_non_differentiable(*found)
        ctx.set_materialize_grads(False)
        return output, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> Any:
        from interclr.kernels import small_conv

        if gradient is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        of_input, of_weight, _ = ctx.needs_input_grad
        later = _gradient_beside(x, gradient, weight) if of_weight else None
        return small_conv.input_gradient(gradient, weight) if of_input else None, later, None


class _NormalisedConvolve(torch.autograd.Function):
    """BatchNorm, ReLU and a convolution: what lies between is worked out from x wherever it is read."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        variance: Tensor,
        norm: FusedBatchNorm,
        parts: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from interclr.kernels import small_conv
        from interclr.kernels.norm import Moments

        lines = small_conv.lines(Moments(mean, variance), norm.layer(), norm.views, x.shape[2] * x.shape[3] * len(x))
        output, found = small_conv.convolve(x, weight, parts, lines)
        ctx.save_for_backward(x, weight, mean, variance, lines, scale, shift)  # noticed if the last two are changed
        ctx.norm = norm
        ctx.mark_non_differentiable(*found)
        ctx.set_materialize_grads(False)
        return output, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> Any:
        from interclr.kernels import small_conv
        from interclr.kernels.norm import Moments, normalise_backward

        if gradient is None:
            return (None,) * 8
        x, weight, mean, variance, lines, *_ = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        later = _gradient_beside(x, gradient, weight, lines) if ctx.needs_input_grad[1] else None
        normalised = rows_of(small_conv.input_gradient(gradient, weight))
        found = Moments(mean, variance)
        result = normalise_backward(normalised, None, rows_of(x), None, found, ctx.norm.layer(), relu=True)
        return images_of(result.input, x), later, result.weight, result.bias, *[None] * 4


def _gradient_beside(x: Tensor, gradient: Tensor, weight: Tensor, lines: Tensor | None = None) -> Any:
    from interclr.kernels import small_conv

    kept = (x, gradient) if lines is None else (x, gradient, lines)
    return start_beside(lambda: small_conv.weight_gradient(x, gradient, lines).to(weight.dtype), *kept)


def _is_small_stem(layer: nn.Conv2d, x: Tensor, weight: Tensor) -> bool:
    """3×3 over colours in half precision, for which ``kernels/stem.py`` is made."""
    shape = (layer.in_channels, layer.kernel_size, layer.padding, layer.dilation, layer.groups)
    fits = shape == (3, (3, 3), (1, 1), (1, 1), 1) and layer.out_channels <= MOST_CHANNELS
    half = weight.dtype in (torch.bfloat16, torch.float16) and x.dtype == weight.dtype and not x.requires_grad
    last = all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
    return fits and half and last and layer.stride[0] == layer.stride[1]


class _Stem(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, parts: int) -> tuple[Tensor | None, ...]:
        from interclr.kernels.stem import convolve

        ctx.save_for_backward(x)
        ctx.stride, ctx.dtype = stride, weight.dtype
        output, found = convolve(x, weight, stride, parts)
        ctx.set_materialize_grads(False)
        if found is not None:
            ctx.mark_non_differentiable(*found)
        return output, *(found or (None, None))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> Any:
        from interclr.kernels.stem import weight_gradient

        if gradient is None:
            return (None,) * 4
        (x,) = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        return None, weight_gradient(x, gradient, ctx.stride).to(ctx.dtype), None, None


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, first: int, *weights: Tensor) -> tuple[Tensor, ...]:
        """The ``first`` at once, the others beside what follows."""
        ctx.dtypes = [weight.dtype for weight in weights]
        return _cast(weights, [dtype] * len(weights), first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        join_side_streams()
        return None, None, *_cast(gradients, ctx.dtypes)


def _cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], first: int | None = None) -> tuple[Tensor, ...]:
    """All at once, or the ``first`` at once and the others beside what follows.

    Their memory is the current stream's in any case: the side stream's could be given away while it is still read.
    """
    if all(tensor.dtype == dtype for tensor, dtype in zip(tensors, dtypes, strict=True)):
        return tuple(tensor.view_as(tensor) for tensor in tensors)
    results = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if first is None:
        torch._foreach_copy_(results, list(tensors))
    else:
        start_beside(lambda: torch._foreach_copy_(results[first:], list(tensors[first:])))
        torch._foreach_copy_(results[:first], list(tensors[:first]))
    return tuple(results)
