"""How training is doing, without labels where possible: rank and spread of the embedding, state of the clusters."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from interclr.bank import MemoryBank
from interclr.features import evenly
from interclr.samplers import Sampler

SAMPLE = 2048  # rows used for the quadratic figures
QUANTILE_LIMIT = 2**24  # clusters that torch's quantile takes; of more, the middle one or its neighbour is told
ANCHORS = 512  # images for which negatives are drawn to look at them


@torch.no_grad()
def embedding_health(features: Tensor) -> dict[str, float]:
    """``rank_me``: effective rank of (n, D) features (Garrido et al. 2023), e^entropy of the singular values.

    ``uniformity``: log mean e^{−2‖x−y‖²} over pairs (Wang & Isola 2020); 0 is collapse, about −4 is spread out.
    """
    if not bool(features.isfinite().all()):
        return {"rank_me": math.nan, "uniformity": math.nan}
    sample = F.normalize(features[:SAMPLE].double(), dim=1)
    singular = torch.linalg.svdvals(sample)
    share = singular / singular.sum().clamp_min(1e-12) + 1e-12
    rank = (-(share * share.log()).sum()).exp()
    squared = (2 - 2 * sample @ sample.T).clamp_min(0)
    others = ~torch.eye(len(sample), dtype=torch.bool, device=sample.device)
    uniformity = (-2 * squared[others]).exp().mean().log()
    return {"rank_me": rank.item(), "uniformity": uniformity.item()}


@torch.no_grad()
def cluster_health(bank: MemoryBank, labels: Tensor | None) -> dict[str, float]:
    """Sizes and entropy (1: all equal, 0: one holds everything); NMI and purity where true labels exist.

    True labels are looked at here and never used for training.
    """
    counts = bank.counts.double()
    share = counts / counts.sum()
    entropy = -(share * share.clamp_min(1e-12).log()).sum().item() / max(math.log(len(counts)), 1e-12)
    figures = {
        "cluster_min": counts.min().item(),
        "cluster_median": counts.quantile(0.5).item() if len(counts) < QUANTILE_LIMIT else counts.median().item(),
        "cluster_max": counts.max().item(),
        "cluster_entropy": entropy,
    }
    if labels is not None and bool((labels >= 0).any()):
        known = labels >= 0
        figures |= agreement(bank.labels[known.to(bank.labels.device)].cpu(), labels[known].cpu())
    return figures


@torch.no_grad()
def pair_health(bank: MemoryBank, sampler: Sampler | None, labels: Tensor | None) -> dict[str, float]:
    """How often a pair is what it is taken for, where true labels exist (never used for training).

    ``positives_right``: the share of positives of the anchor's class, expected over all draws, for images that have
    others in their cluster (one that is alone is its own positive, which says nothing). ``negatives_wrong``: the
    share of negatives of its class, in one draw for some images as the bank has them; by chance it would be the share
    of the class. The draw has random numbers of its own: a run is the same whether it is looked at or not.
    """
    if labels is None or not bool((labels >= 0).any()):
        return {}
    labels = labels.to(bank.labels.device)
    known = (labels >= 0).nonzero().flatten()
    right = _same_class(bank.labels[known], labels[known])
    figures = {} if right is None else {"positives_right": right}
    if sampler is not None:
        anchors = known[evenly(len(known), ANCHORS).to(known.device)]
        wrong = false_negatives(bank, sampler, labels, anchors, torch.Generator().manual_seed(0))
        figures |= {} if wrong is None else {"negatives_wrong": wrong}
    return figures


def false_negatives(
    bank: MemoryBank, sampler: Sampler, labels: Tensor, anchors: Tensor, generator: torch.Generator
) -> float | None:
    """The share of one draw's negatives that have their anchor's label; None where no label is known."""
    negative = sampler.draw(bank.features[anchors].float(), anchors, bank, generator).negative
    counted = (negative >= 0) & (labels[negative] >= 0)
    wrong = (labels[negative] == labels[anchors, None]) & counted
    return (wrong.sum() / counted.sum()).item() if bool(counted.any()) else None


def _same_class(clusters: Tensor, labels: Tensor) -> float | None:
    """The chance that another image of an image's cluster has its label; None where all are alone."""
    cells = _cells(clusters.cpu(), labels.cpu())
    sizes = _sums(cells.cluster, cells.images)[cells.cluster]
    several = sizes > 1
    count, sizes = cells.images[several], sizes[several]
    return ((count * (count - 1) / (sizes - 1)).sum() / count.sum()).item() if len(count) else None


class Cells(NamedTuple):
    """How many images are of one cluster and one label, for the pairs that occur: never more than there are images.

    A whole table would not do: folders of a million images can have a hundred thousand names, which are labels.
    """

    cluster: Tensor  # (n,) int64
    label: Tensor  # (n,) int64
    images: Tensor  # (n,) float64


def _cells(clusters: Tensor, labels: Tensor) -> Cells:
    width = int(labels.max()) + 1
    pairs, count = (clusters.long() * width + labels).unique(return_counts=True)
    return Cells(pairs // width, pairs % width, count.double())


def _sums(group: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(int(group.max()) + 1).index_add_(0, group, values)


def agreement(clusters: Tensor, labels: Tensor) -> dict[str, float]:
    """Purity (share of images whose label is the commonest of their cluster) and normalised mutual information."""
    cells, total = _cells(clusters, labels), len(labels)
    joint = cells.images / total
    rows, columns = _sums(cells.cluster, joint), _sums(cells.label, joint)
    mutual = (joint * (joint / (rows[cells.cluster] * columns[cells.label])).log()).sum()
    entropies = -torch.special.xlogy(rows, rows).sum(), -torch.special.xlogy(columns, columns).sum()
    mean = (entropies[0] + entropies[1]) / 2
    nmi = (mutual / mean).item() if mean > 0 else 1.0
    commonest = torch.zeros_like(rows).scatter_reduce_(0, cells.cluster, cells.images, "amax")
    return {"purity": (commonest.sum() / total).item(), "nmi": nmi}


def warnings_of(figures: dict[str, float], dim: int, size: int) -> list[str]:
    """What is wrong, said aloud, with what to try."""
    said = []
    rank, possible = figures.get("rank_me"), min(dim, size, SAMPLE)  # n images span n directions at most
    least = min(2.0, 0.5 * possible) if possible < 100 else 0.02 * possible
    if rank is not None and not rank >= least:  # so that NaN counts as collapsed
        said.append(
            f"the embedding has collapsed to an effective rank of {rank:.1f} of {possible}: unless the images "
            "themselves are all alike (interclr data check), try a lower optimiser.base_lr, a longer "
            "schedule.warmup_epochs or, with the inter branch, a higher inter.intra_weight"
        )
    largest = figures.get("cluster_max")
    if figures.get("cluster_median", 2.0) <= 1 and (largest is None or largest <= 0.5 * size):
        said.append(
            "most clusters hold a single image, so the inter branch relates hardly any two images: try fewer "
            "inter.clusters"
        )
    if largest is not None and largest > 0.5 * size and figures.get("cluster_entropy", 0.0) < 0.9:  # of two, one does
        said.append(
            f"one cluster holds {largest:.0f} of {size} images: try inter.warmup_epochs, more inter.clusters or a "
            "higher inter.intra_weight"
        )
    elif figures.get("cluster_entropy", 1.0) < 0.5:
        said.append(
            f"the clusters are very uneven (entropy {figures['cluster_entropy']:.2f} of 1): try fewer inter.clusters "
            "or a larger inter.labels.min_cluster"
        )
    return said
