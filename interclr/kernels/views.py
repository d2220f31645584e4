"""A random view of small images in one pass, or two with a blur: crop, resize, flip, colours, normalisation.

An image of up to 64 × 64 pixels fits into the registers of one program, where a chain of operations takes dozens of
passes and a compiler a quarter of a minute to make fewer of them. What it does with an image is decided once for all
its pixels, so nothing is worked out in vain. Sums in float32, whatever the precision of the result. The window must not
shrink, as it cannot where the canvas is not larger than the view: then a pixel mixes four.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PIXELS = 64 * 64  # of a view
CONTRAST, SATURATION, HUE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # torchvision's numbering; 0: brightness


def make_views(
    pixels: Tensor,  # (B, 3, H, W) bytes, one image after the other; what follows is of n·B views, batch after batch
    window: tuple[Tensor, Tensor, Tensor, Tensor],  # (n·B,) each: top, left, height, width
    flip: Tensor,  # (n·B,) bool
    factor: Tensor | None,  # (n·B, 3) brightness, contrast, saturation
    hue: Tensor | None,  # (n·B,)
    order: Tensor | None,  # (n·B, 4) of the four
    grey: Tensor | None,  # (n·B,) bool
    sigma: Tensor | None,  # (n·B,) of the blur
    solarise: Tensor | None,  # (n·B,) bool
    output_size: int,
    blur_kernel: int,
    luma: tuple[float, float, float],
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """(n·B, 3, S, S) in ``dtype``, channels last: what ``data/views.py`` makes of these parameters."""
    images, _, height, width = pixels.shape
    rows = len(flip)
    assert pixels.is_contiguous()
    assert pixels.dtype == torch.uint8
    assert max(height, width) <= output_size, "views must not be smaller than the canvas"
    assert output_size**2 <= MOST_PIXELS
    assert rows % images == 0
    warps = 4 if output_size <= 32 else 8
    sizes = (output_size, triton.next_power_of_2(output_size**2))
    output = pixels.new_empty((rows, output_size, output_size, 3), dtype=dtype)
    coloured = output if sigma is None else pixels.new_empty((rows, 3, output_size**2), dtype=torch.float32)
    none = flip
    line = (*luma, *mean, *std)
    _make[(rows,)](
        pixels, torch.stack(window, 1), flip, _or(factor, none), _or(order, none), _or(hue, none), _or(grey, none),
        _or(solarise, none), coloured, images, height, width, *line, *sizes, factor is not None, hue is not None,
        grey is not None, solarise is not None, sigma is not None, num_warps=warps,
    )  # fmt: skip
    if sigma is not None:
        _blur[(rows,)](
            coloured, sigma.contiguous(), _or(solarise, none), output, *line, *sizes, blur_kernel, solarise is not None,
            num_warps=warps,
        )  # fmt: skip
    return output.permute(0, 3, 1, 2)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor.contiguous()


@triton.jit
def _along(step, start, length, size):
    """Of an output pixel: the source pixels before and behind it, and how much the second counts."""
    place = tl.minimum(tl.maximum(length / size * (step + 0.5) - 0.5, 0.0), length - 1.0)
    before = place.to(tl.int32)
    return start + before, start + tl.minimum(before + 1, length - 1), place - before


@triton.jit
def _mixed(plane, upper, lower, down, left, right, across, width):
    a = tl.load(plane + upper * width + left).to(tl.float32)
    b = tl.load(plane + upper * width + right).to(tl.float32)
    c = tl.load(plane + lower * width + left).to(tl.float32)
    d = tl.load(plane + lower * width + right).to(tl.float32)
    top = a + across * (b - a)
    bottom = c + across * (d - c)
    return (top + down * (bottom - top)) / 255


@triton.jit
def _grey(red, green, blue, of_red, of_green, of_blue):
    return red * of_red + green * of_green + blue * of_blue


@triton.jit
def _clamped(value):
    return tl.minimum(tl.maximum(value, 0.0), 1.0)


@triton.jit
def _turned(hue, value, chroma, centre):
    """A channel whose own hue's opposite is at ``-centre`` on the circle."""
    distance = hue + centre
    distance = tl.abs(distance - tl.floor(distance + 0.5))
    return value - chroma * _clamped(2 - 6 * distance)


@triton.jit
def _rotated(red, green, blue, shift):
    """``colour.rotate_hue``."""
    value = tl.maximum(tl.maximum(red, green), blue)
    chroma = value - tl.minimum(tl.minimum(red, green), blue)
    part = tl.where(value == red, green - blue, tl.where(value == green, blue - red, red - green))
    third = tl.where(value == red, 0.0, tl.where(value == green, 1.0, 2.0))
    hue = part / (6 * tl.maximum(chroma, 1e-12)) + third / 3 + shift
    return (
        _turned(hue, value, chroma, 1 / 2),
        _turned(hue, value, chroma, 1 / 6),
        _turned(hue, value, chroma, -1 / 6),
    )


@triton.jit
def _solarised(value):
    return tl.where(value >= 0.5, 1 - value, value)


@triton.jit
def _finish(
    red, green, blue, chosen, output, row, red_mean, green_mean, blue_mean, red_std, green_std, blue_std,
    SIZE: tl.constexpr, PIXELS: tl.constexpr, SOLARISE: tl.constexpr,
):  # fmt: skip
    if SOLARISE:  # noqa: SIM102 (known when compiling; the other is not)
        if tl.load(chosen + row):
            red, green, blue = _solarised(red), _solarised(green), _solarised(blue)
    at = tl.arange(0, PIXELS)
    inside = at < SIZE * SIZE
    to = output + (row.to(tl.int64) * SIZE * SIZE + at) * 3
    tl.store(to, ((red - red_mean) / red_std).to(output.dtype.element_ty), inside)
    tl.store(to + 1, ((green - green_mean) / green_std).to(output.dtype.element_ty), inside)
    tl.store(to + 2, ((blue - blue_mean) / blue_std).to(output.dtype.element_ty), inside)


@triton.jit
def _make(
    pixels, window, flip, factor, order, hue, grey, solarise, output, images, height, width, of_red, of_green, of_blue,
    red_mean, green_mean, blue_mean, red_std, green_std, blue_std, SIZE: tl.constexpr, PIXELS: tl.constexpr,
    BLEND: tl.constexpr, TURN: tl.constexpr, GREY: tl.constexpr, SOLARISE: tl.constexpr, TO_BLUR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, PIXELS)
    inside = at < SIZE * SIZE
    down = tl.minimum(at // SIZE, SIZE - 1)
    across = at % SIZE
    across = tl.where(tl.load(flip + row), SIZE - 1 - across, across)
    top, left = tl.load(window + row * 4).to(tl.int32), tl.load(window + row * 4 + 1).to(tl.int32)
    high, wide = tl.load(window + row * 4 + 2).to(tl.int32), tl.load(window + row * 4 + 3).to(tl.int32)
    upper, lower, low_weight = _along(down, top, high, SIZE)
    first, second, right_weight = _along(across, left, wide, SIZE)
    plane = pixels + (row % images).to(tl.int64) * 3 * height * width
    red = _mixed(plane, upper, lower, low_weight, first, second, right_weight, width)
    plane += height * width
    green = _mixed(plane, upper, lower, low_weight, first, second, right_weight, width)
    plane += height * width
    blue = _mixed(plane, upper, lower, low_weight, first, second, right_weight, width)
    if TURN and not BLEND:
        red, green, blue = _rotated(red, green, blue, tl.load(hue + row))
    if BLEND:
        for slot in tl.static_range(4):
            kind = tl.load(order + row * 4 + slot).to(tl.int32)
            if kind == HUE:
                if TURN:
                    shift = tl.load(hue + row)
                    if shift != 0:
                        red, green, blue = _rotated(red, green, blue, shift)
            else:
                share = tl.load(factor + row * 3 + kind)
                if share != 1:
                    shade = _grey(red, green, blue, of_red, of_green, of_blue)
                    reference = tl.where(kind == SATURATION, 1 - share, 0.0) * shade
                    if kind == CONTRAST:
                        reference += (1 - share) * tl.sum(tl.where(inside, shade, 0.0), axis=0) / (SIZE * SIZE)
                    red = _clamped(share * red + reference)
                    green = _clamped(share * green + reference)
                    blue = _clamped(share * blue + reference)
    if GREY:  # noqa: SIM102
        if tl.load(grey + row):
            red = _grey(red, green, blue, of_red, of_green, of_blue)
            green = red
            blue = red
    if TO_BLUR:
        to = output + row.to(tl.int64) * 3 * SIZE * SIZE + at
        tl.store(to, red, inside)
        tl.store(to + SIZE * SIZE, green, inside)
        tl.store(to + 2 * SIZE * SIZE, blue, inside)
    else:
        _finish(
            red, green, blue, solarise, output, row, red_mean, green_mean, blue_mean, red_std, green_std, blue_std,
            SIZE, PIXELS, SOLARISE,
        )  # fmt: skip


@triton.jit
def _mirrored(place, SIZE: tl.constexpr):
    place = tl.abs(place)
    return tl.minimum(place, 2 * (SIZE - 1) - place)


@triton.jit
def _blur(
    coloured, sigma, solarise, output, of_red, of_green, of_blue,
    red_mean, green_mean, blue_mean, red_std, green_std, blue_std, SIZE: tl.constexpr, PIXELS: tl.constexpr,
    KERNEL: tl.constexpr, SOLARISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, PIXELS)
    down, across = tl.minimum(at // SIZE, SIZE - 1), at % SIZE
    plane = coloured + row.to(tl.int64) * 3 * SIZE * SIZE
    here = down * SIZE + across
    red = tl.load(plane + here)
    green = tl.load(plane + SIZE * SIZE + here)
    blue = tl.load(plane + 2 * SIZE * SIZE + here)
    width = tl.load(sigma + row)
    if width != 0:
        fall = -0.5 / tl.maximum(width * width, 1e-4)
        total = fall * 0
        for tap in tl.static_range(KERNEL):
            total += tl.exp(fall * ((tap - KERNEL // 2) * (tap - KERNEL // 2)))
        red, green, blue = tl.zeros_like(red), tl.zeros_like(green), tl.zeros_like(blue)
        for tap in tl.static_range(KERNEL * KERNEL):
            above, before = tap // KERNEL - KERNEL // 2, tap % KERNEL - KERNEL // 2
            weight = tl.exp(fall * (above * above + before * before)) / (total * total)
            there = _mirrored(down + above, SIZE) * SIZE + _mirrored(across + before, SIZE)
            red += weight * tl.load(plane + there)
            green += weight * tl.load(plane + SIZE * SIZE + there)
            blue += weight * tl.load(plane + 2 * SIZE * SIZE + there)
    _finish(
        red, green, blue, solarise, output, row, red_mean, green_mean, blue_mean, red_std, green_std, blue_std,
        SIZE, PIXELS, SOLARISE,
    )  # fmt: skip
