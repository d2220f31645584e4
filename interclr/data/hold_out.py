"""Which images a run keeps from its training, and which are tested on where there is no test split."""

from __future__ import annotations

import torch
from torch import Tensor

from interclr.data.source import Source
from interclr.data.subset import Subset

HOLD_OUT_SEED = 20_260_101  # fixed: what is held out does not change with the seed of a run
TEST_SHARE = 0.2  # of a labelled set without a test split
TEST_SEED = 20_260_102


def split_off(source: Source, count: int) -> tuple[Source, Source]:
    """The images to train on, and ``count`` held out."""
    shuffled = torch.randperm(len(source), generator=torch.Generator().manual_seed(HOLD_OUT_SEED))
    held, kept = shuffled[:count].sort().values, shuffled[count:].sort().values
    return Subset(source, kept.tolist()), Subset(source, held.tolist(), f"{source.name}, held out")


def a_fifth_of_every_class(labels: Tensor) -> Tensor:
    """Which images of a labelled set without a test split are tested on, (N,) bool: the same whoever asks.

    At least one of a class; none of a class with a single image, and none without a label (−1).
    """
    known = (labels >= 0).nonzero().flatten()
    shuffled = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(TEST_SEED))]
    ordered = shuffled[labels[shuffled].argsort(stable=True)]  # class by class, each shuffled
    sizes = labels[ordered].unique_consecutive(return_counts=True)[1]
    wanted = (TEST_SHARE * sizes.double()).round().clamp_min(1) * (sizes > 1)
    place = torch.arange(len(ordered)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)  # within its class
    tested = torch.zeros(len(labels), dtype=torch.bool)
    tested[ordered[place < wanted.repeat_interleave(sizes)]] = True
    return tested
