"""What the embedding shows about images: clusters, neighbours, negatives, duplicates, outliers.

Everything here is a list of image positions with figures; nothing here reads an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from interclr.bank import MemoryBank
from interclr.data.copies import SAME_PICTURE, Pairs, closest_first, likeness
from interclr.health import false_negatives
from interclr.knn import nearest_rows
from interclr.samplers import every_strategy

CLUSTERS, MEMBERS = 8, 12  # shown of each order, and images of each
NEIGHBOURS = 10
QUERIES = 8
ANCHORS, NEGATIVES = 4, 10
COUNTED_ANCHORS, COUNTED_NEGATIVES = 256, 32  # at most, for the share of false negatives
LARGE_BANK = 100_000
PAIRS, COPIES, OUTLIERS = 12, 4, 18
Found = dict[str, Any]


# Clusters.


def clusters(bank: MemoryBank, labels: Tensor | None) -> Found:
    """Orders of clusters by what can be seen: size, purity with labels, and tightness without."""
    if labels is not None and not bool((labels >= 0).any()):  # of a sample, which may have none of the labelled images
        labels = None
    order, start = bank.members()
    counts = bank.counts
    filled = (counts > 0).nonzero().flatten()
    tightness = bank.centroids.norm(dim=1)  # the mean cosine of members with their centroid's direction
    # (k, classes), of the classes there are among these images
    table, classes = (None, None) if labels is None else _table(bank.labels, labels, bank.clusters)
    orders: dict[str, Tensor] = {"Largest": -counts.double(), "Smallest": counts.double()}
    if table is not None:
        purity = table.amax(1).double() / table.sum(1).clamp_min(1)
        # among equally pure ones the larger is the greater feat; one image alone is always pure
        alone = (table.sum(1) < 2).double()
        orders["Purest"] = alone * 10 - purity - table.sum(1).double() / (10 * len(bank.labels))
        orders["Most mixed"] = alone * 10 + purity - table.sum(1).double() / (10 * len(bank.labels))
    else:
        orders["Tightest"] = (counts < 2).double() * 10 - tightness.double()
        orders["Loosest"] = (counts < 2).double() * 10 + tightness.double()
    shown: dict[int, Found] = {}
    lists: dict[str, list[int]] = {}
    for name, key in orders.items():
        picked = filled[torch.argsort(key[filled], stable=True)][:CLUSTERS].tolist()
        lists[name] = picked
        for cluster in picked:
            if cluster in shown:
                continue
            members = order[start[cluster] : start[cluster] + counts[cluster]]
            cosine = F.normalize(bank.features[members].float(), dim=1) @ F.normalize(bank.centroids[cluster], dim=0)
            nearest = torch.argsort(cosine, descending=True, stable=True)
            spread = torch.linspace(0, len(members) - 1, min(MEMBERS, len(members))).round().long()
            entry: Found = {
                "size": len(members),
                "tightness": round(float(tightness[cluster]), 3),
                "members": members[nearest[spread]].tolist(),
            }
            if table is not None and classes is not None and int(table[cluster].sum()):
                share = table[cluster].double() / table[cluster].sum()
                top = torch.argsort(share, descending=True, stable=True)[:5]
                entry["purity"] = round(float(share[top[0]]), 4)
                entry["classes"] = [[int(classes[c]), round(float(share[c]), 4)] for c in top if share[c] > 0]
            shown[cluster] = entry
    return {"count": len(filled), "orders": lists, "shown": {str(key): value for key, value in shown.items()}}


def _table(clusters: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    known = labels >= 0
    classes, column = labels[known].unique(return_inverse=True)
    table = torch.zeros(count, len(classes), dtype=torch.int64)
    return table.index_put_((clusters[known], column), torch.ones((), dtype=torch.int64), accumulate=True), classes


# Neighbours.


def neighbours(features: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and positions (M, K) of each image's nearest others, nearest first."""
    return nearest_rows(features, features, NEIGHBOURS, own_from=0)


def spread_over_classes(count: int, labels: Tensor | None, total: int, seed: int) -> list[int]:
    """``count`` of ``total`` positions, random but repeatable, of as many classes as possible."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    if labels is None:
        return order[:count]
    seen: dict[int, int] = {}
    turns = []
    for position in order:
        label = int(labels[position])
        seen[label] = seen.get(label, 0) + 1
        turns.append((label < 0, seen[label], position))
    return [position for _, _, position in sorted(turns, key=lambda turn: turn[:2])[:count]]


# Negatives.


def negatives(bank: MemoryBank, labels: Tensor | None, anchors: Sequence[int], pool_fraction: float) -> Found | None:
    """What each strategy would draw for a few anchors; None where all images are in one cluster.

    With labels also the share of false negatives (another cluster, the same label) over many anchors.
    """
    if int((bank.counts > 0).sum()) < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    index = torch.tensor(list(anchors))
    shown: list[Found] = [{"image": anchor, "draws": {}} for anchor in anchors]
    for name, sampler in every_strategy(NEGATIVES, pool_fraction).items():
        query = bank.features[index].float()
        pairs = sampler.draw(query, index, bank, generator)
        for row, entry in enumerate(shown):
            drawn = [i for i in pairs.negative[row].tolist() if i >= 0]
            cosine = bank.features[drawn].float() @ query[row]
            order = torch.argsort(cosine, descending=True, stable=True).tolist()
            entry["draws"][name.capitalize()] = [[drawn[i], round(float(cosine[i]), 3)] for i in order]
            entry["positive"] = int(pairs.positive[row])
    found: Found = {"anchors": shown, "poolFraction": pool_fraction}
    if labels is not None and bool((labels >= 0).any()):
        found["counted"], found["false"] = _false_shares(bank, labels, pool_fraction, generator)
    return found


def _false_shares(
    bank: MemoryBank, labels: Tensor, pool_fraction: float, generator: torch.Generator
) -> tuple[int, dict[str, float]]:
    """How many negatives of an anchor are counted, and the share of false ones by strategy.

    As many for all as the smallest pool holds: the nearest 13 are false more often than the nearest 32.
    """
    others = bank.size - int(bank.counts.max())  # of an anchor in the largest cluster
    pools = [sampler.pool_size(others) for sampler in every_strategy(1, pool_fraction).values()]
    count = min(COUNTED_NEGATIVES, *pools)
    known = (labels >= 0).nonzero().flatten()
    wanted = COUNTED_ANCHORS if bank.size <= LARGE_BANK else COUNTED_ANCHORS // 8
    index = known[torch.randperm(len(known), generator=generator)[:wanted]]
    shares = {
        name.capitalize(): round(false_negatives(bank, sampler, labels, index, generator) or 0.0, 4)
        for name, sampler in every_strategy(count, pool_fraction).items()
    }
    return count, shares


# Duplicates and outliers.


def exact_duplicates(digests: Sequence[bytes]) -> Found:
    """How many groups of equal images there are and how many copies too many, and the largest groups."""
    groups = equal_groups(digests)
    return {
        "groups": len(groups),
        "surplus": sum(len(group) - 1 for group in groups),
        "shown": [{"count": len(group), "images": group[:COPIES]} for group in groups[:PAIRS]],
    }


def equal_groups(digests: Sequence[bytes]) -> list[list[int]]:
    """Positions of images that are equal pixel for pixel, the largest groups first."""
    by_digest: dict[bytes, list[int]] = {}
    for position, digest in enumerate(digests):
        by_digest.setdefault(digest, []).append(position)
    return sorted((group for group in by_digest.values() if len(group) > 1), key=lambda group: (-len(group), group))


def alike_pairs(cosine: Tensor, nearest: Tensor, tiny: Tensor) -> Pairs:
    """Pairs of which one is the other's nearest to the network, but for copies and near copies, the closest first."""
    one = torch.arange(len(nearest)).repeat_interleave(nearest.shape[1])
    copies = (likeness(tiny, one, nearest.flatten()) >= SAME_PICTURE).view(nearest.shape)
    pairs: Pairs = {}
    for position in range(len(nearest)):
        for value, other, copy in zip(*(found[position].tolist() for found in (cosine, nearest, copies)), strict=True):
            if not copy:
                pairs[min(position, other), max(position, other)] = value
                break
    return closest_first(pairs)


def closest(pairs: Pairs) -> Found:
    """How many pairs there are, and the closest."""
    shown = [{"images": [*pair], "likeness": round(value, 4)} for pair, value in islice(pairs.items(), PAIRS)]
    return {"count": len(pairs), "shown": shown}


def outliers(cosine: Tensor) -> list[Found]:
    """The images least like even their nearest neighbours: the lowest mean cosine with them."""
    mean = cosine.mean(dim=1)
    lowest = torch.argsort(mean, stable=True)[: min(OUTLIERS, len(mean) // 2)].tolist()
    return [{"image": position, "cosine": round(float(mean[position]), 4)} for position in lowest]
