"""A torchvision ResNet that takes two passes over a layer each way for BatchNorm, ReLU and skip connection together.

Same modules, same names, same function. What is left between the convolutions is bound by memory, and the kernels of
``kernels/norm.py`` pass over it as few times as can be; a compiler needs a minute or two and more passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from interclr.models.fused_norm import FusedBatchNorm
from interclr.models.split_norm import PLAIN, SplitBatchNorm
from interclr.streams import join_side_streams, start_beside, wait_for_started

if TYPE_CHECKING:
    from interclr.kernels.norm import Moments

MOST_CHANNELS = 128  # of a stem that a tile of our kernel holds


class FusedResNet(ResNet):  # type: ignore[misc]
    """Only the forward pass of training differs from torchvision's; see ``fuse``."""

    def _forward_impl(self, images: Tensor) -> Tensor:
        output: Tensor
        if not self.bn1.fits(images) or not all(m.training for m in self.modules() if isinstance(m, FusedBatchNorm)):
            output = super()._forward_impl(images)
            return output
        convolve = _Convolutions(self, images.device.type)
        x, found = convolve.stem(self.conv1, images, self.bn1.parts(len(images)))
        x, skip = self.bn1.fused(x, relu=True, found=found)
        if not isinstance(self.maxpool, nn.Identity):
            x = skip = self.maxpool(x)
        blocks = [b for stage in (self.layer1, self.layer2, self.layer3, self.layer4) for b in stage.children()]
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            x, skip = _block(block, convolve, x, skip, quarter=_skips_to_a_quarter(following))
        one = getattr(self.avgpool, "output_size", None) == (1, 1)
        output = self.fc(_Mean.apply(x) if one else self.avgpool(x).flatten(1))  # type: ignore[no-untyped-call]
        return output


def _block(block: Any, convolve: _Convolutions, x: Tensor, skip: Tensor, quarter: bool) -> tuple[Tensor, Tensor]:
    """``x`` and ``skip`` are one tensor twice, once for each use: their gradients are added where they are read.

    With ``quarter`` the skip connection's is what the next block's 1×1 convolution with stride 2 takes of it.
    """
    skip_norm = None
    if block.downsample is not None:
        is_quarter = skip.shape != x.shape
        skip = convolve(block.downsample[0], skip, stride=(1, 1) if is_quarter else None)
        skip_norm = block.downsample[1]
    x, _ = block.bn1.fused(convolve(block.conv1, x), relu=True)
    last, norm = block.conv2, block.bn2
    if isinstance(block, Bottleneck):
        x, _ = block.bn2.fused(convolve(block.conv2, x), relu=True)
        last, norm = block.conv3, block.bn3
    both: tuple[Tensor, Tensor] = norm.fused(convolve(last, x), skip, True, skip_norm, quarter)
    return both


def _skips_to_a_quarter(block: Any) -> bool:
    if block is None or block.downsample is None:
        return False
    layer = block.downsample[0]
    return (layer.kernel_size, layer.stride, layer.padding) == ((1, 1), (2, 2), (0, 0))


class _Convolutions:
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

    def __call__(self, layer: nn.Conv2d, x: Tensor, stride: tuple[int, ...] | None = None) -> Tensor:
        weight = self.weights.pop(layer)  # once: gradients of two uses would be added before the side stream is joined
        if layer in self.beside:
            wait_for_started()
            self.beside.clear()
        stride = stride or layer.stride
        output: Tensor = _Convolve.apply(x.to(weight.dtype), weight, layer, stride)  # type: ignore[no-untyped-call]
        return output

    def stem(self, layer: nn.Conv2d, images: Tensor, parts: int) -> tuple[Tensor, Moments | None]:
        """The first convolution, and the moments of its parts where its kernel finds them on the way."""
        if not _is_small_stem(layer, images, self.weights[layer]):
            return self(layer, images), None
        from interclr.kernels.norm import Moments

        output, *found = _Stem.apply(images, self.weights.pop(layer), layer.stride[0], parts)  # type: ignore[no-untyped-call]
        return output, None if found[0] is None else Moments(*found)


class _Convolve(torch.autograd.Function):
    """A convolution whose weight's gradient, which nobody waits for, is worked out beside the rest of the backward."""

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


class _Mean(torch.autograd.Function):
    """The mean over all places. Its gradient is one number seen many times; BatchNorm reads it as that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean((2, 3))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        mean: Tensor = gradient / (ctx.shape[2] * ctx.shape[3])
        return mean[:, :, None, None].expand(ctx.shape)


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


def fuse(module: nn.Module) -> bool:
    """Make every ResNet below ``module`` a fused one. False, and nothing done, where there is something else in it."""
    networks = [m for m in module.modules() if isinstance(m, ResNet)]
    inside = {id(m) for network in networks for m in network.modules()}
    if not networks or not all(_known(network) for network in networks):
        return False
    plain = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if any(type(m) not in PLAIN or m.momentum is None for m in plain):
        return False
    if any(isinstance(m, nn.Conv2d) and id(m) not in inside for m in module.modules()):
        return False
    _take_over_norms(module)
    for network in networks:
        network.__class__ = FusedResNet
    return True


def _known(network: ResNet) -> bool:
    stages = (network.layer1, network.layer2, network.layer3, network.layer4)
    blocks = [block for stage in stages for block in stage.children()]
    downs = [block.downsample[1] for block in blocks if getattr(block, "downsample", None) is not None]
    norms = [network.bn1, *downs, *(m for block in blocks for name, m in block.named_children() if name[:2] == "bn")]
    layers = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    return (
        all(type(block) in (BasicBlock, Bottleneck) for block in blocks)
        and all(type(norm) in (*PLAIN, SplitBatchNorm) and norm.weight is not None for norm in norms)
        and all(layer.bias is None and layer.padding_mode == "zeros" for layer in layers)
    )


def _take_over_norms(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, PLAIN) and type(child) in PLAIN:
            setattr(module, name, FusedBatchNorm(child, splits=1).train(child.training))
        elif type(child) is SplitBatchNorm:
            child.__class__ = FusedBatchNorm
        else:
            _take_over_norms(child)
