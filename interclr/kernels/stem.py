"""The first convolution of a network for small images: 3×3 over the three colours of (B, 3, H, W), padding 1.

With 27 numbers in and many channels out it is bound by writing the result; a general convolution pads the colours to
eight and takes several times as long. In half precision, sums in float32; the gradient of the weights is added up in a
fixed order. The mean and variance that BatchNorm wants of the result are found on the way, without reading it again.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from interclr.kernels.norm import Moments

ROWS = 128  # places of a tile
MOST_TILES = 16  # that a program convolves, one after the other
TAPS = 32  # 27, as a power of two
PROGRAMS = 512  # that share the gradient
TOGETHER, FEW = 256, 16  # programs at a time, and channels, of a program that puts moments together


def convolve(x: Tensor, weight: Tensor, stride: int, parts: int = 1) -> tuple[Tensor, Moments | None]:
    """(B, 3, H, W) and (C, 3, 3, 3), both with channels last in memory → (B, C, H', W') with channels last.

    With it the moments of its ``parts``, unless tiles lie across them.
    """
    count, _, height, width = x.shape
    high, wide = (height - 1) // stride + 1, (width - 1) // stride + 1
    channels = weight.shape[0]
    output = x.new_empty(count, high, wide, channels)
    rows = count * high * wide
    tiles = triton.cdiv(rows, ROWS)
    with_moments = rows % (parts * ROWS) == 0
    each = math.gcd(tiles // parts, MOST_TILES) if with_moments else 1
    programs = tiles // each
    partial = x.new_empty(2, programs if with_moments else 0, channels, dtype=torch.float32)
    _convolve[(programs,)](
        x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1), output, partial, rows, channels,
        height, width, high, wide, stride, each, ROWS, TAPS, triton.next_power_of_2(channels), with_moments,
        num_warps=4,
    )  # fmt: skip
    result = output.permute(0, 3, 1, 2)
    if not with_moments:
        return result, None
    mean, variance = x.new_empty(2, parts, channels, dtype=torch.float32)
    _combine[(triton.cdiv(channels, FEW), parts)](
        partial, mean, variance, programs // parts, channels, each * ROWS, TOGETHER, FEW, num_warps=8
    )
    return result, Moments(mean, variance)


def weight_gradient(x: Tensor, gradient: Tensor, stride: int) -> Tensor:
    """(C, 3, 3, 3) float32, the gradient of the weight for that of the output (B, C, H', W'), channels last."""
    _, _, height, width = x.shape
    count, channels, high, wide = gradient.shape
    rows = count * high * wide
    programs = min(PROGRAMS, triton.cdiv(rows, ROWS))
    partial = x.new_empty(programs, channels, TAPS, dtype=torch.float32)
    _weight_gradient[(programs,)](
        x.permute(0, 2, 3, 1), gradient.permute(0, 2, 3, 1), partial, rows, channels, programs,
        height, width, high, wide, stride, ROWS, TAPS, triton.next_power_of_2(channels), num_warps=4,
    )  # fmt: skip
    return partial.sum(0)[:, :27].reshape(channels, 3, 3, 3).permute(0, 3, 1, 2)


@triton.jit
def _patches(
    x, row, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    STRIDE: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """(ROWS, TAPS): the 27 numbers around each place, 0 outside the image."""
    tap = tl.arange(0, TAPS)
    down, across, colour = tap // 9 - 1, tap % 9 // 3 - 1, tap % 3
    image, place = row // (HIGH * WIDE), row % (HIGH * WIDE)
    top, left = place // WIDE * STRIDE, place % WIDE * STRIDE
    y, z = top[:, None] + down[None, :], left[:, None] + across[None, :]
    inside = (y >= 0) & (y < HEIGHT) & (z >= 0) & (z < WIDTH) & (tap < 27)[None, :] & (row < rows)[:, None]
    start = (image.to(tl.int64) * HEIGHT + top) * WIDTH + left
    offset = start[:, None] * 3 + ((down * WIDTH + across) * 3 + colour)[None, :]
    return tl.load(x + offset, inside, other=0.0)


@triton.jit
def _convolve(
    x, weight, output, partial, rows, channels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, STRIDE: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    tap, channel = tl.arange(0, TAPS), tl.arange(0, CHANNELS)
    known = (tap < 27)[:, None] & (channel < channels)[None, :]
    kernel = tl.load(weight + channel[None, :] * 27 + tap[:, None], known, other=0.0)
    one = tl.zeros((ROWS, CHANNELS), tl.float32)
    two = tl.zeros((ROWS, CHANNELS), tl.float32)
    turn = tl.program_id(0) * 0
    while turn < EACH:
        row = (tl.program_id(0) * EACH + turn) * ROWS + tl.arange(0, ROWS)
        patches = _patches(x, row, rows, HEIGHT, WIDTH, HIGH, WIDE, STRIDE, TAPS)
        result = tl.dot(patches, kernel).to(output.dtype.element_ty)
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        there = (row < rows)[:, None] & (channel < channels)[None, :]
        tl.store(output + at, result, there)
        if MOMENTS:  # as it was written
            value = result.to(tl.float32)
            one += value
            two += value * value
        turn += 1
    if MOMENTS:  # the mean, and the squares around it: off by some 1e-6 of the squared mean, as bfloat16's rounding is
        total = tl.sum(one, axis=0)
        mean = total / (EACH * ROWS)
        mine = partial + tl.program_id(0) * channels + channel
        tl.store(mine, mean, channel < channels)
        squares = tl.maximum(tl.sum(two, axis=0) - total * mean, 0.0)
        tl.store(mine + tl.num_programs(0) * channels, squares, channel < channels)


@triton.jit
def _combine(
    partial, means, variances, programs, channels, ROWS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Mean and variance of a part of those of its programs, in a fixed order."""
    channel = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    part, parts = tl.program_id(1), tl.num_programs(1)
    known = channel < channels
    own = partial + part * programs * channels
    squares = own + parts * programs * channels
    first = tl.load(own + channel, known, other=0.0)  # one of the means: the others are near it
    one = tl.zeros((HIGH, WIDE), tl.float32)
    two = tl.zeros((HIGH, WIDE), tl.float32)
    within = tl.zeros((HIGH, WIDE), tl.float32)
    start = part * 0
    while start < programs:
        program = start + tl.arange(0, HIGH)
        at, there = program[:, None] * channels + channel[None, :], (program < programs)[:, None] & known[None, :]
        away = tl.where(there, tl.load(own + at, there, other=0.0) - first[None, :], 0.0)
        one += away
        two += away * away
        within += tl.load(squares + at, there, other=0.0)
        start += HIGH
    away = tl.sum(one, axis=0) / programs
    between = tl.maximum(tl.sum(two, axis=0) / programs - away * away, 0.0)
    tl.store(means + part * channels + channel, first + away, known)
    tl.store(variances + part * channels + channel, tl.sum(within, axis=0) / (programs * ROWS) + between, known)


@triton.jit
def _weight_gradient(
    x, gradient, partial, rows, channels, programs, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tap, channel = tl.arange(0, TAPS), tl.arange(0, CHANNELS)
    total = tl.zeros((CHANNELS, TAPS), tl.float32)
    tile = program
    while tile < tl.cdiv(rows, ROWS):
        row = tile * ROWS + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * channels + channel[None, :]
        there = (row < rows)[:, None] & (channel < channels)[None, :]
        mine = tl.load(gradient + at, there, other=0.0)
        patches = _patches(x, row, rows, HEIGHT, WIDTH, HIGH, WIDE, STRIDE, TAPS)
        total += tl.dot(tl.trans(mine), patches)
        tile += programs
    at = (program * channels + channel)[:, None] * TAPS + tap[None, :]
    tl.store(partial + at, total, (channel < channels)[:, None] & (tap >= 0)[None, :])
