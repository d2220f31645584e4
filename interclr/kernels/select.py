"""The first K, in the order of the columns, of the best ``fraction`` of every row: by threshold, not by sorting."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def select_pool(
    score: Tensor,  # (A, M) float32; overwritten
    column_label: Tensor,  # (M,) int32
    row_label: Tensor,  # (A,) int32
    column_index: Tensor,  # (M,) int64, what to return for a column
    width: int,
    fraction: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Indices (A, width) int64 and their scores (A, width): −1 and −inf where a row's pool has fewer.

    A row's pool is the best ⌈fraction · m⌉ of the m columns with another label; ties go to the earlier column. From it
    the first ``width`` columns are returned in their order. Four passes over the row find the pool's last score eight
    bits at a time, a fifth collects.
    """
    rows, columns = score.shape
    assert score.is_contiguous()
    index = torch.full((rows, width), -1, dtype=torch.int64, device=score.device)
    taken = torch.full((rows, width), -torch.inf, dtype=torch.float32, device=score.device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    _select_pool[(rows,)](
        score, column_label, row_label, column_index, index, taken, columns, width, *fraction, BLOCK=block, num_warps=8
    )
    return index, taken


@triton.jit
def _ordered(value):
    """Bits of a float as an unsigned number in the float's order."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _select_pool(
    score,
    column_label,
    row_label,
    column_index,
    index,
    taken,
    columns: tl.constexpr,  # as are all bounds of loops: the interpreter cannot count to a number it is handed
    width,
    numerator,
    denominator,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = score + row * columns
    own = tl.load(row_label + row)
    bins = tl.arange(0, 256)

    # First pass: leave out the anchor's own cluster for good, and count by the upper eight bits.
    histogram = tl.zeros((256,), tl.int32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(line + column, inside, other=float("-inf"))
        same = tl.load(column_label + column, inside, other=0) == own
        tl.store(line + column, float("-inf"), inside & same)
        digit = (_ordered(value) >> 24).to(tl.int32)
        histogram += tl.histogram(digit, 256, mask=inside & (same == 0))
    others = tl.sum(histogram).to(tl.int64)
    wanted = ((others * numerator + denominator - 1) // denominator).to(tl.int32)  # ⌈fraction · m⌉

    # The key of the pool's last member, eight bits at a time; ``wanted`` counts what is left to find below it.
    prefix = tl.zeros((), tl.uint32)
    for shift in tl.static_range(24, -1, -8):
        if shift < 24:
            tl.debug_barrier()  # what the first pass stored is read by other threads
            histogram = tl.zeros((256,), tl.int32)
            for begin in range(0, columns, BLOCK):
                column = begin + tl.arange(0, BLOCK)
                value = tl.load(line + column, column < columns, other=float("-inf"))
                key = _ordered(value)
                match = (value > float("-inf")) & ((key >> (shift + 8)) == (prefix >> (shift + 8)))
                histogram += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=match)
        at_least = tl.cumsum(histogram, reverse=True)
        digit = tl.maximum(tl.sum((at_least >= wanted).to(tl.int32)) - 1, 0)
        wanted -= tl.sum(tl.where(bins > digit, histogram, 0))
        prefix = prefix | (digit.to(tl.uint32) << shift)

    # Last pass: collect in the order of the columns; ``wanted`` of those equal to the last member belong to the pool.
    found = tl.zeros((), tl.int32)
    ties = tl.zeros((), tl.int32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(line + column, column < columns, other=float("-inf"))
        key = _ordered(value)
        candidate = value > float("-inf")
        tie = (candidate & (key == prefix)).to(tl.int32)
        turn = ties + tl.cumsum(tie)
        chosen = candidate & ((key > prefix) | ((tie > 0) & (turn <= wanted)))
        place = found + tl.cumsum(chosen.to(tl.int32)) - 1
        keep = chosen & (place < width)
        number = tl.load(column_index + column, keep, other=0)
        tl.store(index + row * width + place, number, keep)
        tl.store(taken + row * width + place, value, keep)
        found += tl.sum(chosen.to(tl.int32))
        ties += tl.sum(tie)
