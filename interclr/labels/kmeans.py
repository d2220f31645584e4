"""Global k-means in bounded memory: N = 1.28 million images and k = 10,000 clusters on one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from interclr import kernels
from interclr.bank import check_clusters, check_finite, group_sums, mean_of, row_slices
from interclr.checks import check_tensors
from interclr.types import UserError

FAR = 4.0  # length of the features' mean; that of unit vectors is 1 at most
SCORES = 2**26  # most similarities held at a time: 256 MB of float32


class Clustering(NamedTuple):
    labels: Tensor  # (N,) int64
    centroids: Tensor  # (k, D) float32, the means of the members under `labels`


def auto_clusters(n: int) -> int:
    """``clusters: auto``: k = 10,000 · (N / 1,281,167)^0.78, at least 2 and at most N/2.

    This is the paper's 10,000 for ImageNet, 797 for CIFAR-10's 50,000 images (a prototype gained from many more
    clusters than classes) and 11 for 200 images. The mean cluster grows slowly with N: 18, 63, 128 members.

    On 45,000 images of CIFAR-10 (docs/results-choices.md, 100 epochs, one seed each) its 734 gave MoCov2 as much k-NN
    as 2,500 and 5,000 did, and BYOL no less than 300 and 5,000. 100, ten for each class as in the paper, gave MoCov2
    half of it (with a larger pool of negatives), BYOL less than half of it and nearly all of the low-shot mAP, NPIDv2
    none.
    """
    wanted = round(10_000 * math.pow(n / 1_281_167, 0.78))
    return max(2, min(n // 2, wanted))


def nearest_centroid(features: Tensor, centroids: Tensor) -> Tensor:
    """argmin over c of ‖f − c‖², the paper's assignment, for features (B, D) and centroids (k, D): (B,) int64.

    Worked out as argmax f·c − ‖c‖²/2, which differs by ‖f‖²/2 only. Centroids here are *means* of unit vectors, not
    unit vectors: ‖c‖ ≤ 1, and small for a scattered cluster. A dot product with the normalised centroid, f·c/‖c‖,
    ranks the same if all ‖c‖ are equal; otherwise it favours scattered clusters, whose mean is far from everything.
    A tie goes to the lowest cluster. In float32 under autocast too; memory is bounded by a fixed number of scores.
    """
    with torch.autocast(features.device.type, enabled=False):
        bias = -0.5 * centroids.float().square().sum(dim=1)  # (k,)
        across = centroids.float().T  # (D, k)
        parts = row_slices(len(features), max(1, SCORES // len(centroids)))
        return torch.cat([torch.addmm(bias, features[rows].float(), across).argmax(dim=1) for rows in parts])


@torch.no_grad()
def kmeans(
    features: Tensor,
    k: int,
    iterations: int = 20,
    generator: torch.Generator | None = None,
    start: Literal["random", "k-means++"] | Tensor = "random",
    chunk: int | None = None,
    history: list[float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Clustering:
    """Lloyd's algorithm on features (N, D): assign to the nearest centroid, move centroids to the mean, repeat.

    ``start`` is ``random`` (k different images), ``k-means++`` (better, but k passes over the features: for small k or
    a GPU) or centroids (k, D). No cluster ends empty: one that has lost everyone takes an image farthest from its own
    centroid. Stops early once nothing changes. ``chunk`` is the number of rows at a time and does not matter to the
    result. The objective Σ‖f − c‖² after each assignment is appended to ``history``; it never rises, since an image
    changes its cluster only if its distance, worked out directly, becomes smaller, however rough the matrix product.
    ``progress`` is told of every part of an iteration, with the number of parts there are at most.
    """
    check_tensors(features=features)
    if features.ndim != 2:
        raise UserError(f"k-means takes features (N, D), not {tuple(features.shape)}")
    size, dim = features.shape
    if k < 1:
        raise UserError(f"k-means needs at least one cluster, not k={k}")
    check_clusters(k, size)
    check_finite(features)
    middle = features.mean(0, dtype=torch.float32)
    if FAR < middle.norm() < math.inf:  # far from the origin distances would drown in the rounding of products
        begin = start - middle.to(start.device) if isinstance(start, Tensor) and start.shape == (k, dim) else start
        found = _lloyd(features.float() - middle, k, iterations, generator, begin, chunk, history, progress)
        return Clustering(found.labels, found.centroids + middle)
    return _lloyd(features, k, iterations, generator, start, chunk, history, progress)


def _lloyd(
    features: Tensor,
    k: int,
    iterations: int,
    generator: torch.Generator | None,
    start: Literal["random", "k-means++"] | Tensor,
    chunk: int | None,
    history: list[float] | None,
    progress: Callable[[int, int], None] | None,
) -> Clustering:
    size, dim = features.shape
    keeps_scores = not kernels.usable(features)
    rows_at_once = chunk or max(1, SCORES // max(k if keeps_scores else 1, 8 * dim))
    scale = _scale(features)
    centroids = _start(features, k, generator, start)  # (k, D)
    labels = torch.zeros(size, dtype=torch.int64, device=features.device)
    distance = torch.zeros(size, device=features.device)
    counts = labels.new_zeros(k)
    parts, iterations = row_slices(size, rows_at_once), max(1, iterations)
    for iteration in range(iterations):
        previous = labels.clone()
        for number, rows in enumerate(parts):
            if progress is not None:
                progress(iteration * len(parts) + number, iterations * len(parts))
            part = features[rows].float()
            nearest = _rough_nearest(part, centroids)
            to_own, to_nearest = (_distance(part, centroids[c]) for c in (labels[rows], nearest))
            closer = to_nearest < to_own
            labels[rows] = torch.where(closer, nearest, labels[rows])
            distance[rows] = torch.where(closer, to_nearest, to_own)
        counts.zero_().index_add_(0, labels, torch.ones_like(labels))
        empty = (counts == 0).nonzero().flatten()
        if len(empty):
            _fill_empty(labels, distance, counts, empty)
        if history is not None:
            history.append(float(distance.cpu().double().sum()))
        centroids = mean_of(group_sums(features, labels, k, scale), counts, scale)
        if iteration and torch.equal(labels, previous):
            break
    return Clustering(labels, centroids)


def _rough_nearest(features: Tensor, centroids: Tensor) -> Tensor:
    """``nearest_centroid`` up to rounding, on a GPU by a kernel that keeps no (M, k) scores."""
    if kernels.usable(features, centroids):
        from interclr.kernels.nearest import rough_nearest

        found = rough_nearest(features, centroids)
        if found is not None:
            return found
    return nearest_centroid(features, centroids)


def grouped_order(value: Tensor, group: Tensor) -> Tensor:
    """The order (M,) that sorts by ``group`` and, within a group, by ``value`` ascending; stable."""
    by_value = torch.argsort(value, stable=True)
    return by_value[torch.argsort(group[by_value], stable=True)]


def _fill_empty(labels: Tensor, distance: Tensor, counts: Tensor, empty: Tensor) -> None:
    """Give each empty cluster one of the images farthest from their centroids, in place.

    A cluster gives all but its nearest member at most: since k ≤ N there are always enough to give.
    """
    order = grouped_order(-distance, labels)  # (N,) by cluster, farthest first
    owner = labels[order]
    rank = torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts)[owner]
    free = torch.full_like(distance, -1.0)
    free[order] = torch.where(rank < counts[owner] - 1, distance[order], -1.0)
    taken = torch.argsort(free, descending=True, stable=True)[: len(empty)]  # (empties,) all different
    counts.index_add_(0, labels[taken], -torch.ones_like(taken))
    labels[taken], distance[taken], counts[empty] = empty, 0.0, 1


def _start(
    features: Tensor, k: int, generator: torch.Generator | None, start: Literal["random", "k-means++"] | Tensor
) -> Tensor:
    if isinstance(start, Tensor):
        if tuple(start.shape) != (k, features.shape[1]):
            raise UserError(f"k-means starts from ({k}, {features.shape[1]}) centroids, not {tuple(start.shape)}")
        return start.to(features.device, torch.float32, copy=True)
    if start == "k-means++":
        return features[_plus_plus(features, k, generator)].float()
    if start != "random":
        raise UserError(f"k-means starts from random, k-means++ or centroids (k, D), not {start!r}")
    source = generator.device if generator is not None else None
    chosen = torch.randperm(len(features), generator=generator, device=source)[:k]
    return features[chosen.to(features.device)].float()


def _plus_plus(features: Tensor, k: int, generator: torch.Generator | None) -> Tensor:
    """k-means++: each next image is drawn with probability ∝ its squared distance to the nearest drawn so far.

    The probabilities are summed as integers, so the draw is the same in whatever order a device adds.
    """
    source = generator.device if generator is not None else None
    chance = torch.rand(k, generator=generator, device=source, dtype=torch.float32).to(features.device)
    size = len(features)
    chosen = torch.empty(k, dtype=torch.int64, device=features.device)
    chosen[0] = (chance[0] * size).long().clamp(max=size - 1)
    distance = torch.full((size,), math.inf, device=features.device)
    for i in range(1, k):
        latest = features[chosen[i - 1]].float()  # (D,)
        for rows in row_slices(size):
            distance[rows] = torch.minimum(distance[rows], _distance(features[rows].float(), latest))
        weight = (distance / distance.max().clamp(min=1e-30) * 2.0**30).round().long().cumsum(0)  # (N,)
        aim = (chance[i] * weight[-1]).long().clamp(max=weight[-1] - 1)
        chosen[i] = torch.searchsorted(weight, aim, right=True).clamp(max=size - 1)
    return chosen


def _distance(features: Tensor, centroids: Tensor) -> Tensor:
    return (features - centroids).square_().sum(dim=1)


def _scale(features: Tensor) -> float:
    """The fixed-point unit for features of any size: 2³⁰ for unit vectors, a power of two always."""
    largest = max(float(features[rows].float().abs().max()) for rows in row_slices(len(features)))
    return 2.0 ** min(90, 30 - math.ceil(math.log2(largest))) if largest else 1.0
