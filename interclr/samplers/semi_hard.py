"""Semi-hard negatives: random among the nearest. The paper's choice."""

from __future__ import annotations

from typing import ClassVar, Literal

from interclr.samplers.pool import PoolConfig, PoolSampler


class SemiHard(PoolSampler):
    """K at random, without replacement, from the nearest ``pool_fraction`` of Sⁿ."""


class SemiHardConfig(PoolConfig):
    strategy: ClassVar = SemiHard
    name: Literal["semi_hard"] = "semi_hard"
