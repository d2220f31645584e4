"""Which images a run keeps from its training."""

from __future__ import annotations

import torch

from interclr.data.source import Source
from interclr.data.subset import Subset

HOLD_OUT_SEED = 20_260_101  # fixed: what is held out does not change with the seed of a run


def split_off(source: Source, count: int) -> tuple[Source, Source]:
    """The images to train on, and ``count`` held out."""
    shuffled = torch.randperm(len(source), generator=torch.Generator().manual_seed(HOLD_OUT_SEED))
    held, kept = shuffled[:count].sort().values, shuffled[count:].sort().values
    return Subset(source, kept.tolist()), Subset(source, held.tolist(), f"{source.name}, held out")
