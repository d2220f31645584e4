"""What the inter branch adds to a step: time as a ratio to the plain method, and memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interclr.bank import MemoryBank
from interclr.bench.setup import Prepared, prepare, stepper
from interclr.bench.timing import block_milliseconds, captured, in_turns, ratios, spread, wait_for
from interclr.config import load_settings
from interclr.engine.build import build_learner
from interclr.engine.dataset import Facts
from interclr.engine.settle import settle
from interclr.learner import Learner
from interclr.screen import Screen
from interclr.types import Embeddings

IMAGENET = 1_281_167
GROWTH_NEGATIVES = 4_096


def measure_branch(
    recipe: str,
    overrides: Sequence[str],
    device: torch.device,
    screen: Screen,
    images: int = IMAGENET,
    canvas: int = 256,
    rounds: int = 8,
    repeats: int = 10,
    inter_overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Steps of ``recipe`` and of ``recipe-interclr`` in turns, in one process: everything from bytes to commit.

    ``inter_overrides`` are the branch's; given to the plain recipe they would make one there.
    """
    _free(device)  # what graphs of before have left would be counted, and be gone later
    prepared: dict[str, Prepared] = {}
    memory: dict[str, int] = {}
    starting: dict[str, float] = {}
    steps = {}
    batches = 4
    for name, given in ((recipe, overrides), (f"{recipe}-interclr", [*overrides, *inter_overrides])):
        settings = load_settings(recipe, overrides)
        batch = int(settings.data.batch)
        pixels = torch.randint(0, 256, (batches * batch, 3, canvas, canvas), dtype=torch.uint8)
        gc.collect()
        _forget_peak(device)
        before = _in_use(device)
        screen.say(f"{name}: building and capturing")
        started = time.perf_counter()
        here = prepare(name, given, pixels, images, device)
        steps[name] = stepper(here)
        for _ in range(8):
            steps[name]()
        wait_for(device)
        starting[name] = time.perf_counter() - started
        _forget_peak(device)
        block_milliseconds(steps[name], 12, device)
        memory[name] = _in_use(device) - before
        prepared[name] = here
    times = in_turns(steps, rounds, repeats, device)
    plain, inter = recipe, f"{recipe}-interclr"
    settled = prepared[inter].settings
    assert settled.inter is not None
    result = {
        "plain": recipe,
        "images": images,
        "batch": prepared[plain].batch,
        "canvas": canvas,
        "image_size": settled.data.image_size,
        "clusters": settled.inter.clusters,
        "sampler": settled.inter.sampler.model_dump(),
        "bank_dtype": settled.inter.bank_dtype,
        "mode": settled.engine.mode,
        "precision": settled.engine.precision,
        "milliseconds": {name: spread(values) for name, values in times.items()},
        "ratio": ratios(times[inter], times[plain]),
        "extra_bytes": memory[inter] - memory[plain],
        "bytes_are": "in use at the peak, with all that graphs keep",
        "peak_bytes": memory,
        "seconds_to_start": starting,  # building, clustering and compiling
        "rounds": times,
    }
    return result


def measure_growth(
    sizes: Sequence[int], device: torch.device, screen: Screen, anchors: int = 256, repeats: int = 20
) -> list[dict[str, Any]]:
    """The inter branch alone (draw, loss, gradient, labels and bank) as the bank grows, kept in bf16: device time."""
    rows = []
    for size in sizes:
        screen.say(f"the inter branch with {size:,} images")
        # Fewer negatives than the paper's 16,384, so that also the smallest bank has a sample to draw them from.
        overrides = [f"data.batch={anchors}", "inter.bank_dtype=bfloat16", "model.backbone=resnet18"]
        overrides += [f"inter.sampler.negatives={GROWTH_NEGATIVES}"]
        clusters = max(2, round(10_000 * size / IMAGENET)) if size < IMAGENET else 10_000
        overrides += [f"inter.clusters={clusters}"]
        settings, _ = settle(load_settings("mocov2-interclr", overrides), Facts(size, 224, device.type))
        learner = build_learner(settings, clusters).to(device)  # and a larger bank, made on the device
        learner.bank = MemoryBank(size, learner.intra.dim, clusters, 1.0, torch.bfloat16, torch.Generator(device))
        learner.generator = torch.Generator(device).manual_seed(0)
        work = captured(_branch_alone(learner, learner.bank, anchors, device), [learner.generator], device)
        for _ in range(5):
            work()
        wait_for(device)
        times = [block_milliseconds(work, repeats, device) for _ in range(5)]
        assert settings.inter is not None
        rows.append(
            {
                "images": size,
                "clusters": clusters,
                "sampler": settings.inter.sampler.model_dump(),
                "milliseconds": spread(times),
                "bank_bytes": learner.bank.features.nbytes,
            }
        )
        del learner, work
        _free(device)
    return rows


def _branch_alone(learner: Learner, bank: MemoryBank, anchors: int, device: torch.device) -> Callable[[], None]:
    def work() -> None:
        index = torch.randint(bank.size, (anchors,), device=device)
        raw = torch.randn(1, anchors, bank.dim, device=device, requires_grad=True)
        query = torch.nn.functional.normalize(raw, dim=2)
        embeddings = Embeddings(index, query, query.detach(), query, query[0].detach())
        pairs = learner._complete_draw(embeddings, learner._prepare_draw(index))
        learner.intra.inter_loss(embeddings, pairs, bank).backward()
        assert learner.labels is not None
        learner.labels.update(bank, index, embeddings.feature)

    return work


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _in_use(device: torch.device) -> int:
    """Bytes in use at the peak since the last reset, and all that graphs keep for their replays.

    Not what the allocator holds besides: pieces left over from building, which the next one to ask will get.
    """
    if device.type != "cuda":
        return 0
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    kept = sum(s["total_size"] - s["allocated_size"] for s in segments)
    return int(kept + torch.cuda.max_memory_allocated())


def _free(device: torch.device) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
