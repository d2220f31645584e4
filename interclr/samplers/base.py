"""Which images an anchor is compared with: one positive from its own cluster, K negatives from the others.

**Random numbers.** A draw uses one random priority per bank entry, a permutation of 0..N-1 shared by all anchors of the
batch; an anchor takes the K entries of its pool that come first in it. For one anchor that is exactly uniform without
replacement over its pool. It costs N random numbers instead of A·N, and makes the draw of an anchor independent of
which other anchors are in its batch: however a batch is divided over ranks, each anchor gets the same pairs, provided
the ranks' random numbers agree. The price: within one step the draws of two anchors are correlated (where their pools
overlap they prefer the same entries). Between steps they are independent.

**Ties.** Entries equally similar to the anchor are ordered by bank index, so a pool is one exact set; with candidates,
by their place in the priority. Similarities are float32 products; entries closer to each other than their rounding may
change places between devices or batch shapes (more so if TF32 is switched on for matrix products).

**Nothing waits for the host** in :meth:`Sampler.draw`: shapes depend on N, K and the pool fraction alone, and slots for
which no image exists hold −1. :meth:`Sampler.check` is where a sampler looks at the numbers.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from interclr.checks import WHOLE, check_tensors
from interclr.types import Config, Pairs, UserError


class Bank(Protocol):
    """What a sampler reads of the memory bank; no cluster of an image is empty, labels and counts agree."""

    features: Tensor  # (N, D) float, normalised
    labels: Tensor  # (N,) int64
    counts: Tensor  # (k,) int64

    def members(self) -> tuple[Tensor, Tensor]:
        """Image indices grouped by label (N,), and where each group starts (k,)."""
        ...


class Negatives(NamedTuple):
    image: Tensor  # (A, width) bank indices
    cosine: Tensor | None = None  # (A, width), −inf where the index is −1


class Candidates(NamedTuple):
    image: Tensor  # (M,) bank indices in the order of preference
    features: Tensor  # (M, D) float32
    labels: Tensor  # (M,)


class Prepared(NamedTuple):
    """What of a draw does not depend on the anchors' features: it can be worked out while they are."""

    label: Tensor  # (A,) the anchors' clusters
    positive: Tensor  # (A,) bank indices
    priority: Tensor  # (N,) bank entries in the order in which they are preferred as negatives
    candidates: Candidates | None  # where only those are ranked


class Sampler(ABC):
    """Draws the pairs of a batch of anchors. A strategy says how it selects negatives; positives are common to all."""

    def __init__(self, negatives: int, pool_fraction: float = 0.1, workspace: int = 2**28) -> None:
        """``negatives`` is K. ``pool_fraction`` is ignored by strategies whose pool is all of Sⁿ.

        ``workspace`` bounds the bytes of the largest temporaries, those with an entry for each anchor and image that is
        ranked: anchors are taken in chunks of as many as fit (one at least).
        """
        if negatives < 1:
            raise ValueError(f"negatives must be at least 1, not {negatives}")
        if not 0 < pool_fraction <= 1:
            raise ValueError(f"pool_fraction must be above 0 and at most 1, not {pool_fraction}")
        self.negatives = negatives
        self.pool_fraction = pool_fraction
        self.workspace = workspace
        self._warned = False

    @torch.no_grad()
    def draw(
        self,
        query: Tensor,  # (A, D) normalised
        index: Tensor,  # (A,) the anchors' own images
        bank: Bank,
        generator: torch.Generator | None = None,
        *,
        hand_on_cosines: bool = False,
    ) -> Pairs:
        """One positive and min(K, N) negatives for each anchor, as indices into the bank; −1 where too few exist.

        ``hand_on_cosines``: the negatives' cosines to ``query``, where they were worked out, go with the pairs, and
        ``losses.cosines`` takes them from there: right for the loss of this very query, and for no other.

        A generator on the bank's device avoids a copy from the host. Training calls the two halves, ``prepare`` and
        ``complete``, with random numbers of the global batch.
        """
        _check_anchors(query, index, bank)
        source = bank.labels.device if generator is None else generator.device
        priority = torch.randperm(bank.labels.shape[0], generator=generator, device=source).to(bank.labels.device)
        lots = torch.randint(2**62, index.shape, generator=generator, device=source).to(bank.labels.device)
        pairs = self.select(query, index, bank, priority, lots)
        return pairs if hand_on_cosines else replace(pairs, cosine=None)

    @torch.no_grad()
    def select(self, query: Tensor, index: Tensor, bank: Bank, priority: Tensor, lots: Tensor) -> Pairs:
        """The pairs that follow from given random numbers, without any of its own.

        ``priority`` (N,) lists the bank entries in the order in which they are preferred as negatives; ``lots`` (A,)
        are uniform integers from [0, 2⁶²), one for each anchor's positive.
        """
        return self.complete(query, self.prepare(index, bank, priority, lots), bank)

    @torch.no_grad()
    def prepare(self, index: Tensor, bank: Bank, priority: Tensor, lots: Tensor) -> Prepared:
        """The first half of ``select``, for which nothing has to be known of the query."""
        label = bank.labels[index]  # (A,)
        return Prepared(label, select_positive(index, label, bank, lots), priority, self.candidates_of(bank, priority))

    @torch.no_grad()
    def complete(self, query: Tensor, prepared: Prepared, bank: Bank) -> Pairs:
        """The second half of ``select``."""
        with torch.autocast(query.device.type, enabled=False):
            return Pairs(prepared.positive, *self.select_negatives(query, prepared, bank))

    @abstractmethod
    def select_negatives(self, query: Tensor, prepared: Prepared, bank: Bank) -> Negatives:
        """(A, width) bank indices whose label differs from the anchor's, each at most once, −1 where too few exist.

        With them their cosines to the query where the strategy has them at hand.
        """

    def candidates_of(self, bank: Bank, priority: Tensor) -> Candidates | None:
        """A sample of the bank that is ranked in its place; None where all of it is."""
        return None

    def width(self, bank: Bank) -> int:
        """Negatives per anchor: K, or N in a bank smaller than K."""
        return min(self.negatives, bank.labels.shape[0])

    def pool_size(self, others: int) -> int:
        """How many images are drawn from, when ``others`` = |Sⁿ| have another label than the anchor."""
        return others

    def expected_pool(self, others: int, size: int) -> int:
        """``pool_size``, or its mean where it varies from step to step, in a bank of ``size``."""
        return self.pool_size(others)

    def check(self, bank: Bank) -> None:
        """Fail if some anchor has no negative at all, and say once if some have fewer than K. Waits for the host."""
        _check_has_clusters(bank)
        size, counts = bank.labels.shape[0], bank.counts.tolist()
        largest = max(counts)
        if largest >= size:
            raise UserError(
                f"cluster {counts.index(largest)} holds all {size} images, so there are no negatives to draw: use two "
                "clusters or more, or look for collapsed features if there were more before"
            )
        pools = [self.expected_pool(size - count, size) for count in counts if count > 0]
        short = sum(pool < self.negatives for pool in pools)
        if short and not self._warned:
            self._warned = True
            warnings.warn(
                f"negatives={self.negatives}, but images of {short} of {len(pools)} clusters have fewer to draw from, "
                f"{min(pools)} at the least (cluster {counts.index(largest)}, the largest with {largest} of {size} "
                "images): they use what exists. For as many everywhere use fewer negatives, a larger pool_fraction or "
                "more clusters",
                stacklevel=2,
            )


def _check_has_clusters(bank: Bank) -> None:
    if not len(bank.counts):
        raise UserError("this bank has no clusters to draw pairs by: make it with MemoryBank(…, clusters=k)")


def _check_anchors(query: Tensor, index: Tensor, bank: Bank) -> None:
    """What would be broadcast, or counted from the end, in silence. Numbers are looked at on a CPU only."""
    _check_has_clusters(bank)
    size, dim = bank.features.shape
    check_tensors(query=query, index=index)
    if index.ndim != 1 or index.dtype not in WHOLE or query.shape != (len(index), dim):
        raise UserError(
            f"a draw takes (A, {dim}) queries and the (A,) indices of their images, not {tuple(query.shape)} and "
            f"{tuple(index.shape)} of {index.dtype}: repeat the indices for several views"
        )
    if index.device.type == "cpu" and len(index) and not torch.compiler.is_compiling():
        low, high = (int(value) for value in index.aminmax())
        if low < 0 or high >= size:
            raise UserError(f"the bank holds images 0 to {size - 1}, not {low if low < 0 else high}")


class SimilaritySampler(Sampler):
    """A strategy that ranks the bank by similarity to each anchor; anchors are taken in chunks to bound memory."""

    farthest_first = False

    @abstractmethod
    def pick(self, key: Tensor, others: Tensor, bank: Bank, priority: Tensor) -> Tensor:
        """(a, width) negatives given distinct ranking keys (a, N), larger for better, and the sizes |Sⁿ| (a, 1)."""

    def select_negatives(self, query: Tensor, prepared: Prepared, bank: Bank) -> Negatives:
        label, size = prepared.label, bank.labels.shape[0]
        sign = -1 if self.farthest_first else 1
        query = query.float() * sign
        others = (size - bank.counts[label])[:, None]  # (A, 1)
        chunk = max(1, self.workspace // (32 * size))  # score, key, mask and temporaries: 32 bytes for each bank entry
        result = label.new_empty(label.shape[0], self.width(bank))
        for begin in range(0, label.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            key = ranking_key(similarity(query[rows], bank.features))  # (a, N)
            key.masked_fill_(bank.labels == label[rows, None], torch.iinfo(torch.int64).min)
            result[rows] = self.pick(key, others[rows], bank, prepared.priority)
        return Negatives(result)


class StrategyConfig(Config):
    """What every strategy's configuration has. ``strategy`` is the class that it builds."""

    strategy: ClassVar[type[Sampler]]
    name: str
    negatives: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"  # K

    def build(self) -> Sampler:
        return self.strategy(self.count())

    def count(self) -> int:
        assert isinstance(self.negatives, int), "auto is resolved before anything is built"
        return self.negatives


def select_positive(index: Tensor, label: Tensor, bank: Bank, lots: Tensor) -> Tensor:
    """(A,) one image of each anchor's cluster, uniform over the others in it; the anchor itself where it is alone."""
    order, start = bank.members()
    position = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    own = position[index] - start[label]  # (A,) the anchor's place in its cluster
    rivals = bank.counts[label] - 1  # (A,)
    place = lots % rivals.clamp_min(1)  # uniform over the other places, counted without the own one ...
    place = place + (place >= own).long()  # ... which is stepped over
    return order[start[label] + torch.where(rivals > 0, place, own)]


def similarity(query: Tensor, features: Tensor) -> Tensor:
    """(a, N) float32 products. A bank kept in half precision is widened a block at a time, never as a whole."""
    if features.dtype == query.dtype:
        return query @ features.T
    return torch.cat([query @ block.to(query.dtype).T for block in torch.split(features, 2**16)], dim=1)


def ranking_key(score: Tensor) -> Tensor:
    """Distinct int64 keys (a, N) that order each row of scores as a stable descending sort would: ties by column.

    The upper half is the float's bits, made to count in the float's order; the lower half is the column, reversed.
    Distinct keys leave ``topk`` no freedom, so it returns the same on every device.
    """
    bits = (score.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal 0.0
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))  # negative floats count down in their magnitude
    columns = torch.arange(score.shape[1] - 1, -1, -1, dtype=torch.int32, device=score.device)
    halves = torch.stack((columns.expand_as(bits), bits), dim=2)  # the lower half comes first in memory
    return halves.view(torch.int64).squeeze(2)
