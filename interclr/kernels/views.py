"""A random view of small images in two passes, or three with a blur: parameters; crop, resize, flip, colours.

An image of up to 64 × 64 pixels fits into the registers of one program, where a chain of operations takes dozens of
passes and a compiler a quarter of a minute to make fewer of them. What it does with an image is decided once for all
its pixels, so nothing is worked out in vain. Sums in float32, whatever the precision of the result. The window must not
shrink, as it cannot where the canvas is not larger than the view: then a pixel mixes four.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PIXELS = 64 * 64  # of a view
WIDEST_BLUR = 9  # pixels: all of a pixel's neighbours are read, which for more of them is slower than two products
ROWS = 128  # of a program that works parameters out
CONTRAST, SATURATION, HUE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # torchvision's numbering; 0: brightness
# Columns of the table of parameters, a row for every view.
PARAMETERS = tl.constexpr(16)
TOP, LEFT, HEIGHT, WIDTH, FLIP, FACTOR = (tl.constexpr(column) for column in range(6))
TURN, ORDER, GREY, SIGMA, SOLARISE = (tl.constexpr(column) for column in (8, 9, 13, 14, 15))


class Kind(NamedTuple):
    """The numbers of a ``View``, as the kernels want them."""

    crop_scale: tuple[float, float]
    crop_ratio: tuple[float, float]
    flip: float
    jitter: float
    strengths: tuple[float, float, float]  # brightness, contrast, saturation
    hue: float
    grey: float
    blur: float
    blur_sigma: tuple[float, float]
    blur_kernel: int
    solarise: float

    @property
    def blends(self) -> bool:
        return self.jitter > 0 and max(self.strengths) > 0


def make_views(
    pixels: Tensor,  # (B, 3, H, W) bytes, one image after the other
    size: Tensor,  # (B, 2) int64 heights and widths
    uniforms: Tensor,  # (n·B, columns) of n views of each image, batch after batch
    attempts: int,  # that a crop has: the columns begin with so many areas and so many ratios
    kind: Kind,
    output_size: int,
    luma: tuple[float, float, float],
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """(n·B, 3, S, S) in ``dtype``, channels last: what ``data/views.py`` makes of these numbers."""
    images, _, height, width = pixels.shape
    assert pixels.is_contiguous()
    assert pixels.dtype == torch.uint8
    assert max(height, width) <= output_size, "views must not be smaller than the canvas"
    assert output_size**2 <= MOST_PIXELS
    assert kind.blur == 0 or kind.blur_kernel <= WIDEST_BLUR
    assert len(uniforms) % images == 0
    table = parameters(size, uniforms, attempts, kind)
    rows, warps, blur = len(table), 4 if output_size <= 32 else 8, kind.blur > 0
    sizes = (output_size, triton.next_power_of_2(output_size**2))
    output = pixels.new_empty((rows, output_size, output_size, 3), dtype=dtype)
    coloured = pixels.new_empty((rows, 3, output_size**2), dtype=torch.float32) if blur else output
    line, solarised = (*mean, *std), kind.solarise > 0
    _make[(rows,)](
        pixels, table, coloured, images, height, width, *luma, *line, *sizes, kind.blends,
        kind.jitter > 0 and kind.hue > 0, kind.grey > 0, solarised, blur, num_warps=warps,
    )  # fmt: skip
    if blur:
        _blur[(rows,)](coloured, table, output, *line, *sizes, kind.blur_kernel, solarised, num_warps=warps)
    return output.permute(0, 3, 1, 2)


def parameters(size: Tensor, uniforms: Tensor, attempts: int, kind: Kind) -> Tensor:
    """(n·B, 16): everything random about a view, worked out as ``parameters_from_uniforms`` does."""
    rows, columns = uniforms.shape
    table = uniforms.new_empty(rows, PARAMETERS.value)
    (narrow, broad), lows = kind.crop_ratio, [max(0.0, 1 - strength) for strength in kind.strengths]
    spans = [1 + strength - low for strength, low in zip(kind.strengths, lows, strict=True)]
    _parameters[(triton.cdiv(rows, ROWS),)](
        uniforms.contiguous(), size.contiguous(), table, rows, len(size), columns, attempts, *kind.crop_scale, narrow,
        broad, math.log(broad / narrow), kind.flip, kind.jitter, *lows, *spans,
        *(strength > 0 for strength in kind.strengths), kind.hue, kind.grey, kind.blur, *kind.blur_sigma, kind.solarise,
        ROWS,
    )  # fmt: skip
    return table


@triton.jit
def _rounded(value):
    """To the nearest whole number, halves to the even one, as torch does."""
    up = tl.floor(value + 0.5)
    odd = up - 2 * tl.floor(up / 2)
    return tl.where(up - value == 0.5, up - odd, up)


@triton.jit
def _uniform(uniforms, row, there, column, COLUMNS: tl.constexpr):
    return tl.load(uniforms + row * COLUMNS + column, there, other=0.5)


@triton.jit
def _write_column(table, row, there, column, value):
    tl.store(table + row * PARAMETERS + column, value.to(tl.float32), there)


@triton.jit
def _before(one, other):
    return (other < one).to(tl.int32)


@triton.jit
def _parameters(
    uniforms, size, table, rows, images, COLUMNS: tl.constexpr, ATTEMPTS: tl.constexpr, SMALL: tl.constexpr,
    LARGE: tl.constexpr, NARROW: tl.constexpr, BROAD: tl.constexpr, LOG: tl.constexpr, FLIPPED: tl.constexpr,
    JITTER: tl.constexpr, LOW_0: tl.constexpr, LOW_1: tl.constexpr, LOW_2: tl.constexpr, SPAN_0: tl.constexpr,
    SPAN_1: tl.constexpr, SPAN_2: tl.constexpr, USED_0: tl.constexpr, USED_1: tl.constexpr, USED_2: tl.constexpr,
    HUES: tl.constexpr, GREYED: tl.constexpr, BLURRED: tl.constexpr, SIGMA_LOW: tl.constexpr, SIGMA_HIGH: tl.constexpr,
    SOLARISED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    # The window, in double precision as in the plain version: the first attempt that fits.
    full_high = tl.load(size + row % images * 2, there, other=1).to(tl.float64)
    full_wide = tl.load(size + row % images * 2 + 1, there, other=1).to(tl.float64)
    high = tl.minimum(full_high, _rounded(full_wide / NARROW))  # none: the largest central one
    wide = tl.minimum(full_wide, _rounded(full_high * BROAD))
    found = tl.zeros((ROWS,), tl.int32)
    for attempt in tl.static_range(ATTEMPTS):
        share = _uniform(uniforms, row, there, attempt, COLUMNS).to(tl.float64)
        area = (SMALL + (LARGE - SMALL) * share) * (full_high * full_wide)
        ratio = NARROW * tl.exp(LOG * _uniform(uniforms, row, there, ATTEMPTS + attempt, COLUMNS).to(tl.float64))
        tried_high, tried_wide = _rounded(tl.sqrt(area / ratio)), _rounded(tl.sqrt(area * ratio))
        fits = (tried_high > 0) & (tried_high <= full_high) & (tried_wide > 0) & (tried_wide <= full_wide)
        first = fits & (found == 0)
        high, wide = tl.where(first, tried_high, high), tl.where(first, tried_wide, wide)
        found = tl.where(fits, 1, found)
    column: tl.constexpr = 2 * ATTEMPTS
    down, across = full_high - high, full_wide - wide
    top = tl.minimum(tl.floor(_uniform(uniforms, row, there, column, COLUMNS).to(tl.float64) * (down + 1)), down)
    left = tl.minimum(
        tl.floor(_uniform(uniforms, row, there, column + 1, COLUMNS).to(tl.float64) * (across + 1)), across
    )
    _write_column(table, row, there, TOP, tl.where(found == 1, top, tl.floor(down / 2)))
    _write_column(table, row, there, LEFT, tl.where(found == 1, left, tl.floor(across / 2)))
    _write_column(table, row, there, HEIGHT, high)
    _write_column(table, row, there, WIDTH, wide)
    _write_column(table, row, there, FLIP, _uniform(uniforms, row, there, column + 2, COLUMNS) < FLIPPED)
    # Colours: factors of 1 and a hue of 0 where there is no jitter.
    applied = _uniform(uniforms, row, there, column + 3, COLUMNS) < JITTER
    factor_0 = LOW_0 + SPAN_0 * _uniform(uniforms, row, there, column + 8, COLUMNS)
    factor_1 = LOW_1 + SPAN_1 * _uniform(uniforms, row, there, column + 9, COLUMNS)
    factor_2 = LOW_2 + SPAN_2 * _uniform(uniforms, row, there, column + 10, COLUMNS)
    turn = HUES * (2 * _uniform(uniforms, row, there, column + 11, COLUMNS) - 1)
    _write_column(table, row, there, FACTOR, tl.where(applied, factor_0, 1.0))
    _write_column(table, row, there, FACTOR + 1, tl.where(applied, factor_1, 1.0))
    _write_column(table, row, there, FACTOR + 2, tl.where(applied, factor_2, 1.0))
    _write_column(table, row, there, TURN, tl.where(applied, turn, 0.0))
    # Their order: each operation's place among the four keys; those that are never used stand last.
    key_0 = _uniform(uniforms, row, there, column + 12, COLUMNS) + (0.0 if USED_0 else 1.0)
    key_1 = _uniform(uniforms, row, there, column + 13, COLUMNS) + (0.0 if USED_1 else 1.0)
    key_2 = _uniform(uniforms, row, there, column + 14, COLUMNS) + (0.0 if USED_2 else 1.0)
    key_3 = _uniform(uniforms, row, there, column + 15, COLUMNS) + (0.0 if HUES > 0 else 1.0)
    # Of equal keys the lower number comes first: `1 − before` counts those that are not above.
    place_0 = _before(key_0, key_1) + _before(key_0, key_2) + _before(key_0, key_3)
    place_1 = 1 - _before(key_0, key_1) + _before(key_1, key_2) + _before(key_1, key_3)
    place_2 = 2 - _before(key_0, key_2) - _before(key_1, key_2) + _before(key_2, key_3)
    place_3 = 3 - _before(key_0, key_3) - _before(key_1, key_3) - _before(key_2, key_3)
    to = table + row * PARAMETERS + ORDER
    tl.store(to + place_0, tl.zeros((ROWS,), tl.float32), there)
    tl.store(to + place_1, tl.zeros((ROWS,), tl.float32) + 1, there)
    tl.store(to + place_2, tl.zeros((ROWS,), tl.float32) + 2, there)
    tl.store(to + place_3, tl.zeros((ROWS,), tl.float32) + 3, there)
    _write_column(table, row, there, GREY, _uniform(uniforms, row, there, column + 4, COLUMNS) < GREYED)
    sigma = SIGMA_LOW + (SIGMA_HIGH - SIGMA_LOW) * _uniform(uniforms, row, there, column + 6, COLUMNS)
    blurred = _uniform(uniforms, row, there, column + 5, COLUMNS) < BLURRED
    _write_column(table, row, there, SIGMA, tl.where(blurred, sigma, 0.0))
    _write_column(table, row, there, SOLARISE, _uniform(uniforms, row, there, column + 7, COLUMNS) < SOLARISED)


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
    red, green, blue, mine, output, row, red_mean, green_mean, blue_mean, red_std, green_std, blue_std,
    SIZE: tl.constexpr, PIXELS: tl.constexpr, SOLARISED: tl.constexpr,
):  # fmt: skip
    if SOLARISED:  # noqa: SIM102 (known when compiling; the other is not)
        if tl.load(mine + SOLARISE) != 0:
            red, green, blue = _solarised(red), _solarised(green), _solarised(blue)
    at = tl.arange(0, PIXELS)
    inside = at < SIZE * SIZE
    to = output + (row.to(tl.int64) * SIZE * SIZE + at) * 3
    tl.store(to, ((red - red_mean) / red_std).to(output.dtype.element_ty), inside)
    tl.store(to + 1, ((green - green_mean) / green_std).to(output.dtype.element_ty), inside)
    tl.store(to + 2, ((blue - blue_mean) / blue_std).to(output.dtype.element_ty), inside)


@triton.jit
def _make(
    pixels, table, output, images, height, width, of_red, of_green, of_blue,
    red_mean, green_mean, blue_mean, red_std, green_std, blue_std, SIZE: tl.constexpr, PIXELS: tl.constexpr,
    BLENDED: tl.constexpr, TURNED: tl.constexpr, GREYED: tl.constexpr, SOLARISED: tl.constexpr, TO_BLUR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    mine = table + row * PARAMETERS
    at = tl.arange(0, PIXELS)
    inside = at < SIZE * SIZE
    down = tl.minimum(at // SIZE, SIZE - 1)
    across = at % SIZE
    across = tl.where(tl.load(mine + FLIP) != 0, SIZE - 1 - across, across)
    top, left = tl.load(mine + TOP).to(tl.int32), tl.load(mine + LEFT).to(tl.int32)
    high, wide = tl.load(mine + HEIGHT).to(tl.int32), tl.load(mine + WIDTH).to(tl.int32)
    upper, lower, low_weight = _along(down, top, high, SIZE)
    first, second, right_weight = _along(across, left, wide, SIZE)
    plane = pixels + (row % images).to(tl.int64) * 3 * height * width
    red = _mixed(plane, upper, lower, low_weight, first, second, right_weight, width)
    plane += height * width
    green = _mixed(plane, upper, lower, low_weight, first, second, right_weight, width)
    plane += height * width
    blue = _mixed(plane, upper, lower, low_weight, first, second, right_weight, width)
    if TURNED and not BLENDED:
        red, green, blue = _rotated(red, green, blue, tl.load(mine + TURN))
    if BLENDED:
        for slot in tl.static_range(4):
            kind = tl.load(mine + ORDER + slot).to(tl.int32)
            if kind == HUE:
                if TURNED:
                    shift = tl.load(mine + TURN)
                    if shift != 0:
                        red, green, blue = _rotated(red, green, blue, shift)
            else:
                share = tl.load(mine + FACTOR + kind)
                if share != 1:
                    shade = _grey(red, green, blue, of_red, of_green, of_blue)
                    reference = tl.where(kind == SATURATION, 1 - share, 0.0) * shade
                    if kind == CONTRAST:
                        reference += (1 - share) * tl.sum(tl.where(inside, shade, 0.0), axis=0) / (SIZE * SIZE)
                    red = _clamped(share * red + reference)
                    green = _clamped(share * green + reference)
                    blue = _clamped(share * blue + reference)
    if GREYED:  # noqa: SIM102
        if tl.load(mine + GREY) != 0:
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
            red, green, blue, mine, output, row, red_mean, green_mean, blue_mean, red_std, green_std, blue_std,
            SIZE, PIXELS, SOLARISED,
        )  # fmt: skip


@triton.jit
def _mirrored(place, SIZE: tl.constexpr):
    place = tl.abs(place)
    return tl.minimum(place, 2 * (SIZE - 1) - place)


@triton.jit
def _blur(
    coloured, table, output, red_mean, green_mean, blue_mean, red_std, green_std, blue_std,
    SIZE: tl.constexpr, PIXELS: tl.constexpr, KERNEL: tl.constexpr, SOLARISED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    mine = table + row * PARAMETERS
    at = tl.arange(0, PIXELS)
    down, across = tl.minimum(at // SIZE, SIZE - 1), at % SIZE
    plane = coloured + row.to(tl.int64) * 3 * SIZE * SIZE
    here = down * SIZE + across
    red = tl.load(plane + here)
    green = tl.load(plane + SIZE * SIZE + here)
    blue = tl.load(plane + 2 * SIZE * SIZE + here)
    width = tl.load(mine + SIGMA)
    if width != 0:
        fall = -0.5 / tl.maximum(width * width, 1e-4)
        total = fall * 0
        for tap in range(KERNEL):
            total += tl.exp(fall * ((tap - KERNEL // 2) * (tap - KERNEL // 2)))
        red, green, blue = tl.zeros_like(red), tl.zeros_like(green), tl.zeros_like(blue)
        for tap in range(KERNEL * KERNEL):
            above, before = tap // KERNEL - KERNEL // 2, tap % KERNEL - KERNEL // 2
            weight = tl.exp(fall * (above * above + before * before)) / (total * total)
            there = _mirrored(down + above, SIZE) * SIZE + _mirrored(across + before, SIZE)
            red += weight * tl.load(plane + there)
            green += weight * tl.load(plane + SIZE * SIZE + there)
            blue += weight * tl.load(plane + 2 * SIZE * SIZE + there)
    _finish(
        red, green, blue, mine, output, row, red_mean, green_mean, blue_mean, red_std, green_std, blue_std,
        SIZE, PIXELS, SOLARISED,
    )  # fmt: skip
