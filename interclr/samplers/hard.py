"""Hard negatives: the nearest."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from interclr.samplers.base import Bank, SimilaritySampler
from interclr.types import Config


class Hard(SimilaritySampler):
    """The K images of Sⁿ nearest to the anchor, nearest first."""

    def pick(self, key: Tensor, others: Tensor, bank: Bank, priority: Tensor) -> Tensor:
        width = self.width(bank)
        nearest = key.topk(width).indices  # (a, width)
        return nearest.masked_fill_(torch.arange(width, device=key.device) >= others, -1)


class HardConfig(Config):
    name: Literal["hard"] = "hard"
    negatives: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"  # K

    def build(self) -> Hard:
        assert isinstance(self.negatives, int), "auto is resolved before anything is built"
        return Hard(self.negatives)
