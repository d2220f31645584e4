"""Labels that follow the features at every step: the paper's online clustering, the default."""

from __future__ import annotations

import warnings
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from interclr.bank import MemoryBank
from interclr.labels.base import Labels
from interclr.labels.kmeans import nearest_centroid
from interclr.labels.repair import minimum_size, repair
from interclr.types import Config, UserError


class OnlineLabels(Labels):
    """Each step the batch takes the labels of its nearest centroids, and the centroids become the exact means.

    Every ``repair_every`` steps (0: at the end of an epoch only) it is noted whether there are small clusters, and if
    there were some at the note before, they are repaired. The note travels to the host in the background and is read
    one interval later, so a step waits for the host only when clusters really are repaired; what happens is a function
    of the step and of the bank's state, so a resumed run repairs when the first would have.

    The reference recomputes centroids every 10 steps, over the whole bank; here they are exact after each for O(B·D).

    With about as many clusters as images every cluster is small. The least size is then 1, so there is nothing to
    repair, and a step can move an image only out of a cluster that keeps another member: labels hardly change.
    """

    def __init__(self, min_cluster: int | None = None, repair_every: int = 10, iterations: int = 20) -> None:
        super().__init__(iterations)
        if min_cluster is not None and min_cluster < 1:
            raise UserError(f"clusters keep 1 member or more, not min_cluster={min_cluster}")
        if repair_every < 0:
            raise UserError(f"repair_every is a number of steps, or 0 for the ends of epochs only, not {repair_every}")
        self.min_cluster, self.repair_every = min_cluster, repair_every
        self._note: tuple[Tensor, torch.cuda.Event] | None = None  # on its way from a GPU

    def initialise(self, bank: MemoryBank, features: Tensor, generator: torch.Generator | None = None) -> None:
        super().initialise(bank, features, generator)
        least = minimum_size(bank.size, bank.clusters, self.min_cluster)
        if self.min_cluster is not None and least < self.min_cluster:
            warnings.warn(
                f"clusters keep {least} members at least, not {self.min_cluster} (min_cluster), as that is half of the "
                f"mean size of {bank.clusters} clusters of {bank.size:,} images. Fewer clusters allow for larger ones.",
                stacklevel=2,
            )
        repair(bank, self.min_cluster)
        self._note_small_clusters(bank)

    def update(self, bank: MemoryBank, index: Tensor, features: Tensor) -> Tensor:
        entries = bank.blend(index, features)
        labels = nearest_centroid(entries.after, bank.centroids)  # (B,) to the centroids from before this step
        return bank.store(entries, labels)

    def maintain(self, bank: MemoryBank, step: int) -> None:
        if self.repair_every and (step + 1) % self.repair_every == 0:
            if self._repair_is_due(bank):
                repair(bank, self.min_cluster)
            self._note_small_clusters(bank)

    def _note_small_clusters(self, bank: MemoryBank) -> None:
        least = minimum_size(bank.size, bank.clusters, self.min_cluster)
        bank.repair_due.copy_((bank.counts < least).any())
        if bank.repair_due.is_cuda:
            host = torch.empty((), dtype=torch.bool, pin_memory=True)
            host.copy_(bank.repair_due, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._note = (host, event)

    def _repair_is_due(self, bank: MemoryBank) -> bool:
        """What the note before says; the bank's own copy where there is none, as after a resume."""
        if self._note is None:
            return bool(bank.repair_due)
        host, event = self._note
        event.synchronize()  # recorded repair_every steps ago
        return bool(host)

    def end_epoch(self, bank: MemoryBank, epoch: int | None = None, generator: torch.Generator | None = None) -> None:
        repair(bank, self.min_cluster)


class OnlineLabelsConfig(Config):
    name: Literal["online"] = "online"
    min_cluster: Annotated[int, Field(ge=1)] | None = None  # None: 20 at ImageNet's scale, scaled to N/k
    repair_every: Annotated[int, Field(ge=0)] = 10  # steps
    iterations: Annotated[int, Field(ge=1)] = 20  # of the first k-means

    def build(self) -> OnlineLabels:
        return OnlineLabels(self.min_cluster, self.repair_every, self.iterations)
