"""The embedded default image set: procedural shapes under heavy nuisance, so that a first run needs no download.

It is synthetic and says so: figures on it show that learning works, not how good a method is on photographs.
What makes a class is a *shape*, repeated over the image so that every crop holds some of it. Everything else (colours,
textures, clutter, place, scale, rotation, lighting, occlusion, noise) is drawn independently of the class.
Pixels therefore say little about the class, while two augmented views of an image have mostly the shape in common.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.floating]  # float32 throughout; numpy's stubs lose the width
Shape = Callable[[Array, Array], Array]  # coordinates in the shape's frame → signed distance, negative inside

_CHUNK = 250  # images per random stream: a prefix is the same whatever the count
_SPACING = (0.7, 0.9)  # between copies, where the image spans 2
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)


def _rotate(x: Array, y: Array, angle: Array) -> tuple[Array, Array]:
    cos, sin = np.cos(angle), np.sin(angle)
    return cos * x + sin * y, cos * y - sin * x


def _box(x: Array, y: Array, half_width: Array | float, half_height: Array | float) -> Array:
    return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


def _disc(x: Array, y: Array) -> Array:
    return np.hypot(x, y) - 0.85


def _target(x: Array, y: Array) -> Array:
    radius = np.hypot(x, y)
    return np.minimum(np.abs(radius - 0.8) - 0.14, radius - 0.25)


def _triangle(x: Array, y: Array) -> Array:
    return np.maximum(np.abs(x) * 0.866 + y * 0.5, -y) - 0.5


def _frame(x: Array, y: Array) -> Array:
    return np.abs(_box(x, y, 0.62, 0.62)) - 0.15


def _cross(x: Array, y: Array) -> Array:
    return np.minimum(_box(x, y, 0.22, 0.95), _box(x, y, 0.95, 0.22))


def _star(x: Array, y: Array) -> Array:
    arms: Array = np.cos(5 * np.arctan2(y, x))
    return np.hypot(x, y) - 0.62 - 0.36 * arms


def _crescent(x: Array, y: Array) -> Array:
    distance: Array = np.maximum(np.hypot(x, y) - 0.95, 0.75 - np.hypot(x - 0.45, y))
    return distance


def _bars(x: Array, y: Array) -> Array:
    return np.minimum(_box(x, y, 0.9, 0.15), _box(x, np.abs(y) - 0.68, 0.9, 0.15))


def _arrow(x: Array, y: Array) -> Array:
    head = np.maximum(np.abs(x) * 0.75 + y * 0.66 - 0.64, 0.05 - y)
    distance: Array = np.minimum(head, _box(x, y + 0.4, 0.18, 0.55))
    return distance


def _dots(x: Array, y: Array) -> Array:
    return np.hypot(np.abs(x) - 0.55, np.abs(y) - 0.55) - 0.34


_SHAPES: dict[str, Shape] = {
    "disc": _disc,
    "target": _target,
    "triangle": _triangle,
    "frame": _frame,
    "cross": _cross,
    "star": _star,
    "crescent": _crescent,
    "bars": _bars,
    "arrow": _arrow,
    "dots": _dots,
}
CLASSES: tuple[str, ...] = tuple(_SHAPES)


def generate(count: int, seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Draw ``count`` images: pixels (count, 3, size, size) uint8 and balanced labels (count,) int64.

    Image i depends on (seed, i, size) alone, so ``generate(n)[:m] == generate(m)``; every run of ten images from a
    multiple of ten holds each class once. Another seed is another sample of the same distribution: use it to test.
    """
    if count < 0 or size < 8 or seed < 0:
        raise ValueError(f"need count >= 0, seed >= 0 and size >= 8, got count={count}, seed={seed}, size={size}")
    pixels = torch.empty(count, 3, size, size, dtype=torch.uint8)
    labels = torch.empty(count, dtype=torch.int64)
    for start in range(0, count, _CHUNK):
        random = np.random.Generator(np.random.PCG64([seed, start // _CHUNK]))
        image, label = _draw_chunk(random, size)
        stop = min(start + _CHUNK, count)
        pixels[start:stop] = torch.from_numpy(image[: stop - start])
        labels[start:stop] = torch.from_numpy(label[: stop - start])
    return pixels, labels


def _draw_chunk(random: np.random.Generator, size: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    def uniform(low: float, high: float, *shape: int) -> Array:  # one draw per image, ready to broadcast
        return random.uniform(low, high, (_CHUNK, *(shape or (1, 1)))).astype(np.float32)

    def along() -> Array:  # coordinate along a random direction
        return _rotate(x, y, uniform(-np.pi, np.pi))[0]

    def textured(colour: Array) -> Array:
        wave = np.sin(along() * uniform(6, 16) + uniform(-np.pi, np.pi))
        return colour + (wave * uniform(0, 0.04))[:, None]

    def paint(image: Array, colour: Array, distance: Array, opacity: float = 1) -> Array:
        cover: Array = np.clip(0.5 - distance * (size / 2), 0, 1) * np.float32(opacity)  # anti-aliased over one pixel
        return image + (colour - image) * cover[:, None]

    label = random.permuted(np.tile(np.arange(len(CLASSES)), (_CHUNK // len(CLASSES), 1)), axis=1).ravel()
    axis = (np.arange(size, dtype=np.float32) + 0.5) * np.float32(2 / size) - 1
    x, y = np.meshgrid(axis, axis)  # (S, S) in -1..1

    background, foreground = _colours(random)
    image = textured(background)  # (N, 3, S, S)
    for _ in range(3):  # clutter: thin, faint lines
        image = paint(image, uniform(0, 1, 3, 1, 1), np.abs(along() - uniform(-1, 1)) - 0.02, 0.25)
    image = paint(image, textured(foreground), _distance(label, x, y, uniform))
    patch = _box(x - uniform(-1, 1), y - uniform(-1, 1), uniform(0.1, 0.3), uniform(0.1, 0.3))
    image = paint(image, background + uniform(-0.1, 0.1, 3, 1, 1), patch)  # partial occlusion
    image = image * (1 + along() * uniform(0, 0.2))[:, None]  # lighting
    image += 0.02 * random.standard_normal(image.shape, dtype=np.float32)
    return (np.clip(image, 0, 1) * 255).round().astype(np.uint8), label


def _distance(label: npt.NDArray[np.int64], x: Array, y: Array, uniform: Callable[..., Array]) -> Array:
    """Signed distance (N, S, S) to copies of each image's shape on a turned, shifted lattice.

    Every copy has its own rotation, size and place within its cell. A pixel looks only at the cell it lies in, so the
    cost does not grow with the number of copies.
    """
    x, y = _rotate(x, y, uniform(-np.pi, np.pi))
    spacing = uniform(*_SPACING)
    a, b = x / spacing + uniform(-0.5, 0.5), y / spacing + uniform(-0.5, 0.5)  # lattice coordinates
    column, row = np.rint(a), np.rint(b)
    half = int(np.ceil(1.5 / _SPACING[0] + 0.5))  # no cell in sight is further from the middle than this
    side = 2 * half + 1
    cell = ((row + half) * side + column + half).astype(np.int64).reshape(len(label), -1)

    def per_cell(low: float, high: float) -> Array:
        return np.take_along_axis(uniform(low, high, side * side), cell, axis=1).reshape(a.shape)

    radius = per_cell(0.37, 0.45)
    across, down = (offset + per_cell(-0.05, 0.05) for offset in (a - column, b - row))
    u, v = _rotate(across / radius, down / radius, per_cell(-np.pi, np.pi))
    distance = np.empty_like(u)
    for index, shape in enumerate(_SHAPES.values()):
        mine = label == index
        distance[mine] = shape(u[mine], v[mine])
    return distance * radius * spacing


def _colours(random: np.random.Generator) -> tuple[Array, Array]:
    """Background and foreground, (N, 3, 1, 1) each: any hue, but apart in luminance so that grey views keep the shape.

    Colours are pale and the contrast varies little, or they would tell images apart more easily than the shape does.
    """
    chroma = random.uniform(-0.1, 0.1, (2, _CHUNK, 3))
    chroma -= chroma @ _LUMA[:, None]
    dark = random.uniform(0.15, 0.35, _CHUNK)
    luminance = np.stack([dark, dark + random.uniform(0.4, 0.5, _CHUNK)])
    flipped = random.random(_CHUNK) < 0.5  # light on dark as often as dark on light
    luminance = np.where(flipped, luminance[::-1], luminance)
    background, foreground = (luminance[..., None] + chroma).astype(np.float32)[..., None, None]
    return background, foreground
