"""Labels that follow the features at every step: the paper's online clustering, the default."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from interclr.bank import MemoryBank
from interclr.labels.base import Labels
from interclr.labels.kmeans import nearest_centroid
from interclr.labels.repair import repair
from interclr.types import Config


class OnlineLabels(Labels):
    """Each step the batch takes the labels of its nearest centroids, and the centroids become the exact means.

    Small clusters are repaired every ``repair_every`` steps (0: at the end of an epoch only): a function of the step,
    so a resumed run repairs when the first would have. The reference recomputes centroids only every 10 steps, over
    the whole bank; here they are exact after each step for O(B·D).

    With about as many clusters as images every cluster is small. The least size is then 1, so there is nothing to
    repair, and a step can move an image only out of a cluster that keeps another member: labels hardly change.
    """

    def __init__(self, min_cluster: int | None = None, repair_every: int = 10, iterations: int = 20) -> None:
        super().__init__(iterations)
        self.min_cluster, self.repair_every = min_cluster, repair_every

    def initialise(self, bank: MemoryBank, features: Tensor, generator: torch.Generator | None = None) -> None:
        super().initialise(bank, features, generator)
        repair(bank, self.min_cluster)

    def commit(self, bank: MemoryBank, index: Tensor, features: Tensor, step: int) -> Tensor:
        changed = self.update(bank, index, features)
        if self.repair_every and (step + 1) % self.repair_every == 0:
            repair(bank, self.min_cluster)
        return changed

    def update(self, bank: MemoryBank, index: Tensor, features: Tensor) -> Tensor:
        """The step without the repair: never waits for the host, so it can be captured in a CUDA graph."""
        entries = bank.blend(index, features)
        labels = nearest_centroid(entries.after, bank.centroids)  # (B,) to the centroids from before this step
        return bank.store(entries, labels)

    def end_epoch(self, bank: MemoryBank, epoch: int, generator: torch.Generator | None = None) -> None:
        repair(bank, self.min_cluster)


class OnlineLabelsConfig(Config):
    name: Literal["online"] = "online"
    min_cluster: Annotated[int, Field(ge=1)] | None = None  # None: 20 at ImageNet's scale, scaled to N/k
    repair_every: Annotated[int, Field(ge=0)] = 10  # steps
    iterations: Annotated[int, Field(ge=1)] = 20  # of the first k-means

    def build(self) -> OnlineLabels:
        return OnlineLabels(self.min_cluster, self.repair_every, self.iterations)
