"""A torchvision ResNet that takes two passes over a layer each way for BatchNorm, ReLU and skip connection together.

Same modules, same names, same function. What is left between the convolutions is bound by memory, and the kernels of
``kernels/norm.py`` pass over it as few times as can be; a compiler needs a minute or two and more passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from interclr.models.fused_conv import Convolutions
from interclr.models.fused_norm import FusedBatchNorm
from interclr.models.split_norm import PLAIN, SplitBatchNorm


class FusedResNet(ResNet):  # type: ignore[misc]
    """Only the forward pass of training differs from torchvision's; see ``fuse``."""

    def _forward_impl(self, images: Tensor) -> Tensor:
        output: Tensor
        if not self.bn1.fits(images) or not all(m.training for m in self.modules() if isinstance(m, FusedBatchNorm)):
            output = super()._forward_impl(images)
            return output
        convolve = Convolutions(self, images.device.type)
        x, found = convolve.stem(self.conv1, images, self.bn1)
        x, skip = self.bn1.fused(x, relu=True, found=found)
        if not isinstance(self.maxpool, nn.Identity):
            x = skip = self.maxpool(x)
        blocks = [b for stage in (self.layer1, self.layer2, self.layer3, self.layer4) for b in stage.children()]
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            x, skip = _block(block, convolve, x, skip, quarter=_skips_to_a_quarter(following))
        one = getattr(self.avgpool, "output_size", None) == (1, 1)
        output = self.fc(_Mean.apply(x) if one else self.avgpool(x).flatten(1))  # type: ignore[no-untyped-call]
        return output


def _block(block: Any, convolve: Convolutions, x: Tensor, skip: Tensor, quarter: bool) -> tuple[Tensor, Tensor]:
    """``x`` and ``skip`` are one tensor twice, once for each use: their gradients are added where they are read.

    With ``quarter`` the skip connection's is what the next block's 1×1 convolution with stride 2 takes of it.
    """
    skip_norm = None
    if block.downsample is not None:
        is_quarter = skip.shape != x.shape
        skip, _ = convolve(block.downsample[0], skip, stride=(1, 1) if is_quarter else None)
        skip_norm = block.downsample[1]
    x, found = convolve(block.conv1, x, block.bn1)
    x, found = convolve.behind(block.bn1, x, found, block.conv2, block.bn2)
    norm = block.bn2
    if isinstance(block, Bottleneck):
        x, found = convolve.behind(block.bn2, x, found, block.conv3, block.bn3)
        norm = block.bn3
    both: tuple[Tensor, Tensor] = norm.fused(x, skip, True, skip_norm, quarter, found)
    return both


def _skips_to_a_quarter(block: Any) -> bool:
    if block is None or block.downsample is None:
        return False
    layer = block.downsample[0]
    return (layer.kernel_size, layer.stride, layer.padding) == ((1, 1), (2, 2), (0, 0))


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
