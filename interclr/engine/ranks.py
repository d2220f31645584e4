"""What the processes of one run agree on: data and settings before it, when to stop and what was met during it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as torch_dist

from interclr import dist
from interclr.config import Settings
from interclr.engine.resume import compared, differing
from interclr.types import UserError

LOOK_SECONDS = 5.0  # between two looks at each other
LOST = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe")  # of what a collective says then


def same_on_all_ranks(what: str, value: str | int | None) -> None:
    """An error, on every rank, where one of them has another ``value`` than the first."""
    values = dist.gathered(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise UserError(f"process {rank} has another {what}: {other}, process 0 has {values[0]}")


def same_settings_on_all_ranks(settings: Settings) -> None:
    """Replicas of other rates, or banks of other clusters, would drift apart without a word."""
    values = dist.gathered(compared(settings))
    for rank, other in enumerate(values):
        for key in differing(values[0], other):
            raise UserError(
                f"process {rank} has {key}={other.get(key)}, process 0 has {values[0].get(key)}: start all processes "
                "with the same recipe and settings"
            )


def lost_another(error: Exception) -> bool:
    """Whether ``error`` is what a process is told when another of its run has ended."""
    text = str(error).lower()
    return dist.world() > 1 and (isinstance(error, torch_dist.DistError) or any(word in text for word in LOST))


class Looks:
    """Ranks stop at the same step, and each knows what images the others could not read.

    They compare now and then, for which the host waits: as often as the log is written, and more often where steps are
    slow, since torchrun kills half a minute after a signal.
    """

    def __init__(self, device: torch.device, step: int, most_steps: int) -> None:
        self.device, self.most_steps = device, most_steps
        self.unreadable: dict[str, str] = {}  # of all ranks
        self._counted = 0.0
        self._at, self._step, self._next = time.monotonic(), step, step + 1

    def all_stop(self, step: int, asked: bool, met: Callable[[], dict[str, str]]) -> bool:
        """Whether one was asked to; ``met`` tells of the images that this one could not read."""
        if dist.world() == 1:
            return asked
        if step < self._next:
            return False
        now, unreadable = time.monotonic(), met()
        own = [float(asked), (now - self._at) / (step - self._step), float(len(unreadable))]
        # The same on every rank, and with it what follows: who gathers, and the next step to compare at.
        stop, pace, count = dist.all_reduce_mean(torch.tensor(own, device=self.device)).tolist()
        if count != self._counted:
            self._counted = count
            self.unreadable = dict(item for found in dist.gathered(unreadable) for item in found.items())
        self._at, self._step = now, step
        self._next = step + max(1, min(self.most_steps, int(LOOK_SECONDS / max(pace, 1e-6))))
        return bool(stop > 0)
