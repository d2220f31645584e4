"""Hard negatives: the nearest."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from interclr.samplers.base import Bank, SimilaritySampler, StrategyConfig


class Hard(SimilaritySampler):
    """The K images of Sⁿ nearest to the anchor, nearest first."""

    def pick(self, key: Tensor, others: Tensor, bank: Bank, priority: Tensor) -> Tensor:
        width = self.width(bank)
        nearest = key.topk(width).indices  # (a, width)
        return nearest.masked_fill_(torch.arange(width, device=key.device) >= others, -1)


class HardConfig(StrategyConfig):
    strategy: ClassVar = Hard
    name: Literal["hard"] = "hard"
