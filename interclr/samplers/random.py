"""Random negatives: any image of another cluster."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from interclr.samplers.base import Bank, Negatives, Prepared, Sampler, StrategyConfig


class Random(Sampler):
    """K at random, without replacement, from all of Sⁿ."""

    def select_negatives(self, query: Tensor, prepared: Prepared, bank: Bank) -> Negatives:
        """The first K of ``priority`` with the members of the anchor's cluster left out, in O(N log N + A·K·log N).

        If a cluster's members stand at places p₀ < p₁ < … of ``priority``, then the j-th image that is not a member
        stands at j plus the number of l with p_l − l ≤ j, and p_l − l never falls with l. One sorted list of
        (label, p_l − l) over all clusters answers that for every anchor by bisection.
        """
        label, priority = prepared.label, prepared.priority
        size, width = bank.labels.shape[0], self.width(bank)
        start = bank.counts.cumsum(0) - bank.counts  # (k,)
        grouped, place = bank.labels[priority].sort(stable=True)  # (N,) labels in order, and p within each label
        before = torch.arange(size, device=place.device) - start[grouped]  # (N,) l
        ledger = grouped * (size + 1) + place - before  # (N,) never falls

        slot = torch.arange(width, device=place.device)  # (K,) j
        skipped = torch.searchsorted(ledger, label[:, None] * (size + 1) + slot, right=True) - start[label, None]
        negative = priority[(slot + skipped).clamp_max(size - 1)]  # (A, K)
        return Negatives(negative.masked_fill_(slot >= (size - bank.counts[label])[:, None], -1))


class RandomConfig(StrategyConfig):
    strategy: ClassVar = Random
    name: Literal["random"] = "random"
