"""Labels from global k-means now and then: what the paper compares online clustering with."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from interclr.bank import MemoryBank
from interclr.labels.base import Labels
from interclr.types import Config, UserError


class OfflineLabels(Labels):
    """Global k-means over the bank's features every ``every`` epochs; in between labels stay, centroids follow.

    Small clusters stay as k-means has them: this is the plain alternative that online labels are compared with.
    """

    def __init__(self, every: int = 1, iterations: int = 20) -> None:
        super().__init__(iterations)
        if every < 1:
            raise UserError(f"offline labels are renewed every 1 or more epochs, not {every}")
        self.every = every

    def update(self, bank: MemoryBank, index: Tensor, features: Tensor) -> Tensor:
        bank.write(index, features)
        return index.new_zeros(())

    def end_epoch(self, bank: MemoryBank, epoch: int | None = None, generator: torch.Generator | None = None) -> None:
        if epoch is None or (epoch + 1) % self.every == 0:
            self.cluster(bank, generator)


class OfflineLabelsConfig(Config):
    name: Literal["offline"] = "offline"
    every: Annotated[int, Field(ge=1)] = 1  # epochs
    iterations: Annotated[int, Field(ge=1)] = 20

    def build(self) -> OfflineLabels:
        return OfflineLabels(self.every, self.iterations)
