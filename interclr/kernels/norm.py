"""BatchNorm of parts of a batch with what follows it (the residual, the ReLU), in two passes each way.

Memory decides here, so the count of passes over an activation is what these kernels save. Forward: one read for the
sums, then one read and one write. Backward: the gradients of the two uses of an output (the next convolution, the skip
connection) are added while they are read; whether the ReLU let a value through is worked out again from BatchNorm's
input, or read from the output where a residual was added. A residual that is normalised itself, as where a stage of a
ResNet begins, is normalised while it is read. What such a stage's 1×1 convolution with stride 2 takes of its input is
written beside it: the gradient of that quarter is then as small.

Rows (images × places) go to as many programs as keep the device busy; their sums lie side by side and are added in a
fixed order, so results are repeatable: no atomics. The first pass walks from the last row of every part to its first,
the second back, all channels of a row together, so that it meets what is still in the cache.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 64  # of a tile
SUM_ROWS, UNROLL = 32, 4  # of a tile of the first pass; tiles in flight
APPLY_ROWS = 64  # of a tile of the second pass: a program has one
PROGRAMS = 4  # of the first pass per multiprocessor
WARPS = 4  # tried by hand on an H200: with 8, or other tiles, slower
# At most so many registers, that the programs of the first pass run all at once; other makers' GPUs have no such limit.
ALL_AT_ONCE = {"maxnreg": 65_536 // (PROGRAMS * WARPS * 32)} if torch.version.hip is None else {}
FEW = 16  # channels of a program that adds sums up


class Norm(NamedTuple):
    """A BatchNorm layer."""

    weight: Tensor  # (C,) float32, as all that follow
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    batches: Tensor  # 0-d, counts the views that have passed
    momentum: float
    eps: float


class Moments(NamedTuple):
    mean: Tensor  # (parts, C) float32
    variance: Tensor  # (parts, C) float32


class Gradients(NamedTuple):
    input: Tensor  # like the input
    residual: Tensor | None  # the gradient before BatchNorm, where there was a residual
    weight: Tensor  # (C,) float32
    bias: Tensor  # (C,) float32


def moments(x: Tensor, parts: int) -> Moments:
    """Of (R, C) rows that lie in memory one after the other, in equal parts."""
    plan = _plan(x, parts)
    spreads = x.new_empty(2, parts, plan.programs, x.shape[1], dtype=torch.float32)
    _spread[plan.sum_grid](x, spreads, *plan.sizes, SUM_ROWS, plan.wide, plan.even, UNROLL, num_warps=WARPS)
    mean, variance = x.new_empty(2, parts, x.shape[1], dtype=torch.float32)
    group = SUM_ROWS * UNROLL
    _moments[plan.add_grid](spreads, mean, variance, *plan.sizes, parts, group, FEW, plan.padded, num_warps=4)
    return Moments(mean, variance)


def normalise(
    x: Tensor,  # (R, C)
    found: Moments,  # of x
    norm: Norm,
    views: int,
    residual: Tensor | None = None,  # (R, C)
    residual_norm: tuple[Moments, Norm] | None = None,  # where the residual is to be normalised as well
    relu: bool = False,
    size: tuple[int, int] | None = None,  # height and width of the images whose places the rows are
) -> tuple[Tensor, Tensor | None]:
    """relu(norm(x) + residual), and with ``size`` also every second row and column of it.

    The running statistics follow the views in turn, the mean over the parts of each.
    """
    parts = len(found.mean)
    plan = _plan(x, parts)
    assert residual is None or residual.is_contiguous(), "rows must lie one after the other"
    assert size is None or residual is not None, "a quarter is taken behind a residual only"
    output = torch.empty_like(x)
    quarter = None if size is None else x.new_empty(_quarter_of(len(x), size), x.shape[1])
    its_moments, its_norm = residual_norm or (found, norm)
    _apply[plan.apply_grid](
        x, x if residual is None else residual, output, output if quarter is None else quarter,
        *found, *norm, *its_moments, *its_norm, *plan.sizes[:2], *(size or (1, 1)), APPLY_ROWS, plan.wide, plan.even,
        parts, views, residual is not None, residual_norm is not None, relu, size is not None, num_warps=WARPS,
    )  # fmt: skip
    return output, quarter


def normalise_backward(
    first: Tensor,  # (R, C) gradient of the output; or (R / places, C), each row that of so many places
    second: Tensor | None,  # the gradient of another use of the output; with ``size`` of the quarter of it
    x: Tensor,
    output: Tensor | None,  # where there was a residual: what tells which values the ReLU let through
    found: Moments,
    norm: Norm,
    relu: bool,
    size: tuple[int, int] | None = None,
    places: int = 1,  # more than 1 only behind a residual
) -> Gradients:
    parts, residual = len(found.mean), output is not None
    assert len(first) * places == len(x)
    assert residual or places == 1
    assert all(rows is None or rows.is_contiguous() for rows in (first, second, output)), (
        "rows must lie one after the other"
    )
    plan = _plan(x, parts)
    sums = x.new_empty(2, parts, plan.programs, x.shape[1], dtype=torch.float32)
    before = torch.empty_like(x) if residual else first
    line = (*found, norm.weight, norm.bias)
    _backward_sums[plan.sum_grid](
        first, x if second is None else second, x, x if output is None else output, before, sums, *line, norm.eps,
        *plan.sizes, *(size or (1, 1)), places, SUM_ROWS, plan.wide, plan.even, UNROLL, second is not None, residual,
        relu, size is not None, num_warps=WARPS, **ALL_AT_ONCE,
    )  # fmt: skip
    totals = x.new_empty(2, parts, x.shape[1], dtype=torch.float32)
    _backward_moments[plan.add_grid](sums, totals, *plan.sizes[1:], parts, FEW, plan.padded, num_warps=4)
    gradient = torch.empty_like(x)
    weight_gradient, bias_gradient = torch.empty_like(norm.weight), torch.empty_like(norm.bias)
    two = second is not None and not residual  # else they have been added already
    _backward_apply[plan.apply_grid](
        before, second if two else x, x, gradient, totals, *line, weight_gradient, bias_gradient, norm.eps,
        *plan.sizes[:2], APPLY_ROWS, plan.wide, plan.even, parts, two, relu and not residual, num_warps=WARPS,
    )  # fmt: skip
    return Gradients(gradient, before if residual else None, weight_gradient, bias_gradient)


def _quarter_of(rows: int, size: tuple[int, int]) -> int:
    height, width = size
    return rows // (height * width) * ((height + 1) // 2) * ((width + 1) // 2)


class _Plan(NamedTuple):
    sum_grid: tuple[int, int]  # blocks of channels × programs of a part, parts
    add_grid: tuple[int, int]
    apply_grid: tuple[int]  # blocks of channels × parts × tiles of a part
    programs: int
    padded: int  # programs, as a power of two
    sizes: tuple[int, int, int]  # rows of a part, channels, programs
    wide: int  # channels of a tile
    even: bool  # tiles fit without a rest


def _plan(x: Tensor, parts: int) -> _Plan:
    rows, channels = x.shape[0] // parts, x.shape[1]
    assert x.is_contiguous(), "rows must lie one after the other"
    assert rows * parts == x.shape[0], f"{x.shape[0]} rows are not {parts} equal parts"
    wide = min(CHANNELS, triton.next_power_of_2(channels))
    blocks = triton.cdiv(channels, wide)
    wanted = triton.cdiv(PROGRAMS * _multiprocessors(x.device), parts * blocks)
    programs = max(1, min(wanted, triton.cdiv(rows, SUM_ROWS * UNROLL)))
    even = rows % (SUM_ROWS * UNROLL) == 0 and rows % APPLY_ROWS == 0 and channels % wide == 0
    return _Plan(
        (blocks * programs, parts),
        (triton.cdiv(channels, FEW), parts),
        (blocks * parts * triton.cdiv(rows, APPLY_ROWS),),
        programs,
        triton.next_power_of_2(programs),
        (rows, channels, programs),
        wide,
        even,
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _mine(channels, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """The tile, the part and the channels of a program of the second pass: the first tiles of all parts come first."""
    blocks = tl.cdiv(channels, WIDE)
    turn = tl.program_id(0) // blocks
    return turn // PARTS, turn % PARTS, tl.program_id(0) % blocks * WIDE + tl.arange(0, WIDE)


@triton.jit
def _place(tile, base, rows, channels, column, HIGH: tl.constexpr):
    """Offsets (HIGH, WIDE) of a tile, and which of them exist."""
    row = tile * HIGH + tl.arange(0, HIGH)
    return (base + row)[:, None] * channels + column[None, :], (row < rows)[:, None] & (column < channels)[None, :]


@triton.jit
def _place_in_quarter(
    tile, base, rows, channels, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr
):  # fmt: skip
    """Offsets (HIGH, WIDE) of a tile among every second row and column of the images, and which of them exist."""
    row = tile * HIGH + tl.arange(0, HIGH)
    image, top, left = row // (HEIGHT * WIDTH), row // WIDTH % HEIGHT, row % WIDTH
    half_height: tl.constexpr = (HEIGHT + 1) // 2
    half_width: tl.constexpr = (WIDTH + 1) // 2
    start = base // (HEIGHT * WIDTH) * (half_height * half_width)  # a part is whole images
    there = (image * half_height + top // 2) * half_width + left // 2
    taken = (top % 2 == 0) & (left % 2 == 0) & (row < rows)
    return (start + there)[:, None] * channels + column[None, :], taken[:, None] & (column < channels)[None, :]


@triton.jit
def _read(pointer, offset, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer + offset).to(tl.float32)
    return tl.load(pointer + offset, inside, other=0.0).to(tl.float32)


@triton.jit
def _write(pointer, offset, inside, value, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointer + offset, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer + offset, value.to(pointer.dtype.element_ty), inside)


@triton.jit
def _write_pair(to, one, two, part, program, parts, programs, channels, column):
    at = (part * programs + program) * channels + column
    tl.store(to + at, one, column < channels)
    tl.store(to + parts * programs * channels + at, two, column < channels)


@triton.jit
def _read_pairs(pairs, part, parts, programs, channels, column, PADDED: tl.constexpr):
    """(PADDED, WIDE) twice: what the programs of a part have written."""
    program = tl.arange(0, PADDED)
    at = (part * programs + program)[:, None] * channels + column[None, :]
    there = (program < programs)[:, None] & (column < channels)[None, :]
    one = tl.load(pairs + at, there, other=0.0)
    two = tl.load(pairs + parts * programs * channels + at, there, other=0.0)
    return one, two


@triton.jit
def _away(x, start, tile, base, rows, channels, column, HIGH: tl.constexpr, EVEN: tl.constexpr):
    offset, inside = _place(tile, base, rows, channels, column, HIGH)
    value = _read(x, offset, inside, EVEN) - start
    return value if EVEN else tl.where(inside, value, 0.0)


@triton.jit
def _spread(
    x, spreads, rows, channels, programs,
    HIGH: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A program's mean and its squares around it.

    Each place of a tile adds up what its values are away from its first: near enough that nothing cancels.
    """
    blocks, parts = tl.cdiv(channels, WIDE), tl.num_programs(1)
    program, part = tl.program_id(0) // blocks, tl.program_id(1)
    column = tl.program_id(0) % blocks * WIDE + tl.arange(0, WIDE)
    base = part.to(tl.int64) * rows
    tl.static_assert(UNROLL == 4)
    group = tl.cdiv(rows, HIGH * UNROLL) - 1 - program
    offset, inside = _place(group * UNROLL, base, rows, channels, column, HIGH)
    start = _read(x, offset, inside, EVEN)
    if not EVEN:  # where a place has no row in the last group, any value will do that is one of the part's
        some = (base + group * UNROLL * HIGH) * channels + column
        start = tl.where(inside, start, tl.load(x + some, column < channels, other=0.0).to(tl.float32)[None, :])
    one = tl.zeros((HIGH, WIDE), tl.float32)
    two = tl.zeros((HIGH, WIDE), tl.float32)
    count = tl.zeros((HIGH,), tl.int32)
    while group >= 0:  # for loops with such bounds are too much for the interpreter
        first = group * UNROLL
        a = _away(x, start, first, base, rows, channels, column, HIGH, EVEN)
        b = _away(x, start, first + 1, base, rows, channels, column, HIGH, EVEN)
        c = _away(x, start, first + 2, base, rows, channels, column, HIGH, EVEN)
        d = _away(x, start, first + 3, base, rows, channels, column, HIGH, EVEN)
        one += (a + b) + (c + d)
        two += (a * a + b * b) + (c * c + d * d)
        left = rows - first * HIGH - tl.arange(0, HIGH)  # rows from each place on
        count += UNROLL if EVEN else tl.minimum(tl.maximum(tl.cdiv(left, HIGH), 0), UNROLL)
        group -= programs
    share = 1.0 / tl.maximum(count, 1).to(tl.float32)[:, None]
    weight = count.to(tl.float32)[:, None]
    away = one * share
    mean = tl.sum((start + away) * weight, axis=0) / tl.sum(count, axis=0)
    apart = start + away - mean[None, :]
    squares = tl.sum(two - one * away + weight * apart * apart, axis=0)
    _write_pair(spreads, mean, squares, part, program, parts, programs, channels, column)


@triton.jit
def _moments(
    spreads, means, variances, rows, channels, programs, parts,
    GROUP: tl.constexpr, WIDE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Mean and variance of a part, of those of its programs' rows."""
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    part = tl.program_id(1)
    known = column < channels
    mean, squares = _read_pairs(spreads, part, parts, programs, channels, column, PADDED)
    groups, program = tl.cdiv(rows, GROUP), tl.arange(0, PADDED)
    count = tl.where(program < programs, (groups - program + programs - 1) // programs * GROUP, 0)
    count -= tl.where(program == 0, groups * GROUP - rows, 0)  # the first program has the last rows
    weight = (count / rows)[:, None]
    total = tl.sum(mean * weight, axis=0)
    apart = mean - total[None, :]
    variance = tl.maximum(tl.sum(squares, axis=0) / rows + tl.sum(weight * apart * apart, axis=0), 0.0)
    tl.store(means + part * channels + column, total, known)
    tl.store(variances + part * channels + column, variance, known)


@triton.jit
def _run_on(
    means, variances, running_mean, running_var, batches, momentum, rows, channels, column,
    PARTS: tl.constexpr, VIEWS: tl.constexpr,
):  # fmt: skip
    """Let the running statistics follow the views in turn."""
    known = column < channels
    mean = tl.load(running_mean + column, known, other=0.0)
    variance = tl.load(running_var + column, known, other=0.0)
    for view in tl.static_range(VIEWS):
        new_mean = tl.zeros_like(mean)
        new_variance = tl.zeros_like(variance)
        for split in tl.static_range(PARTS // VIEWS):
            at = (view * (PARTS // VIEWS) + split) * channels + column
            new_mean += tl.load(means + at, known, other=0.0)
            new_variance += tl.load(variances + at, known, other=0.0)
        mean += momentum * (new_mean * (VIEWS / PARTS) - mean)
        variance += momentum * (new_variance * (VIEWS / PARTS) * (rows / tl.maximum(rows - 1, 1)) - variance)
    tl.store(running_mean + column, mean, known)
    tl.store(running_var + column, variance, known)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + VIEWS)


@triton.jit
def _apply(
    x, residual, output, quarter,
    means, variances, weight, bias, running_mean, running_var, batches, momentum, eps,
    its_means, its_variances, its_weight, its_bias, its_running_mean, its_running_var, its_batches, its_momentum,
    its_eps, rows, channels, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr, VIEWS: tl.constexpr,
    RESIDUAL: tl.constexpr, ITS_NORM: tl.constexpr, RELU: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    tile, part, column = _mine(channels, PARTS, WIDE)
    base = part.to(tl.int64) * rows
    offset, inside = _place(tile, base, rows, channels, column, HIGH)
    value = _read(x, offset, inside, EVEN)
    if RESIDUAL:
        other = _read(residual, offset, inside, EVEN)
    _, _, scale, shift = _line(means, variances, weight, bias, eps, part, channels, column)
    value = value * scale[None, :] + shift[None, :]
    if ITS_NORM:
        _, _, scale, shift = _line(its_means, its_variances, its_weight, its_bias, its_eps, part, channels, column)
        other = other * scale[None, :] + shift[None, :]
    if RESIDUAL:
        value += other
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # so that NaN stays NaN
    _write(output, offset, inside, value, EVEN)
    if QUARTER:
        there, taken = _place_in_quarter(tile, base, rows, channels, column, HEIGHT, WIDTH, HIGH)
        tl.store(quarter + there, value.to(quarter.dtype.element_ty), taken)
    if tile == 0 and part == 0:
        _run_on(
            means, variances, running_mean, running_var, batches, momentum, rows, channels, column, PARTS, VIEWS
        )  # fmt: skip
        if ITS_NORM:
            _run_on(
                its_means, its_variances, its_running_mean, its_running_var, its_batches, its_momentum, rows, channels,
                column, PARTS, VIEWS,
            )  # fmt: skip


@triton.jit
def _line(means, variances, weight, bias, eps, part, channels, column):
    """BatchNorm of a part as a line in x: mean, 1/σ, slope, level."""
    known = column < channels
    mean = tl.load(means + part * channels + column, known, other=0.0)
    deviation = tl.rsqrt(tl.load(variances + part * channels + column, known, other=0.0) + eps)
    scale = tl.load(weight + column, known, other=0.0) * deviation
    return mean, deviation, scale, tl.load(bias + column, known, other=0.0) - mean * scale


@triton.jit
def _gradient(
    first, second, output, before, value, scale, shift, tile, base, rows, channels, column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, HIGH: tl.constexpr, EVEN: tl.constexpr,
    TWO: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    """The gradient behind the ReLU; with a residual it is also that one's, and is written."""
    offset, inside = _place(tile, base, rows, channels, column, HIGH)
    if PLACES > 1:
        image = (base + tile * HIGH + tl.arange(0, HIGH)) // PLACES
        gradient = _read(first, image[:, None] * channels + column[None, :], inside, EVEN)
    else:
        gradient = _read(first, offset, inside, EVEN)
    if TWO and QUARTER:
        there, taken = _place_in_quarter(tile, base, rows, channels, column, HEIGHT, WIDTH, HIGH)
        gradient += tl.load(second + there, taken, other=0.0).to(tl.float32)
    elif TWO:
        gradient += _read(second, offset, inside, EVEN)
    if RELU:
        passed = _read(output, offset, inside, EVEN) if RESIDUAL else value * scale[None, :] + shift[None, :]
        gradient = tl.where(passed <= 0, 0.0, gradient)
    if RESIDUAL:
        _write(before, offset, inside, gradient, EVEN)
        gradient = gradient.to(before.dtype.element_ty).to(tl.float32)  # as the second pass will read it
    return gradient


@triton.jit
def _backward_sums(
    first, second, x, output, before, sums, means, variances, weight, bias, eps,
    rows, channels, programs, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, UNROLL: tl.constexpr,
    TWO: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g·x̂ of the gradient g behind the ReLU."""
    blocks, parts = tl.cdiv(channels, WIDE), tl.num_programs(1)
    program, part = tl.program_id(0) // blocks, tl.program_id(1)
    column = tl.program_id(0) % blocks * WIDE + tl.arange(0, WIDE)
    base = part.to(tl.int64) * rows
    mean, deviation, scale, shift = _line(means, variances, weight, bias, eps, part, channels, column)
    one = tl.zeros((HIGH, WIDE), tl.float32)
    two = tl.zeros((HIGH, WIDE), tl.float32)
    group = tl.cdiv(rows, HIGH * UNROLL) - 1 - program
    while group >= 0:
        for turn in tl.static_range(0, UNROLL, 2):
            here, after = group * UNROLL + turn, group * UNROLL + turn + 1
            at, there = _place(here, base, rows, channels, column, HIGH)
            a = _read(x, at, there, EVEN)
            at, there = _place(after, base, rows, channels, column, HIGH)
            b = _read(x, at, there, EVEN)
            f = _gradient(
                first, second, output, before, a, scale, shift, here, base, rows, channels, column, HEIGHT, WIDTH,
                PLACES, HIGH, EVEN, TWO, RESIDUAL, RELU, QUARTER,
            )  # fmt: skip
            g = _gradient(
                first, second, output, before, b, scale, shift, after, base, rows, channels, column, HEIGHT, WIDTH,
                PLACES, HIGH, EVEN, TWO, RESIDUAL, RELU, QUARTER,
            )  # fmt: skip
            one += f + g
            two += f * (a - mean[None, :]) + g * (b - mean[None, :])
        group -= programs
    _write_pair(
        sums, tl.sum(one, axis=0), tl.sum(two, axis=0) * deviation, part, program, parts, programs, channels, column
    )


@triton.jit
def _backward_moments(sums, totals, channels, programs, parts, WIDE: tl.constexpr, PADDED: tl.constexpr):
    """Σ g and Σ g·x̂ of a part."""
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    part = tl.program_id(1)
    one, two = _read_pairs(sums, part, parts, programs, channels, column, PADDED)
    tl.store(totals + part * channels + column, tl.sum(one, axis=0), column < channels)
    tl.store(totals + (parts + part) * channels + column, tl.sum(two, axis=0), column < channels)


@triton.jit
def _backward_apply(
    first, second, x, result, totals, means, variances, weight, bias, weight_gradient, bias_gradient, eps,
    rows, channels, HIGH: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, TWO: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """γ/σ · (g − mean of g − x̂ · mean of g·x̂)."""
    tile, part, column = _mine(channels, PARTS, WIDE)
    known = column < channels
    base = part.to(tl.int64) * rows
    offset, inside = _place(tile, base, rows, channels, column, HIGH)
    value = _read(x, offset, inside, EVEN)
    mean, deviation, scale, shift = _line(means, variances, weight, bias, eps, part, channels, column)
    gradient = _gradient(
        first, second, x, result, value, scale, shift, tile, base, rows, channels, column, 1, 1, 1,
        HIGH, EVEN, TWO, False, RELU, False,
    )  # fmt: skip
    one = tl.load(totals + part * channels + column, known, other=0.0)
    two = tl.load(totals + (PARTS + part) * channels + column, known, other=0.0)
    slope = two / rows * deviation * scale
    level = one / rows * scale - slope * mean
    _write(result, offset, inside, gradient * scale[None, :] - value * slope[None, :] - level[None, :], EVEN)
    if tile == 0 and part == 0:
        for other in tl.static_range(1, PARTS):
            one += tl.load(totals + other * channels + column, known, other=0.0)
            two += tl.load(totals + (PARTS + other) * channels + column, known, other=0.0)
        tl.store(weight_gradient + column, two, known)
        tl.store(bias_gradient + column, one, known)
