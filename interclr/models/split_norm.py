"""BatchNorm over parts of the batch, so that MoCo cannot cheat through shared batch statistics on one device.

With keys and queries normalised over the same images, the network can recognise "same batch" instead of "same image".
On several devices each has its own statistics and keys are shuffled across them; on one device the same effect comes
from shuffling the keys and normalising them in ``splits`` independent parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SplitBatchNorm(nn.Module):
    """Takes over a BatchNorm layer's parameters and buffers (same names) and normalises ``splits`` parts apart."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d, splits: int) -> None:
        super().__init__()
        self.splits, self.eps, self.momentum = splits, norm.eps, norm.momentum or 0.1
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.shape[0] < 2 * self.splits:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
            )
        if torch.compiler.is_compiling() and x.shape[0] % self.splits == 0:
            return self._in_one_piece(x)
        means = self.running_mean.repeat(self.splits, 1)  # (splits, C): each part updates a row of its own
        variances = self.running_var.repeat(self.splits, 1)
        parts = [
            F.batch_norm(part, means[i], variances[i], self.weight, self.bias, True, self.momentum, self.eps)
            for i, part in enumerate(x.tensor_split(self.splits))  # sizes differ by one at most
        ]
        self.running_mean.copy_(means.mean(0))
        self.running_var.copy_(variances.mean(0))
        self.num_batches_tracked.add_(1)
        return torch.cat(parts)

    def _in_one_piece(self, x: Tensor) -> Tensor:
        """The same for equal parts as two expressions over all of them, which a compiler fuses: no ``cat`` of parts."""
        parts = x.unflatten(0, (self.splits, -1)).float()  # (splits, B / splits, C, …)
        over = [1, *range(3, parts.ndim)]
        shape = (self.splits, 1, x.shape[1], *[1] * (x.ndim - 2))
        variance, mean = torch.var_mean(parts, over, correction=0)  # (splits, C)
        each = x.numel() // (self.splits * x.shape[1])
        self.running_mean.lerp_(mean.mean(0), self.momentum)
        self.running_var.lerp_(variance.mean(0) * (each / max(each - 1, 1)), self.momentum)
        self.num_batches_tracked.add_(1)
        scale = self.weight * torch.rsqrt(variance + self.eps)  # (splits, C)
        shift = self.bias - mean * scale
        normalised: Tensor = parts * scale.view(shape) + shift.view(shape)
        return normalised.to(x.dtype).flatten(0, 1)


def split_batch_norm(module: nn.Module, splits: int) -> nn.Module:
    """Replace every BatchNorm below ``module`` by its split form; keys of the state dict stay the same."""
    if splits > 1:
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
                setattr(module, name, SplitBatchNorm(child, splits))
            else:
                split_batch_norm(child, splits)
    return module
