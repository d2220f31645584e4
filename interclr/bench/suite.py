"""The benches by name, at the sizes that performance is stated for, and at sizes that only show that they work."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interclr.bench.branch import IMAGENET, measure_branch, measure_growth
from interclr.bench.clustering import measure_kmeans
from interclr.bench.convolution import measure_convolutions
from interclr.bench.data import make_photos, measure_loader, measure_wait
from interclr.bench.setup import prepare
from interclr.bench.stages import measure_stages
from interclr.bench.stream import measure_streamed
from interclr.bench.throughput import measure_throughput
from interclr.config import load_settings
from interclr.data.builtin import open_source
from interclr.data.packed import pack
from interclr.data.stream_plan import default_workers
from interclr.run.folder import environment
from interclr.screen import Screen
from interclr.types import UserError


@dataclass
class Options:
    device: torch.device
    screen: Screen
    quick: bool = False
    root: Path | None = None  # where CIFAR-10 lies; None: made-up pixels of its shape
    store: Path | None = None  # a packed JPEG store; None: made-up photographs


Result = Any
SMALL = ["data.batch=16", "model.backbone=resnet8", "model.width=16"]  # to see that it works


def bench_step(options: Options) -> Iterator[Result]:
    """Step with the inter branch ÷ plain step: NPIDv2, BYOL, MoCov2."""
    methods = ("npidv2", "byol", "mocov2")
    if options.quick:
        inter = ["inter.clusters=8", "inter.sampler={name: semi_hard, negatives: 16}"]
        yield measure_branch("cifar10-mocov2", SMALL, options.device, options.screen, 500, 32, 2, 2, inter)
        return
    # BYOL's recipe reaches its batch by accumulation; a step here is one micro-batch with its optimiser step.
    common = ["engine.mode=graph", "engine.accumulate=1", "engine.precision=bf16"]
    for method in methods:
        yield measure_branch(method, common, options.device, options.screen)


# The work of lightly's benchmark: its head, and its views, which have no blur.
PEER_VIEW = "{jitter: 0.8, brightness: 0.4, contrast: 0.4, saturation: 0.4, hue: 0.1, grey: 0.2}"
LIKE_PEERS = ["method.hidden=512", f"views=[{PEER_VIEW}, {PEER_VIEW}]"]


def bench_cifar(options: Options) -> Iterator[Result]:
    """Images a second through whole CIFAR-10 steps: symmetric MoCo, ResNet-18, batch 512."""
    pixels = _cifar_pixels(options)
    if options.quick:
        yield measure_throughput("cifar10-mocov2", SMALL, pixels[:256], options.device, options.screen, 2, 0.2)
        return
    common = ["data.batch=512", "engine.mode=graph", "engine.precision=bf16", *LIKE_PEERS]
    for recipe, word in (
        ("cifar10-mocov2", "false"),
        ("cifar10-mocov2-interclr", "false"),
        ("cifar10-mocov2", "true"),
    ):
        overrides = [*common, f"engine.deterministic={word}"]
        kind = "random" if options.root is None else "CIFAR-10"
        yield {"pixels": kind} | measure_throughput(recipe, overrides, pixels, options.device, options.screen)


def bench_convolutions(options: Options) -> Result:
    """Our convolutions for images of CIFAR's size beside cuDNN's, by themselves and in a step: Hopper GPUs only."""
    common = ["data.batch=512", "engine.mode=graph", "engine.precision=bf16", "engine.deterministic=false", *LIKE_PEERS]
    pixels = _cifar_pixels(options)
    return measure_convolutions(common, pixels, options.device, options.screen, 64 if options.quick else 1_024)


def bench_data(options: Options) -> Result:
    """Packed JPEG to the GPU: what the loader delivers, and how long a ResNet-50 step waits for it."""
    count, batch = (64, 8) if options.quick else (6_000, 256)
    workers = 2 if options.quick else default_workers()
    with tempfile.TemporaryDirectory() as folder:
        store = options.store
        if store is None:
            options.screen.say(f"making {count:,} photo-like JPEG files")
            make_photos(Path(folder) / "photos", count)
            pack(open_source(str(Path(folder) / "photos")), Path(folder) / "packed", image_format="jpeg")
            store = Path(folder) / "packed"
        seconds = 0.5 if options.quick else 8.0
        loader = measure_loader(store, batch, workers, seconds, options.device)
        streamed = measure_streamed(store, batch, workers, options.device, options.screen, options.quick)
        wait = measure_wait(store, batch, workers, seconds, options.device, streamed["resident_milliseconds"]["median"])
    return {"batch": batch, "workers": workers, "loader": loader, "with_idle_steps": wait, "training": streamed}


def bench_kmeans(options: Options) -> Result:
    """Global k-means at ImageNet's size."""
    if options.quick:
        return measure_kmeans(5_000, 16, 50, 5, options.device)
    return measure_kmeans(IMAGENET, 128, 10_000, 20, options.device)


def bench_growth(options: Options) -> Result:
    """The inter branch alone as the bank grows from 0.1 to 10 million entries."""
    sizes = (2_000, 20_000) if options.quick else (100_000, IMAGENET, 10_000_000)
    return measure_growth(
        sizes, options.device, options.screen, 16 if options.quick else 256, 3 if options.quick else 20
    )


def bench_cpu(options: Options) -> Result:
    """Where the time of a step goes on a CPU: the default recipe on the embedded set."""
    source = open_source(load_settings("default").data.source)
    pixels: Tensor = source.pixels  # type: ignore[attr-defined]
    here = prepare("default", [], pixels, len(source), torch.device("cpu"), source.labels)
    return measure_stages(here, 5 if options.quick else 60, options.screen)


BENCHES: dict[str, Callable[[Options], Result]] = {
    "step": bench_step,
    "cifar": bench_cifar,
    "convolutions": bench_convolutions,
    "data": bench_data,
    "kmeans": bench_kmeans,
    "growth": bench_growth,
    "cpu": bench_cpu,
}


def run_benches(names: Sequence[str], options: Options, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """``save`` is called with the report so far after every bench and, within one, after every measurement."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        raise UserError(f"no bench {unknown[0]!r}; there are {', '.join(BENCHES)}")
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": options.quick,
        **environment(),
        "results": {},
    }
    for name in names:
        options.screen.say(f"bench {name}: {BENCHES[name].__doc__}")
        found = BENCHES[name](options)
        if isinstance(found, Iterator):
            rows: list[Any] = report["results"].setdefault(name, [])
            for row in found:
                rows.append(row)
                save(report)
        else:
            report["results"][name] = found
        save(report)
    return report


def _cifar_pixels(options: Options) -> Tensor:
    if options.root is not None:
        pixels: Tensor = open_source("cifar10", "train", options.root).pixels  # type: ignore[attr-defined]
        return pixels
    options.screen.say("random pixels of CIFAR-10's shape; --root for real ones")
    return torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def lines_of(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What a person wants to read of a report: (what, how much)."""
    lines: list[tuple[str, str]] = []
    results = report["results"]
    for row in results.get("step", []):
        ratio, times = row["ratio"], row["milliseconds"]
        plain, inter = (times[name]["median"] for name in (row["plain"], f"{row['plain']}-interclr"))
        lines.append((f"{row['plain']}: with inter ÷ plain", f"{_around(ratio, 3)}  ({plain:.1f} → {inter:.1f} ms)"))
        if row["mode"] != "graph" or "bytes_are" in row:
            kind = ", held" if row.get("bytes_are") == "held" else ""  # what reports counted once
            lines.append((f"{row['plain']}: extra memory{kind}", f"{row['extra_bytes'] / 1e9:.2f} GB"))
    for row in results.get("cifar", []):
        share = f", {100 * row['share_of_floor']:.0f} % of the floor" if "share_of_floor" in row else ""
        kind = "" if row["deterministic"] is False else ", deterministic"
        power = row.get("power")
        under = (
            f", {power['watts']:.0f} of {power['watts_limit']:.0f} W, {power['megahertz']:,.0f} MHz" if power else ""
        )
        lines.append((f"{row['recipe']}{kind}: images/s", f"{_around(row['images_per_second'], 0)}{share}{under}"))
    if "convolutions" in results:
        lines += _lines_of_convolutions(results["convolutions"])
    if "data" in results:
        data = results["data"]
        lines.append(("packed JPEG: loader alone, images/s", f"{data['loader']['images_per_second']:,.0f}"))
        streaming = 1 - 1 / data["training"]["ratio"]["median"]  # what a step takes longer than with images at hand
        lines.append(("packed JPEG: data wait in a step", f"{100 * streaming:.1f} %"))
        lines.append(("packed JPEG: step streamed ÷ resident", _around(data["training"]["ratio"], 3)))
    if "kmeans" in results:
        row = results["kmeans"]
        lines.append(
            (f"k-means {row['images']:,} × {row['dim']}, k={row['clusters']:,}", f"{_around(row['seconds'], 2)} s")
        )
    growth = [(f"{row['images']:,}", _around(row["milliseconds"], 2)) for row in results.get("growth", [])]
    lines += [(f"inter branch alone, N = {size}", f"{milliseconds} ms") for size, milliseconds in growth]
    if "cpu" in results:
        row = results["cpu"]
        lines.append(("CPU step outside forward/backward", f"{100 * row['outside_forward_backward']:.1f} %"))
        lines.append(("of all steps together", f"{100 * row['outside_of_all_steps_together']:.1f} %"))
        lines += [(f"  {name}", f"{100 * share:.1f} %") for name, share in row["shares"].items()]
    return lines


def _lines_of_convolutions(found: dict[str, Any]) -> list[tuple[str, str]]:
    if "skipped" in found:
        return [("convolutions of 64 channels", f"not measured: {found['skipped']}")]
    lines = []
    for row in found["rows"]:
        ours, library = (row["microseconds"][side]["median"] for side in ("ours", "library"))
        lines.append(
            (
                f"convolution, {row['name']}: ours ÷ cuDNN's",
                f"{_around(row['ratio'], 2)}  ({library:.0f} → {ours:.0f} µs)",
            )
        )
    step = found["step"]
    ours, library = (step["milliseconds"][side]["median"] for side in ("ours", "library"))
    return [
        *lines,
        ("CIFAR-10 step: our convolutions ÷ cuDNN's", f"{_around(step['ratio'], 3)}  ({library:.2f} → {ours:.2f} ms)"),
    ]


def _around(values: dict[str, Any], digits: int) -> str:
    low, high = values["low"], values["high"]
    return f"{values['median']:,.{digits}f} [{low:,.{digits}f} – {high:,.{digits}f}]"
