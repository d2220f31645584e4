"""Samplers: which bank entries serve as positives and negatives. A new one is one file and one entry here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from interclr.samplers.base import Bank, Negatives, Prepared, Sampler, select_positive
from interclr.samplers.hard import Hard, HardConfig
from interclr.samplers.random import Random, RandomConfig
from interclr.samplers.semi_easy import SemiEasy, SemiEasyConfig
from interclr.samplers.semi_hard import SemiHard, SemiHardConfig

SamplerConfig = Annotated[HardConfig | SemiHardConfig | RandomConfig | SemiEasyConfig, Field(discriminator="name")]

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
    "select_positive",
]
