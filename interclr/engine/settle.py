"""Every ``auto`` becomes a number, chosen from the number of images, their size and the device, and is said aloud.

Left are those that only the open data can tell (``data.resident``, ``engine.mode``, ``monitor.k`` …): ``pretrain``.

The rules are rough on purpose: they have to work on 200 images and on 10 million. A recipe that knows better sets the
value, and then nothing here touches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from interclr.config import Settings, settings_from
from interclr.data.views import largest_side
from interclr.engine.dataset import Facts
from interclr.labels import auto_clusters
from interclr.types import UserError

Choice = tuple[str, str, str]  # key, value, why

SIZES = (32, 48, 64, 96, 128, 160, 224)  # sides of views that are offered
CPU_LARGEST = 96
EXACT_BELOW = 4_000  # images: ranking so small a bank costs next to nothing
QUEUE_LARGEST, NEGATIVES_LARGEST = 65_536, 16_384  # the paper's, at ImageNet's size


def settle(settings: Settings, facts: Facts) -> tuple[Settings, list[Choice]]:
    """Replace every ``auto``; returns the new tree and what was chosen with the reason."""
    tree: dict[str, Any] = settings.model_dump(mode="json")
    chosen: list[Choice] = []

    def choose(path: str, value: Any, why: str) -> None:
        """Set ``path`` if it is there and still says auto."""
        *parents, key = path.split(".")
        node: Any = tree
        for parent in parents:
            node = node.get(parent) if node is not None else None
        if node is not None and node.get(key) == "auto":
            node[key] = value
            chosen.append((path, str(value), why))

    on_cpu, n = facts.device == "cpu", facts.images
    choose("data.image_size", _image_size(facts), f"images are about {facts.side} px" + (", on a CPU" * on_cpu))
    size: int = tree["data"]["image_size"]
    choose("data.max_side", largest_side(size), "room for random crops; larger images are shrunk when read")
    small_job = on_cpu or n < 20_000 or size < 128
    narrow = on_cpu and tree["model"]["backbone"] == "auto"  # a network that is asked for is the one others know
    choose("model.backbone", "resnet10" if on_cpu else "resnet18" if small_job else "resnet50", _on(facts))
    choose("model.width", 32 if narrow else 64, f"{_on(facts)}; other libraries have 64" if narrow else _on(facts))
    is_resnet = tree["model"]["backbone"].startswith(("resnet", "resnext", "wide_resnet"))  # others have one stem
    stem = "standard" if size > 64 or not is_resnet else ("strided" if on_cpu else "small")
    choose("model.stem", stem, f"views of {size} px")
    choose("data.batch", _batch(n, on_cpu), f"{n:,} images")
    batch: int = tree["data"]["batch"]
    choose("schedule.epochs", _epochs(n, batch, on_cpu), f"{max(n // batch, 1):,} steps an epoch")
    choose("method.queue", _power_of_two(n / 2, batch, QUEUE_LARGEST), "at most half the images")
    choose("method.negatives", min(NEGATIVES_LARGEST, max(1, n // 2)), "at most half the images")
    choose("inter.clusters", auto_clusters(n), "10,000 for ImageNet, scaled to the number of images")
    choose(
        "inter.sampler.negatives",
        _power_of_two(n / 64, max(1, min(16, n // 20)), NEGATIVES_LARGEST),
        "16,384 for ImageNet, scaled to the number of images",
    )
    _choose_candidates(tree, n, choose)
    choose("engine.precision", "fp32" if on_cpu else "bf16", _on(facts))
    epochs: int = tree["schedule"]["epochs"]
    choose("checkpoint.every_epochs", max(1, epochs // 20), f"{epochs} epochs")
    choose("inter.warmup_epochs", epochs // 2, f"half of {epochs} epochs")
    choose("monitor.every_epochs", max(1, epochs // 10), f"{epochs} epochs")
    _check(tree, n)
    if settings.inter is not None and not settings.inter.uses_negatives(settings.method.with_negatives):  # no sampler
        chosen = [choice for choice in chosen if not choice[0].startswith("inter.sampler.")]
    return settings_from(tree), chosen


def _choose_candidates(tree: dict[str, Any], n: int, choose: Callable[[str, Any, str], None]) -> None:
    """A little more than it takes to find K in the pool, so that a large cluster of the anchor's own leaves enough."""
    sampler = (tree["inter"] or {}).get("sampler", {})
    if "candidates" in sampler:
        wanted = math.ceil(1.05 * sampler["negatives"] / sampler["pool_fraction"])
        few = n >= EXACT_BELOW and wanted <= n // 2
        why = "negatives are looked for in a sample of the bank; all: its exact pool, slower"
        if not few:
            why = "a small bank" if n < EXACT_BELOW else f"{sampler['negatives']:,} negatives need most of it"
        choose("inter.sampler.candidates", wanted if few else "all", why)


def _check(tree: dict[str, Any], n: int) -> None:
    if (batch := tree["data"]["batch"]) > n:
        raise UserError(f"data.batch: {batch} images a batch asked of {n} images; use auto or at most {n}")
    inter = tree["inter"] if settings_from(tree).branch is not None else None
    if inter is not None and inter["clusters"] > n:
        raise UserError(f"inter.clusters: {inter['clusters']} clusters asked of {n} images; use auto or at most {n}")
    epochs = tree["schedule"]["epochs"]
    if inter is not None and inter["warmup_epochs"] >= epochs:
        raise UserError(
            f"inter.warmup_epochs: after {inter['warmup_epochs']} epochs of {epochs} the inter branch would never "
            "begin; give fewer, or inter.warmup_epochs=auto for half of them"
        )


def _on(facts: Facts) -> str:
    return f"{facts.images:,} images on a {'CPU' if facts.device == 'cpu' else 'GPU'}"


def _image_size(facts: Facts) -> int:
    """The largest side on offer that does not enlarge the images; on a CPU no more than 96."""
    largest = CPU_LARGEST if facts.device == "cpu" else SIZES[-1]
    fitting = [side for side in SIZES if side <= facts.side]
    return min(max(fitting, default=SIZES[0]), largest)


def _batch(images: int, on_cpu: bool) -> int:
    return min(images, _power_of_two(images / 4, 2, 128 if on_cpu else 256))


def _epochs(images: int, batch: int, on_cpu: bool) -> int:
    """Enough steps to learn something: 200 epochs as in the paper, more on small sets, fewer on a CPU."""
    steps = max(images // batch, 1)
    if on_cpu:
        return max(2, min(200, math.ceil(1_500 / steps)))
    return max(200, min(800, math.ceil(20_000 / steps)))


def _power_of_two(wanted: float, least: int, most: int) -> int:
    return int(min(most, max(least, 2 ** math.floor(math.log2(max(wanted, 1))))))
