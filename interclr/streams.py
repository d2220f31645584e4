"""Independent parts of a step side by side on the GPU, where one alone leaves it half idle."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

LATER = 100  # the stream of ``start_beside``
MOST_KEPT = 12  # tensors that jobs of ``start_beside`` may still be reading
_forked: list[torch.cuda.Stream] = []  # since the last join
_kept: list[torch.Tensor] = []


@cache
def _side_stream(number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream()


def run_beside(*jobs: Callable[[], Any]) -> list[Any]:
    """The jobs' results. While a CUDA graph is captured each job but the last gets a stream of its own.

    Convolutions keep the tensor cores busy and BatchNorm the memory: two networks side by side overlap them. Outside a
    capture jobs simply follow each other, where the host could not launch them fast enough to overlap anyway. Safe in a
    graph: a side stream forks once from and joins the capturing stream, so no memory is used again too early. Jobs must
    not write the same state: two passes through one encoder would race for its running statistics.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return [job() for job in jobs]
    current = torch.cuda.current_stream()
    results = []
    for number, job in enumerate(jobs[:-1]):
        side = _side_stream(number)
        side.wait_stream(current)
        _forked.append(side)
        with torch.cuda.stream(side):
            results.append(job())
    results.append(jobs[-1]())
    wait_for_side_streams()
    return results


def start_beside(job: Callable[[], Any], *inputs: torch.Tensor) -> Any:
    """The job's result, to be read after ``wait_for_side_streams``. While a graph is captured it gets a side stream.

    ``inputs`` are what it reads: they are kept, so that their memory is not used for something else, until the current
    stream has waited for the job, which it does every few jobs.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return job()
    side = _side_stream(LATER)
    side.wait_stream(torch.cuda.current_stream())
    if side not in _forked:
        _forked.append(side)
    if len(_kept) >= MOST_KEPT:
        torch.cuda.current_stream().wait_stream(side)
        _kept.clear()
    _kept.extend(inputs)
    with torch.cuda.stream(side):
        return job()


def wait_for_started() -> None:
    """Make the current stream wait for the jobs of ``start_beside`` so far, not for those of ``run_beside``."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() and _side_stream(LATER) in _forked:
        torch.cuda.current_stream().wait_stream(_side_stream(LATER))


def wait_for_side_streams() -> None:
    """Make the current stream wait for what the side streams have been given so far."""
    for side in _forked:
        torch.cuda.current_stream().wait_stream(side)


def join_side_streams() -> None:
    """The same for good: after a backward, which runs on them as well."""
    wait_for_side_streams()
    forget_side_streams()


def forget_side_streams() -> None:
    """Before a capture: one that failed may have left streams behind that are not part of this one."""
    _forked.clear()
    _kept.clear()
