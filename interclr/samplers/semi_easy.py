"""Semi-easy negatives: random among the farthest."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from interclr.samplers.pool import PoolSampler
from interclr.types import Config


class SemiEasy(PoolSampler):
    """K at random, without replacement, from the farthest ``pool_fraction`` of Sⁿ."""

    farthest_first = True


class SemiEasyConfig(Config):
    name: Literal["semi_easy"] = "semi_easy"
    negatives: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"  # K
    pool_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1  # share of Sⁿ drawn from
    candidates: Annotated[int, Field(ge=1)] | Literal["auto", "all"] = (
        "auto"  # M: rank a sample of the bank; all: exact
    )

    def build(self) -> SemiEasy:
        assert isinstance(self.negatives, int), "auto is resolved before anything is built"
        candidates = self.candidates if isinstance(self.candidates, int) else None  # auto that nobody settled: exact
        return SemiEasy(self.negatives, self.pool_fraction, candidates=candidates)
