"""Photo-like JPEG files made from nothing, and how fast a loader delivers them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from interclr.bench.timing import wait_for
from interclr.data.loader import Order
from interclr.data.packed_store import PackedSource, open_packed
from interclr.data.stream import StreamLoader
from interclr.data.views import largest_side
from interclr.types import Images, UserError

LONG_SIDES = (500, 500, 500, 500, 500, 480, 512, 400)  # as common as they are in ImageNet, roughly
SHORT_SIDES = (375, 375, 375, 375, 333, 334, 360, 281, 400)
LANDSCAPES = 0.75  # of all pictures
QUALITIES = (89, 96)  # from, up to but not including; together 110 kB on average
SHAPES = 12  # whose outlines are the edges of a picture

IMAGE_SIZE = 224  # of the views that the images are read for
SYNC_EVERY = 10  # iterations between two waits for the device: when training logs
FOREVER = 1 << 40  # steps

Pixels = NDArray[np.uint8]
Field = NDArray[np.float32]


def make_photos(folder: Path, count: int, seed: int = 0) -> None:
    """Write ``count`` JPEG files of about 500×375 pixels and 110 kB; a file depends on ``seed`` and its number only.

    Colour noise whose amplitude falls with its frequency, as that of photographs does, with shapes of other brightness:
    so a decoder has as many coefficients to read as in a photograph, smooth areas and edges alike.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.map(partial(_write_photo, folder, seed), range(count), chunksize=16):
            pass


def _write_photo(folder: Path, seed: int, number: int) -> None:
    random = np.random.default_rng((seed, number))
    long_side, short_side = int(random.choice(LONG_SIDES)), int(random.choice(SHORT_SIDES))
    width, height = (long_side, short_side) if random.random() < LANDSCAPES else (short_side, long_side)
    picture = Image.fromarray(_photo(random, height, width))
    picture.save(folder / f"{number:07d}.jpg", quality=int(random.integers(*QUALITIES)), subsampling="4:2:0")


def _photo(random: np.random.Generator, height: int, width: int) -> Pixels:
    brightness, warmth, tint = _noise(random, 3, height, width)
    brightness = brightness + _shapes(random, height, width)
    # Photographs vary much in brightness and little in colour.
    channels = (brightness + 0.3 * warmth, brightness - 0.1 * tint, brightness - 0.3 * warmth + 0.2 * tint)
    middle = random.uniform(90, 160, 3)
    return np.clip(40 * np.stack(channels, 2) + middle, 0, 255).astype(np.uint8)


def _noise(random: np.random.Generator, planes: int, height: int, width: int) -> Field:
    """(planes, height, width) of unit variance and an amplitude of 1 / frequency."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf  # no offset
    spectrum = np.fft.rfft2(random.standard_normal((planes, height, width), dtype=np.float32)) / frequency
    field = np.fft.irfft2(spectrum, s=(height, width)).astype(np.float32)
    normalised: Field = field / field.std(axis=(1, 2), keepdims=True)
    return normalised


def _shapes(random: np.random.Generator, height: int, width: int) -> Field:
    """(height, width) from −2 to 2: overlapping ellipses and triangles, each of one brightness."""
    layer = Image.new("F", (width, height))
    draw = ImageDraw.Draw(layer)
    for _ in range(SHAPES):
        (x, y), reach = random.uniform((0, 0), (width, height)), random.uniform(10, width / 4)
        value = float(random.uniform(-2, 2))
        if random.random() < 0.5:
            squeezed = reach * random.uniform(0.4, 1)
            draw.ellipse((x - reach, y - squeezed, x + reach, y + squeezed), fill=value)
        else:
            corners = [(x + reach * dx, y + reach * dy) for dx, dy in random.uniform(-1, 1, (3, 2))]
            draw.polygon(corners, fill=value)
    return np.asarray(layer)


def measure_loader(store: Path, batch: int, workers: int, seconds: float, device: torch.device) -> dict[str, float]:
    """What the loader alone delivers from a packed store to ``device``, after a warm-up, in about ``seconds``."""
    source = _open(store)
    batches = _batches(source, batch, workers, device)
    for _ in range(2 * workers + 1):
        next(batches)
    wait_for(device)
    started, count = time.perf_counter(), 0
    # In whole rounds of the workers: each delivers one batch of a round, all of them at about the same time.
    while count % max(workers, 1) or time.perf_counter() - started < seconds:
        next(batches)
        count += 1
    wait_for(device)
    rate = count * batch / (time.perf_counter() - started)
    stored = source.stored_bytes / len(source)
    return {
        "images_per_second": rate,
        "megabytes_per_second": rate * stored / 1e6,
        "kilobytes_per_image": stored / 1e3,
        "worker_microseconds_per_image": max(workers, 1) / rate * 1e6,
    }


def measure_wait(
    store: Path, batch: int, workers: int, seconds: float, device: torch.device, step_ms: float
) -> dict[str, float]:
    """How long a loop waits for its next batch when a step keeps ``device`` busy for ``step_ms``.

    ``wait`` is the share of the loop's time in which the host asks for a batch, as training reports it. ``idle`` is the
    share in which the device has nothing to do: the host may well wait for a batch while the device still works.
    """
    work = _busy(device, step_ms / 1e3)
    batches = _batches(_open(store), batch, workers, device)
    for _ in range(2 * workers + SYNC_EVERY):
        next(batches)
        work()
    wait_for(device)
    started, waited, count = time.perf_counter(), 0.0, 0
    while count % SYNC_EVERY or time.perf_counter() - started < seconds:
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
        work()
        count += 1
        if count % SYNC_EVERY == 0:
            wait_for(device)
    taken = time.perf_counter() - started
    return {
        "wait": waited / taken,
        "idle": max(0.0, 1 - count * step_ms / 1e3 / taken),
        "images_per_second": count * batch / taken,
        "step_ms": step_ms,
    }


def _open(store: Path) -> PackedSource:
    source = open_packed(store, largest_side(IMAGE_SIZE))
    if not isinstance(source, PackedSource):
        raise UserError(f"{store} holds raw pixels: there is nothing to decode")
    return source


def _batches(source: PackedSource, batch: int, workers: int, device: torch.device) -> Iterator[Images]:
    return StreamLoader(source, Order(len(source), batch, seed=0), device, workers).iterate(0, FOREVER)


def _busy(device: torch.device, seconds: float) -> Callable[[], None]:
    """Something that keeps the device busy for ``seconds``; on a GPU without the host waiting for it."""
    if device.type != "cuda":
        return partial(time.sleep, seconds)
    cycles = round(_cycles_per_second(device) * seconds)

    def spin() -> None:
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)

    return spin


def _cycles_per_second(device: torch.device, cycles: int = 200_000_000) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)  # the clock rises to what it is under load
        before.record()
        torch.cuda._sleep(cycles)
        after.record()
        after.synchronize()
    return cycles / (float(before.elapsed_time(after)) / 1e3)
