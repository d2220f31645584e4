"""Samplers: which bank entries serve as positives and negatives. A new one is one file and one entry here."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from interclr.samplers.base import Bank, Negatives, Prepared, Sampler, select_positive
from interclr.samplers.hard import Hard, HardConfig
from interclr.samplers.random import Random, RandomConfig
from interclr.samplers.semi_easy import SemiEasy, SemiEasyConfig
from interclr.samplers.semi_hard import SemiHard, SemiHardConfig

SamplerConfig = Annotated[HardConfig | SemiHardConfig | RandomConfig | SemiEasyConfig, Field(discriminator="name")]


def every_strategy(negatives: int, pool_fraction: float) -> dict[str, Sampler]:
    """Each by its name, exact, for pages that show them side by side; a new one's as well."""
    found = {}
    for config in get_args(get_args(SamplerConfig)[0]):
        pool = {"pool_fraction": pool_fraction} if "pool_fraction" in config.model_fields else {}
        found[config.model_fields["name"].default.replace("_", "-")] = config.strategy(negatives, **pool)
    return found


__all__ = [
    "Bank",
    "Hard",
    "HardConfig",
    "Negatives",
    "Prepared",
    "Random",
    "RandomConfig",
    "Sampler",
    "SamplerConfig",
    "SemiEasy",
    "SemiEasyConfig",
    "SemiHard",
    "SemiHardConfig",
    "every_strategy",
    "select_positive",
]
