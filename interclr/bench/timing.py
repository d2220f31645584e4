"""Times as they should be taken: device events, warm-up, repeats, spread; a ratio always within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def wait_for(device: torch.device) -> None:
    """Until the device has done all it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def block_milliseconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Milliseconds per call over ``repeats`` calls in a row, the device's own clock where it has one."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        return 1e3 * (time.perf_counter() - started) / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def captured(
    work: Callable[[], object], generators: Sequence[torch.Generator], device: torch.device
) -> Callable[[], object]:
    """``work`` as a CUDA graph, so that its time is the device's alone; as it is on a CPU.

    In training the host launches the inter branch while the device is still busy with the encoders.
    """
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def spread(values: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "low": ordered[0], "high": ordered[-1], "repeats": len(ordered)}


def in_turns(
    works: dict[str, Callable[[], object]], rounds: int, repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Each work in turn, ``rounds`` times over, so that a drift of the clock meets all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(block_milliseconds(work, repeats, device))
    return times


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, Any]:
    """Of the rounds of ``in_turns``, pairwise."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


def matrix_rate(device: torch.device, side: int = 8192) -> float:
    """TFLOP/s of a bf16 matrix product on random numbers: the ceiling that shares refer to."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    times = [block_milliseconds(lambda: left @ right, 10, device) for _ in range(5)]
    return 2 * side**3 / statistics.median(times) / 1e9
