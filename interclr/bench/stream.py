"""A real training step fed from a packed store, beside the same step with its images at hand."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import torch

from interclr.bench.setup import prepare
from interclr.bench.timing import spread, wait_for
from interclr.data.loader import Order
from interclr.data.packed_store import open_packed
from interclr.data.stream import StreamLoader
from interclr.data.views import largest_side
from interclr.engine.waiting import DataWait
from interclr.screen import Screen
from interclr.types import Images

SYNC_EVERY = 10  # steps between two waits for the device: when training logs


def measure_streamed(
    store: Path, batch: int, workers: int, device: torch.device, screen: Screen, quick: bool = False
) -> dict[str, Any]:
    """``ratio``: streamed step ÷ resident step, so what streaming costs. ``wait``: as training reports it."""
    size = 64 if quick else 224
    overrides = [f"data.batch={batch}", f"data.image_size={size}", f"engine.mode={'eager' if quick else 'graph'}"]
    overrides += ["model.backbone=resnet8", "model.width=16", "model.stem=small"] if quick else []
    source = open_packed(store, largest_side(size))
    some = StreamLoader(source, Order(len(source), batch, 0), device, workers)
    held = [images for images, _ in zip(some.iterate(0, 4), range(4), strict=False)]
    here = prepare("mocov2", overrides, held[0].pixels.cpu(), len(source), device)
    screen.say("warming up")
    number = 0

    def step(images: Images) -> None:
        nonlocal number
        here.step(images, number)
        number += 1

    for images in (*held, *held):
        step(images)
    wait_for(device)
    resident, streamed, waits = [], [], []
    rounds, steps = (2, 4) if quick else (4, 4 * SYNC_EVERY)
    loader = StreamLoader(source, Order(len(source), batch, 0), device, workers)
    batches, again = loader.iterate(0, 1 << 40), itertools.cycle(held)
    for _ in range(max(2 * workers, 4)):
        step(here.step.fetch(batches))
    wait_for(device)
    for _ in range(rounds):
        begin = time.perf_counter()
        for count in range(steps):
            step(here.step.fetch(again))
            if count % SYNC_EVERY == SYNC_EVERY - 1:
                wait_for(device)
        wait_for(device)
        resident.append((time.perf_counter() - begin) / steps)
        begin, wait = time.perf_counter(), DataWait(device)
        for count in range(steps):
            wait.ask()
            images = here.step.fetch(batches)
            wait.arrived()
            step(images)
            wait.stepped()
            if count % SYNC_EVERY == SYNC_EVERY - 1:
                wait_for(device)
        wait_for(device)
        streamed.append((time.perf_counter() - begin) / steps)
        waits.append(wait.take() / (steps * streamed[-1]))
    return {
        "recipe": "mocov2",
        "canvas": list(held[0].pixels.shape[2:]),
        "images_in_store": len(source),
        "wait": sorted(waits)[len(waits) // 2],
        "waits": waits,
        "ratio": spread([a / b for a, b in zip(streamed, resident, strict=True)]),
        "resident_milliseconds": spread([1e3 * value for value in resident]),
        "streamed_milliseconds": spread([1e3 * value for value in streamed]),
    }
