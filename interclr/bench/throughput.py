"""Images a second through whole training steps of small images, and how much of the GPU's arithmetic that is."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from interclr.bench.power import watched
from interclr.bench.setup import Prepared, prepare
from interclr.bench.timing import matrix_rate, spread, wait_for
from interclr.engine.metrics import Averages
from interclr.screen import Screen

NOMINAL_RATE = 790.0  # TFLOP/s in bf16 of an H200, as the floor of the reference figures counts


def measure_throughput(
    recipe: str,
    overrides: Sequence[str],
    pixels: Tensor,
    device: torch.device,
    screen: Screen,
    rounds: int = 5,
    seconds: float = 3.0,
) -> dict[str, Any]:
    """Wall-clock images/s of the training loop: loading, views, step, logging; the device waited for at both ends."""
    screen.say(f"{recipe} {' '.join(overrides)}: building, compiling, capturing")
    started = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    here = prepare(recipe, overrides, pixels, len(pixels), device)
    averages = Averages()
    number = _steps(here, averages, 0, 8)
    wait_for(device)
    ready = time.perf_counter() - started
    probe = time.perf_counter()
    number = _steps(here, averages, number, 10)
    wait_for(device)
    each = (time.perf_counter() - probe) / 10
    count = max(10, round(seconds / each))
    rates = []
    with watched(device) as power:
        for _ in range(rounds):
            begin = time.perf_counter()
            number = _steps(here, averages, number, count)
            wait_for(device)
            rates.append(count * here.batch / (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_reserved() if device.type == "cuda" else None
    flops = flops_per_image(recipe, overrides, pixels, device)
    rate = matrix_rate(device) if device.type == "cuda" else None
    result: dict[str, Any] = {
        "recipe": recipe,
        "overrides": list(overrides),
        "images": len(pixels),
        "batch": here.batch,
        "mode": here.settings.engine.mode,
        "precision": here.settings.engine.precision,
        "deterministic": here.settings.engine.deterministic,
        "images_per_second": spread(rates),
        "steps_per_round": count,
        "seconds_to_start": ready,
        "gigaflop_per_image": flops / 1e9,
        "peak_bytes": peak,
        "power": power,
    }
    if rate is not None:
        median = result["images_per_second"]["median"]
        result["matrix_teraflop_per_second"] = rate
        result["share_of_floor"] = median * flops / (NOMINAL_RATE * 1e12)
        result["share_of_measured_rate"] = median * flops / (rate * 1e12)
    del here
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _steps(prepared: Prepared, averages: Averages, first: int, count: int) -> int:
    batches = prepared.loader.iterate(first, first + count)
    for number in range(first, first + count):
        averages.add(prepared.step(prepared.step.fetch(batches), number))
        if (number + 1) % prepared.settings.engine.log_every == 0:
            averages.flush({"step": number})
    return first + count


def flops_per_image(recipe: str, overrides: Sequence[str], pixels: Tensor, device: torch.device) -> float:
    """Floating-point operations of convolutions and matrix products in one plain eager step, per image."""
    here = prepare(recipe, [*overrides, "engine.mode=eager"], pixels, len(pixels), device)
    images = next(iter(here.loader.iterate(0, 1)))
    batch = here.step.make_views(images, here.learner.inter_active(0))
    with FlopCounterMode(display=False) as counter, torch.autocast(device.type, torch.bfloat16):
        loss, _, _ = here.learner.loss(batch, 0)
        loss.backward()
    total: int = counter.get_total_flops()
    return total / here.batch
