"""A stand-in bank and an independent, slow statement of what each sampler must return."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from interclr.samplers import Hard, Random, SemiEasy, SemiHard

STRATEGIES = {"hard": Hard, "semi_hard": SemiHard, "random": Random, "semi_easy": SemiEasy}


@dataclass
class StandInBank:
    features: Tensor
    labels: Tensor
    counts: Tensor

    def members(self) -> tuple[Tensor, Tensor]:
        return self.labels.argsort(stable=True), self.counts.cumsum(0) - self.counts


def make_bank(features: Tensor, labels: list[int] | Tensor, clusters: int | None = None) -> StandInBank:
    labels = torch.as_tensor(labels, dtype=torch.int64)
    return StandInBank(features, labels, torch.bincount(labels, minlength=clusters or 0))


def grid_bank(labels: list[int], seed: int = 0, dim: int = 3, span: int = 2) -> StandInBank:
    """Small whole numbers as features: products are exact in float32 and ties abound."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randint(-span, span + 1, (len(labels), dim), generator=generator).float()
    return make_bank(features, labels)


def pool(strategy: str, query: Tensor, label: int, bank: StandInBank, fraction: str = "0.1") -> list[int]:
    """The exact pool of one anchor, best first."""
    others = [j for j in range(len(bank.labels)) if int(bank.labels[j]) != label]
    score = {j: sum(a * b for a, b in zip(query.tolist(), bank.features[j].tolist(), strict=True)) for j in others}
    if strategy == "random":
        return others
    ranked = sorted(others, key=lambda j: (score[j] if strategy == "semi_easy" else -score[j], j))
    return ranked if strategy == "hard" else ranked[: math.ceil(Fraction(fraction) * len(others))]


def negatives(
    strategy: str, query: Tensor, label: int, bank: StandInBank, count: int, priority: Tensor, fraction: str
) -> list[int]:
    """What one anchor must draw, given the order of preference."""
    members = pool(strategy, query, label, bank, fraction)
    if strategy != "hard":
        members = [j for j in priority.tolist() if j in set(members)]
    width = min(count, len(bank.labels))
    return (members + [-1] * width)[:width]
