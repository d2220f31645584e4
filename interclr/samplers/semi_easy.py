"""Semi-easy negatives: random among the farthest."""

from __future__ import annotations

from typing import ClassVar, Literal

from interclr.samplers.pool import PoolConfig, PoolSampler


class SemiEasy(PoolSampler):
    """K at random, without replacement, from the farthest ``pool_fraction`` of Sⁿ."""

    farthest_first = True


class SemiEasyConfig(PoolConfig):
    strategy: ClassVar = SemiEasy
    name: Literal["semi_easy"] = "semi_easy"
