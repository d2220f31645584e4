"""Weighted k-nearest-neighbour classification on cosine similarity: the yardstick during and after training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 1 << 27  # similarities held at once: 512 MB in float32


def auto_k(images: int) -> int:
    """200, the usual; of less than 10,000 images a fiftieth."""
    return max(1, min(200, images // 50))


@torch.no_grad()
def nearest_rows(bank: Tensor, queries: Tensor, k: int, own_from: int | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and bank rows of the ``k`` nearest to each query, nearest first: (Q, k) each.

    In float32, also where the features are not; a process that allows TF32 products gets their rounding. Where the
    queries are rows of the bank itself, those from ``own_from`` on, none is among its own neighbours.
    """
    bank, queries = F.normalize(bank.float(), dim=1), F.normalize(queries.float(), dim=1)
    k = min(k, len(bank) - (own_from is not None))
    found: list[tuple[Tensor, Tensor]] = []
    for part in queries.split(max(1, CHUNK_ELEMENTS // len(bank))):
        similarity = part @ bank.T  # (q, N)
        if own_from is not None:
            similarity.diagonal(own_from).fill_(-torch.inf)
            own_from += len(part)
        found.append(similarity.topk(k))
        del similarity  # before the next is made
    return torch.cat([similarity for similarity, _ in found]), torch.cat([nearest for _, nearest in found])


def votes_of(similarity: Tensor, labels: Tensor, classes: int, temperature: float) -> Tensor:
    """Votes (Q, classes) of neighbours' ``labels`` (Q, k) with weight e^{s/T}; the first neighbour is the nearest."""
    # e^{(s−s_max)/T}: the same ranking as e^{s/T} without overflow at small T
    weights = ((similarity - similarity[:, :1]) / temperature).exp()
    return weights.new_zeros(len(labels), classes).scatter_add_(1, labels, weights)


@torch.no_grad()
def knn_accuracy(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, query_labels: Tensor, k: int = 200, temperature: float = 0.1
) -> float:
    """Top-1 accuracy in percent."""
    classes = int(torch.maximum(bank_labels.max(), query_labels.max())) + 1
    similarity, nearest = nearest_rows(bank, queries, k)
    step, right = max(1, CHUNK_ELEMENTS // classes), query_labels.new_zeros(())
    for begin in range(0, len(queries), step):  # of very many classes a few at a time
        rows = slice(begin, begin + step)
        scores = votes_of(similarity[rows], bank_labels[nearest[rows]], classes, temperature)
        right = right + (scores.argmax(1) == query_labels[rows]).sum()
    return 100 * right.item() / len(queries)
