"""Time the evaluations that have a speed goal, at CIFAR-10's size: k-NN of 50k×10k×512, and all linear heads.

    python benchmarks/evaluate_speed.py [cuda|cpu] [divide the sizes by]

Pixels are random: time does not depend on them. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from interclr.data.source import ArraySource
from interclr.evaluate.base import Context, LabelledData, Subject
from interclr.evaluate.linear import Linear
from interclr.knn import knn_accuracy
from interclr.models import BackboneConfig
from interclr.screen import Screen


def main() -> None:
    parser = argparse.ArgumentParser(description="Time k-NN and linear heads at CIFAR-10's size, on random pixels.")
    parser.add_argument("device", choices=("cuda", "cpu"), nargs="?", default="cuda")
    parser.add_argument("scale", type=int, nargs="?", default=1, help="divide the sizes by this")
    given = parser.parse_args()
    device = torch.device(given.device)
    n, q = 50_000 // given.scale, 10_000 // given.scale

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    bank, queries = torch.randn(n, 512, device=device), torch.randn(q, 512, device=device)
    labels, truth = torch.randint(10, (n,), device=device), torch.randint(10, (q,), device=device)
    times = []
    for _ in range(12):
        wait()
        started = time.perf_counter()
        knn_accuracy(bank, labels, queries, truth)
        wait()
        times.append(time.perf_counter() - started)
    knn = times[2:]  # the first two load kernels

    def source(count: int, seed: int) -> ArraySource:
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return ArraySource(pixels, torch.arange(count) % 10, name=f"noise {seed}")

    subject = Subject(
        BackboneConfig(backbone="resnet18", stem="small").build(), "resnet18", 32, (0.5,) * 3, (0.25,) * 3
    )
    with tempfile.TemporaryDirectory() as folder:
        context = Context(
            Path(folder), device, Screen(quiet=True), 0, torch.bfloat16 if device.type == "cuda" else None
        )
        started = time.perf_counter()
        Linear(preset="cifar").run(subject, LabelledData(source(n, 0), source(q, 1), "noise"), context)
        linear = time.perf_counter() - started
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        json.dumps(
            {
                "machine": machine,
                "torch": torch.__version__,
                "sizes": [n, q],
                "knn_seconds_median": statistics.median(knn),
                "knn_seconds_range": [min(knn), max(knn)],
                "linear_seconds": linear,
            }
        )
    )


if __name__ == "__main__":
    main()
