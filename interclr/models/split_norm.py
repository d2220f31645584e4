"""BatchNorm over parts of the batch, so that MoCo cannot cheat through shared batch statistics on one device.

With keys and queries normalised over the same images, the network can recognise "same batch" instead of "same image".
On several devices each has its own statistics and keys are shuffled across them; on one device the same effect comes
from shuffling the keys and normalising them in ``splits`` independent parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interclr.types import UserError

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d)


class SplitBatchNorm(nn.Module):
    """Takes over a BatchNorm layer's parameters and buffers (same names) and normalises parts of the batch apart.

    The batch is ``views`` batches one after the other, each of which is normalised in ``splits`` parts, exactly as if
    they had come one at a time: with two views in one batch a network makes half as many, twice as large steps. The
    running statistics follow the views in turn, and the mean over the parts of each.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d, splits: int, views: int = 1) -> None:
        super().__init__()
        if norm.momentum is None:
            raise UserError("a BatchNorm with momentum=None (a plain average) cannot be normalised in parts")
        self.splits, self.views = splits, views
        self.eps, self.momentum = norm.eps, norm.momentum
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)

    def parts(self, images: int) -> int:
        """In how many parts a batch of so many images, all views together, is normalised."""
        return self.views * (self.splits if images >= 2 * self.splits * self.views else 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        assert x.shape[0] % self.views == 0, f"a batch of {x.shape[0]} is not {self.views} views"
        splits = self.parts(x.shape[0]) // self.views
        if torch.compiler.is_compiling() and x.shape[0] % (self.views * splits) == 0:
            return self._in_one_piece(x, splits)
        self.num_batches_tracked.add_(self.views)
        views = [self._one_view(view, splits) for view in x.chunk(self.views)]
        return views[0] if len(views) == 1 else torch.cat(views)

    def _one_view(self, x: Tensor, splits: int) -> Tensor:
        means = self.running_mean.repeat(splits, 1)  # (splits, C): each part updates a row of its own
        variances = self.running_var.repeat(splits, 1)
        parts = [
            F.batch_norm(part, means[i], variances[i], self.weight, self.bias, True, self.momentum, self.eps)
            for i, part in enumerate(x.tensor_split(splits))  # sizes differ by one at most
        ]
        self.running_mean.copy_(means.mean(0))
        self.running_var.copy_(variances.mean(0))
        return torch.cat(parts)

    def _in_one_piece(self, x: Tensor, splits: int) -> Tensor:
        """The same for equal parts as two expressions over all of them, which a compiler fuses: no ``cat`` of parts."""
        count = self.views * splits
        parts = x.unflatten(0, (count, -1)).float()  # (count, n, C, …)
        shape = (count, 1, x.shape[1], *[1] * (x.ndim - 2))
        variance, mean = torch.var_mean(parts, [1, *range(3, parts.ndim)], correction=0)  # (count, C)
        each = x.numel() // (count * x.shape[1])
        with torch.no_grad():
            unbiased = variance * (each / max(each - 1, 1))
            for view in range(self.views):
                rows = slice(view * splits, (view + 1) * splits)
                self.running_mean.lerp_(mean[rows].mean(0), self.momentum)
                self.running_var.lerp_(unbiased[rows].mean(0), self.momentum)
            self.num_batches_tracked.add_(self.views)
        scale = torch.rsqrt(variance + self.eps)  # (count, C)
        scale = scale if self.weight is None else scale * self.weight  # SimSiam's last BatchNorm has none
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        normalised: Tensor = parts * scale.view(shape) + shift.view(shape)
        return normalised.to(x.dtype).flatten(0, 1)


def split_batch_norm(module: nn.Module, splits: int, views: int = 1) -> nn.Module:
    """Replace every BatchNorm below ``module`` by its split form; keys of the state dict stay the same."""
    if splits == views == 1:
        return module
    for name, child in module.named_children():
        if isinstance(child, SplitBatchNorm):
            child.views = views
        elif isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d) and type(child) in PLAIN:
            setattr(module, name, SplitBatchNorm(child, splits, views))
        elif isinstance(child, nn.modules.batchnorm._BatchNorm):  # one that does more, such as timm's with activation
            what = type(child).__name__
            raise UserError(f"the backbone's {what} cannot be normalised in parts: use method.key_splits=1")
        else:
            split_batch_norm(child, splits, views)
    return module


def takes_views_together(module: nn.Module) -> bool:
    """Whether ``split_batch_norm`` knows every normalisation in ``module`` that looks across a batch."""
    across = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return all(type(m) in PLAIN and m.momentum is not None for m in across)
