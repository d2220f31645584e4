"""Drawing at random from the best part of a ranking: what semi-hard and semi-easy negatives have in common.

**Candidates.** Ranking a bank of a million by similarity to every anchor is most of a draw's cost. With ``candidates``
= M the pool strategies rank only the first M of the priority, a uniform sample of the bank that all anchors share, and
draw from the best ``pool_fraction`` of those with another label. What changes: the pool's border is the quantile of a
sample, so for an anchor the share of Sⁿ that counts as near varies by at most √(f(1−f)/M) (0.0007 around 0.1 with
M = 172,000; 0.003 with 11,000); over the anchors of a step it averages out. Everything else stays: K without
replacement, never one of the anchor's cluster, each pool member equally likely. ``benchmarks/candidates.py``
measures it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from interclr import kernels
from interclr.samplers.base import (
    Bank,
    Candidates,
    Negatives,
    Prepared,
    SimilaritySampler,
    StrategyConfig,
    ranking_key,
)
from interclr.types import UserError

SAMPLE = 512  # scores per anchor, at most, that a CPU looks at to guess what the pool leaves out


class PoolSampler(SimilaritySampler):
    """K at random from the first ``pool_fraction`` of Sⁿ in the ranking; ``candidates``: of a sample of Sⁿ."""

    def __init__(
        self, negatives: int, pool_fraction: float = 0.1, workspace: int = 2**28, candidates: int | None = None
    ) -> None:
        super().__init__(negatives, pool_fraction, workspace)
        if candidates is not None and candidates < negatives:
            raise UserError(f"inter.sampler.candidates must be at least negatives={negatives}, not {candidates}")
        self.candidates = candidates

    def expected_pool(self, others: int, size: int) -> int:
        if self.candidates is None or self.candidates >= size:
            return self.pool_size(others)
        return self.pool_size(others * self.candidates // size)

    def candidates_of(self, bank: Bank, priority: Tensor) -> Candidates | None:
        if self.candidates is None or self.candidates >= bank.labels.shape[0]:
            return None
        chosen = priority[: self.candidates]
        return Candidates(chosen, bank.features.index_select(0, chosen).float(), bank.labels[chosen])

    def select_negatives(self, query: Tensor, prepared: Prepared, bank: Bank) -> Negatives:
        if prepared.candidates is None:
            return super().select_negatives(query, prepared, bank)
        chosen, features, labels = prepared.candidates
        query = -query.float() if self.farthest_first else query.float()
        fast = kernels.usable(query, features)
        plain = self._select_on_cpu if query.device.type == "cpu" else self._select_plain
        select = self._select_fast if fast else plain
        rows = max(1, self.workspace // ((4 if fast else 32) * len(chosen)))
        anchors = zip(query.split(rows), prepared.label.split(rows), strict=True)
        parts = [select(part @ features.T, own, labels, chosen) for part, own in anchors]
        index, cosine = (torch.cat(both) for both in zip(*parts, strict=True))
        return Negatives(index, (-cosine).masked_fill_(index < 0, -torch.inf) if self.farthest_first else cosine)

    def _select_fast(self, score: Tensor, label: Tensor, labels: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        from interclr.kernels.select import select_pool

        width = min(self.negatives, score.shape[1])
        return select_pool(score, labels.int(), label.int(), chosen, width, self._fraction())

    def _select_plain(self, score: Tensor, label: Tensor, labels: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """What ``_select_fast`` computes, by sorting: the best ``pool_fraction``, then the first K in preference."""
        columns, width = score.shape[1], min(self.negatives, score.shape[1])
        same = labels == label[:, None]  # (a, M)
        key = ranking_key(score).masked_fill_(same, torch.iinfo(torch.int64).min)
        pool = key.topk(self.pool_size(columns)).indices  # (a, largest), best first
        sizes = self._pool_sizes(columns - same.count_nonzero(1))[:, None]  # (a, 1)
        pool.masked_fill_(torch.arange(pool.shape[1], device=pool.device) >= sizes, columns)
        column = pool.sort(1).values[:, :width]  # columns are in the order of preference
        column = torch.nn.functional.pad(column, (0, width - column.shape[1]), value=columns)
        none, column = column == columns, column.clamp_max(columns - 1)
        return chosen[column].masked_fill_(none, -1), score.gather(1, column).masked_fill_(none, -torch.inf)

    def _select_on_cpu(self, score: Tensor, label: Tensor, labels: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The same, faster, where shapes may depend on values: only what lies above a floor is sorted."""
        scores, own, cluster = score.numpy(), label.numpy()[:, None], labels.numpy()
        (anchors, columns), width = scores.shape, min(self.negatives, score.shape[1])
        members = np.bincount(cluster, minlength=own.max(initial=0) + 1)  # (k,)
        sizes = self._pool_sizes(columns - torch.from_numpy(members[own])).numpy()  # (a, 1)
        for floor in (self._floor(scores, cluster, own), -np.inf):
            flat, valid = first_true(~(scores < floor))  # (a, w); not >=, so that a row of NaN has a pool as well
            column = flat - columns * np.arange(anchors)[:, None]
            valid &= cluster.take(column, mode="clip") != own
            if (valid.sum(1, keepdims=True) >= sizes).all():
                break
        value = np.where(valid, scores.take(flat), -np.inf)
        last = np.take_along_axis(np.sort(value), value.shape[1] - np.maximum(sizes, 1), 1)  # (a, 1) each pool's least
        pool = valid & ~(value < last)
        if (pool.sum(1, keepdims=True) > sizes).any():  # of the entries equal to the least, the first belong to it
            equal = pool & ~(value > last)
            pool &= ~equal | (equal.cumsum(1) <= sizes - (pool & ~equal).sum(1, keepdims=True))
        place, exists = first_true(pool, width)
        index = np.where(exists, chosen.numpy().take(column.take(place), mode="clip"), -1)
        return torch.from_numpy(index), torch.from_numpy(np.where(exists, value.take(place), -np.inf))

    def _floor(self, scores: Any, cluster: Any, own: Any) -> Any:
        """(a, 1) scores that hardly any pool goes below. Columns are in random order, so the first are a sample."""
        share, count = self.pool_fraction, min(SAMPLE, scores.shape[1] // 4)
        rank = math.ceil(count * share + 4 * math.sqrt(count * share * (1 - share)))  # four standard deviations
        if rank >= count // 2:
            return -math.inf
        sample = np.where(cluster[:count] != own, scores[:, :count], -np.inf)
        return np.partition(sample, count - rank, 1)[:, count - rank, None]

    def _pool_sizes(self, others: Tensor) -> Tensor:
        """``pool_size`` of each of ``others``."""
        numerator, denominator = self._fraction()
        return -torch.div(-others * numerator, denominator, rounding_mode="floor")

    def pool_size(self, others: int) -> int:
        numerator, denominator = self._fraction()
        return -(-others * numerator // denominator)

    def pick(self, key: Tensor, others: Tensor, bank: Bank, priority: Tensor) -> Tensor:
        return self._first_of_pool(key, others, priority, self.width(bank))

    def _first_of_pool(self, key: Tensor, others: Tensor, priority: Tensor, width: int) -> Tensor:
        """(a, width) columns of ``key``: of each row's pool those that come first in ``priority``, then −1."""
        size = key.shape[1]
        largest = self.pool_size(size)  # no pool has more, so the shape needs no look at the counts
        pool_size = self._pool_sizes(others)  # (a, 1)
        position = torch.empty_like(priority).scatter_(0, priority, torch.arange(size, device=key.device))  # (N,)
        pool = key.topk(largest).indices  # (a, largest), best first
        turn = position[pool]  # (a, largest) when each entry's turn comes
        turn.masked_fill_(torch.arange(largest, device=key.device) >= pool_size, size)  # never: beyond the pool
        turn = turn.topk(min(width, largest), largest=False).values
        negative = priority[turn.clamp_max(size - 1)].masked_fill_(turn >= size, -1)
        return torch.nn.functional.pad(negative, (0, width - negative.shape[1]), value=-1)

    def _fraction(self) -> tuple[int, int]:
        # As a ratio of integers, because in floating point ceil(0.1 · 70) is 8. Nine digits leave room in int64.
        fraction = Fraction(self.pool_fraction).limit_denominator(10**9)
        return max(fraction, Fraction(1, 10**9)).as_integer_ratio()


class PoolConfig(StrategyConfig):
    strategy: ClassVar[type[PoolSampler]]
    pool_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1  # share of Sⁿ drawn from
    candidates: Annotated[int, Field(ge=1)] | Literal["auto", "all"] = (
        "auto"  # M: rank a sample of the bank; all: exact
    )

    def build(self) -> PoolSampler:
        candidates = self.candidates if isinstance(self.candidates, int) else None  # auto that nobody settled: exact
        return self.strategy(self.count(), self.pool_fraction, candidates=candidates)


def first_true(mask: Any, width: int | None = None) -> tuple[Any, Any]:
    """Flat positions (a, width) of the first true entries of each row, and which exist; the others are anything valid.

    Without ``width`` all of them.
    """
    flat = np.flatnonzero(mask)
    begin = np.searchsorted(flat, np.arange(len(mask) + 1) * mask.shape[1])
    count = np.diff(begin)[:, None]
    slot = np.arange(count.max(initial=0) if width is None else width)
    return np.append(flat, 0).take(begin[:-1, None] + slot, mode="clip"), slot < count
