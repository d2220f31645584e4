"""How long training waits for data: what a user has to know to tell a slow disk from a slow GPU."""

from __future__ import annotations

import time

import torch


class DataWait:
    """Seconds in which there was no batch to work on.

    A GPU is given work ahead of time, and then this process waits for the next batch while the GPU is still busy. That
    costs nothing and is not counted: only a wait at whose end the GPU had nothing left to do is, so at most too much.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self.asked = 0.0
        self.given = torch.cuda.Event() if device.type == "cuda" else None  # behind all the work given so far

    def ask(self) -> None:
        self.asked = time.monotonic()

    def arrived(self) -> None:
        if self.given is None or self.given.query():
            self.seconds += time.monotonic() - self.asked

    def stepped(self) -> None:
        if self.given is not None:
            self.given.record()

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
