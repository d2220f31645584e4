"""The seam: who decides, and when, which cluster an image belongs to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from interclr import dist
from interclr.bank import MemoryBank, check_finite
from interclr.labels.kmeans import kmeans
from interclr.types import UserError


def check_has_clusters(bank: MemoryBank) -> None:
    if not bank.clusters:
        raise UserError("this bank has no clusters to give labels from: make it with MemoryBank(…, clusters=k)")


class Labels(ABC):
    """Maintains the pseudo-labels of a ``MemoryBank``, which holds all of the state.

    Distributed: every rank calls every method with the same (gathered) arguments, and every bank stays the same to
    the bit. What depends on a device's order of summation, k-means over all images, is done by rank 0 and broadcast.
    """

    progress: Callable[[int, int], None] | None = None  # told of k-means over all images, by whoever shows it

    def __init__(self, iterations: int = 20) -> None:
        if iterations < 1:
            raise UserError(f"k-means takes 1 iteration or more, not {iterations}")
        self.iterations = iterations

    def initialise(self, bank: MemoryBank, features: Tensor, generator: torch.Generator | None = None) -> None:
        """Take the features (N, D) of the encoder as it is, and give all images their first labels by k-means."""
        bank.fill(features)
        dist.broadcast(bank.features)
        self.cluster(bank, generator)

    def commit(self, bank: MemoryBank, index: Tensor, features: Tensor, step: int | None = None) -> Tensor:
        """Write a step's features (B, D) of the images ``index`` (B,), and whatever labels follow from them.

        The only write of a step. Returns the number of labels changed, a 0-d tensor on the bank's device. Without
        ``step``, counted over all epochs, what is due every few steps waits for the end of the epoch.
        """
        check_has_clusters(bank)
        changed = self.update(bank, index, features)
        if step is not None:
            self.maintain(bank, step)
        return changed

    @abstractmethod
    def update(self, bank: MemoryBank, index: Tensor, features: Tensor) -> Tensor:
        """``commit`` without ``maintain``: never waits for the host, so it can be captured in a CUDA graph."""

    def maintain(self, bank: MemoryBank, step: int) -> None:  # noqa: B027 - most have nothing to decide
        """What the host has to decide after a step, outside any graph. Nothing by default."""

    @abstractmethod
    def end_epoch(self, bank: MemoryBank, epoch: int | None = None, generator: torch.Generator | None = None) -> None:
        """Called after the last step of ``epoch`` (counted from 0; None: what is due at the end of some is due)."""

    def cluster(self, bank: MemoryBank, generator: torch.Generator | None = None) -> None:
        """Global k-means over the bank's features; ``generator`` advances by one draw on every rank."""
        check_has_clusters(bank)
        source = generator.device if generator is not None else None
        seed = int(torch.randint(2**62, (), generator=generator, device=source))
        check_finite(bank.features)  # on every rank, so that none is left waiting for the broadcast
        labels = torch.empty_like(bank.labels)
        if dist.is_main():
            own = torch.Generator().manual_seed(seed)
            found = kmeans(bank.features, bank.clusters, self.iterations, own, progress=self.progress)
            labels.copy_(found.labels)
        bank.assign(dist.broadcast(labels))
