"""Small clusters are dissolved, and their ids take halves of the largest clusters."""

from __future__ import annotations

import torch
from torch import Tensor

from interclr.bank import MemoryBank, group_sums, mean_of
from interclr.labels.kmeans import grouped_order, nearest_centroid

MEMBERS = 2**18  # most images split in one round (one cluster at least), to bound memory


def minimum_size(size: int, clusters: int, min_cluster: int | None = None) -> int:
    """The least number of members: the reference's 20 of 128 scaled to N/k, and never above N/(2k), nor below 1.

    The cap holds for a ``min_cluster`` of the user's, too: it is what makes room for k clusters that are large enough.
    """
    wanted = round(20 / 128 * size / clusters) if min_cluster is None else min_cluster
    return max(1, min(wanted, size // (2 * clusters)))


@torch.no_grad()
def repair(bank: MemoryBank, min_cluster: int | None = None) -> int:
    """Leave no cluster under ``minimum_size``; returns how many were. Waits for the host; no random numbers.

    Members of small clusters go to the nearest centroid that stays. Then, in rounds, the largest clusters (all above
    half of the largest) are cut in two, and the emptied ids take the upper halves. Other clusters stay as they are.

    It always ends, and succeeds: with an id still empty the largest cluster has more than N/k members, so at least
    twice the minimum (or, at a minimum of 1, two), and can be cut; every round fills one id at least. A cut
    never leaves less than an eighth on one side, so the largest shrinks geometrically and rounds are few.
    Not all clusters can be small, as the mean size N/k is twice the minimum.
    """
    if bank.clusters == 0:
        return 0
    least = minimum_size(bank.size, bank.clusters, min_cluster)
    small = bank.counts < least  # (k,)
    emptied = small.nonzero().flatten()
    if len(emptied) == 0:
        return 0
    _dissolve(bank, small)
    filled = 0
    while filled < len(emptied):
        filled += _split_largest(bank, emptied[filled:], least)
    return len(emptied)


def _dissolve(bank: MemoryBank, small: Tensor) -> None:
    kept = (~small).nonzero().flatten()
    loose = small[bank.labels].nonzero().flatten()
    if len(loose):
        bank.move(loose, kept[nearest_centroid(bank.features[loose], bank.centroids[kept])])


def _split_largest(bank: MemoryBank, empty: Tensor, least: int) -> int:
    """Cut up to ``len(empty)`` of the largest clusters in two; returns how many ids are now filled."""
    counts = bank.counts
    large = ((2 * counts > counts.max()) & (counts >= 2 * least)).nonzero().flatten()
    large = large[torch.argsort(counts[large], descending=True, stable=True)][: len(empty)]
    affordable = int((counts[large].cumsum(0) <= MEMBERS).sum())
    large = large[: max(1, affordable)]  # (S,) largest first
    group_of = torch.full_like(counts, -1).scatter_(0, large, torch.arange(len(large), device=large.device))  # (k,)
    group = group_of[bank.labels]  # (N,)
    members = (group >= 0).nonzero().flatten()  # (M,)
    group = group[members]
    upper = _upper_half(bank.features[members].float(), group, counts[large], least)  # (M,)
    bank.move(members[upper], empty[group[upper]])
    return len(large)


def _upper_half(features: Tensor, group: Tensor, counts: Tensor, least: int, iterations: int = 10) -> Tensor:
    """2-means within every group at once: features (M, D), group (M,) in 0..S-1, counts (S,) → side (M,) bool.

    Two means divide a group at a plane, so the cut is a rank along the line between them. Bounding that rank keeps
    both sides large enough and serves groups of equal features, where any cut is as good, without a special case.
    """
    groups = len(counts)
    start = counts.cumsum(0) - counts  # (S,)
    offset = features - mean_of(group_sums(features, group, groups), counts)[group]  # (M, D)
    farthest = grouped_order(-offset.square().sum(dim=1), group)[start]  # (S,) the first guess at the line
    projection = (offset * offset[farthest][group]).sum(dim=1)  # (M,)
    side = (projection > 0).long()
    for _ in range(iterations):
        half = 2 * group + side
        sizes = counts.new_zeros(2 * groups).index_add_(0, half, torch.ones_like(half))
        means = mean_of(
            group_sums(offset, half, 2 * groups), sizes
        )  # (2S, D), zero (the group's mean) for an empty half
        low, high = means[0::2], means[1::2]  # (S, D)
        projection = (offset * (high - low)[group]).sum(dim=1)
        previous, side = side, (projection > 0.5 * (high.square() - low.square()).sum(dim=1)[group]).long()
        if torch.equal(side, previous):
            break
    margin = (counts // 8).clamp(min=least)  # (S,) at most half, since counts ≥ 2·least
    lower = counts.clone().index_add_(0, group, -side)  # (S,) how many 2-means puts below
    cut = torch.minimum(torch.maximum(lower, margin), counts - margin)
    order = grouped_order(projection, group)
    owner = group[order]
    rank = torch.arange(len(group), device=group.device) - start[owner]
    return torch.empty_like(group, dtype=torch.bool).scatter_(0, order, rank >= cut[owner])
