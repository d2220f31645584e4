from __future__ import annotations

import time

import pytest
import torch

from interclr.engine.waiting import DataWait


class Work:
    """Stands for a CUDA event: whether the GPU has done what it was given."""

    def __init__(self, done: bool) -> None:
        self.done, self.records = done, 0

    def query(self) -> bool:
        return self.done

    def record(self) -> None:
        self.records += 1


def waited(wait: DataWait, monkeypatch: pytest.MonkeyPatch) -> float:
    clock = iter((10.0, 12.5))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock, 12.5))
    wait.ask()
    wait.arrived()
    wait.stepped()
    return wait.take()


def test_on_a_cpu_every_wait_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = DataWait(torch.device("cpu"))
    assert waited(wait, monkeypatch) == 2.5
    assert wait.take() == 0


@pytest.mark.parametrize(("idle", "seconds"), [(True, 2.5), (False, 0.0)])
def test_on_a_gpu_a_wait_counts_if_it_left_the_gpu_idle(
    idle: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = DataWait(torch.device("cpu"))
    work = Work(done=idle)
    wait.given = work  # type: ignore[assignment]
    assert waited(wait, monkeypatch) == seconds
    assert work.records == 1
