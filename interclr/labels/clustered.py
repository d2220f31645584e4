"""A bank made of features alone, to look at a set of images by its clusters."""

from __future__ import annotations

import torch
from torch import Tensor

from interclr.bank import MemoryBank
from interclr.labels.kmeans import auto_clusters, kmeans


def clustered_bank(features: Tensor, seed: int = 0) -> MemoryBank:
    """These features (N, F), N ≥ 2, normalised, in as many clusters as ``auto`` has for so many images."""
    bank = MemoryBank(len(features), features.shape[1], auto_clusters(len(features)))
    bank.fill(features)
    bank.assign(kmeans(bank.features, bank.clusters, generator=torch.Generator().manual_seed(seed)).labels)
    return bank
