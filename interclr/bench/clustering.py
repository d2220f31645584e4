"""Global k-means at ImageNet's size."""

from __future__ import annotations

import time
from typing import Any

import torch

from interclr.bench.setup import clustered_features
from interclr.bench.timing import spread
from interclr.labels.kmeans import kmeans


def measure_kmeans(
    size: int, dim: int, clusters: int, iterations: int, device: torch.device, rounds: int = 3
) -> dict[str, Any]:
    """Seconds of the whole call, checks and filling of empty clusters included."""
    features = clustered_features(size, dim, device)
    times: list[float] = []
    history: list[float] = []
    for number in range(rounds + 1):
        history = []
        begin = time.perf_counter()
        kmeans(features, clusters, iterations, torch.Generator().manual_seed(0), history=history)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number:  # the first call loads and compiles
            times.append(time.perf_counter() - begin)
    return {
        "images": size,
        "dim": dim,
        "clusters": clusters,
        "iterations": len(history),
        "objective": history[-1] / size,
        "seconds": spread(times),
    }
