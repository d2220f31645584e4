"""The first K, in the order of the columns, of the best ``fraction`` of every row: by threshold, not by sorting."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
SAMPLE = 4096  # columns from which a lower bound of the threshold is guessed, at most a block
DEVIATIONS = 4  # standard deviations of that guess that are allowed for, on either side


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
    the first ``width`` columns are returned in their order.

    One pass over the row keeps what lies above a lower bound of the pool's last score; a few passes over what was kept
    find that score eight bits at a time and collect. The bound comes from the first columns, four standard deviations
    below: right if columns are in random order, as the sampler's are. Where it is wrong, or more lies above it than
    there is room for, the passes go over the whole row, so the result never depends on it; only the time does.
    """
    rows, columns = score.shape
    assert score.is_contiguous()
    device = score.device
    index = torch.full((rows, width), -1, dtype=torch.int64, device=device)
    taken = torch.full((rows, width), -torch.inf, dtype=torch.float32, device=device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    sample = min(SAMPLE, block)
    kept = triton.cdiv(room_to_keep(columns, sample, fraction[0] / fraction[1]), block) * block
    kept_score = torch.empty(rows, kept, dtype=torch.float32, device=device)
    kept_column = torch.empty(rows, kept, dtype=torch.int32, device=device)
    _select_pool[(rows,)](
        score, column_label, row_label, column_index, kept_score, kept_column, index, taken, columns, width, *fraction,
        KEPT=kept, SAMPLE=sample, BLOCK=block, DEVIATIONS=DEVIATIONS, num_warps=8,
    )  # fmt: skip
    return index, taken


def room_to_keep(columns: int, sample: int, share: float) -> int:
    """For what lies above the bound in all but about one row of 10,000."""
    expected = min(1.0, (share * sample + DEVIATIONS * (share * sample) ** 0.5 + 2) / sample)  # of the columns
    return min(columns, int(columns * (expected + DEVIATIONS * (expected * (1 - expected) / sample) ** 0.5)) + 64)


@triton.jit
def _ordered(value):
    """Bits of a float as an unsigned number in the float's order."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _narrow(histogram, wanted, prefix, shift: tl.constexpr):
    """The digit at which ``wanted`` is reached from above; what is left to find within it."""
    at_least = tl.cumsum(histogram, reverse=True)
    digit = tl.maximum(tl.sum((at_least >= wanted).to(tl.int32)) - 1, 0)
    wanted -= tl.sum(tl.where(tl.arange(0, 256) > digit, histogram, 0))
    return wanted, prefix | (digit.to(tl.uint32) << shift)


@triton.jit
def _threshold(line, count, wanted, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """The key of the ``wanted``-th best of ``count`` values, and how many that equal it belong to the best."""
    prefix = tl.zeros((), tl.uint32)
    for shift in tl.static_range(24, -1, -8):
        histogram = tl.zeros((256,), tl.int32)
        for begin in range(0, LIMIT, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            value = tl.load(line + column, column < count, other=float("-inf"))
            key = _ordered(value)
            match = value > float("-inf")
            if shift < 24:
                match = match & ((key >> (shift + 8)) == (prefix >> (shift + 8)))
            histogram += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=match)
        wanted, prefix = _narrow(histogram, wanted, prefix, shift)
    return wanted, prefix


@triton.jit
def _collect(
    line, columns, column_index, index, taken, count, width, last, ties_wanted,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """Write the best, in the order of the columns, to ``index`` and ``taken``."""
    found = tl.zeros((), tl.int32)
    ties = tl.zeros((), tl.int32)
    for begin in range(0, LIMIT, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        value = tl.load(line + place, place < count, other=float("-inf"))
        key = _ordered(value)
        candidate = value > float("-inf")
        tie = (candidate & (key == last)).to(tl.int32)
        turn = ties + tl.cumsum(tie)
        chosen = candidate & ((key > last) | ((tie > 0) & (turn <= ties_wanted)))
        slot = found + tl.cumsum(chosen.to(tl.int32)) - 1
        keep = chosen & (slot < width)
        column = place
        if COMPACT:
            column = tl.load(columns + place, keep, other=0)
        tl.store(index + slot, tl.load(column_index + column, keep, other=0), keep)
        tl.store(taken + slot, value, keep)
        found += tl.sum(chosen.to(tl.int32))
        ties += tl.sum(tie)


@triton.jit
def _select_pool(
    score, column_label, row_label, column_index, kept_score, kept_column, index, taken,
    columns: tl.constexpr,  # as are all bounds of loops: the interpreter cannot count to a number it is handed
    width, numerator, denominator,
    KEPT: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr, DEVIATIONS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = score + row * columns
    kept_line = kept_score + row * KEPT
    kept_places = kept_column + row * KEPT
    own = tl.load(row_label + row)

    # A lower bound of the pool's last key, from the first columns.
    first = tl.arange(0, SAMPLE)
    first_key = _ordered(tl.load(line + first, first < columns, other=float("-inf")))
    first_valid = (first < columns) & (tl.load(column_label + first, first < columns, other=0) != own)
    count = tl.sum(first_valid.to(tl.int32))
    share = count.to(tl.float32) * numerator / denominator
    guess = (share + DEVIATIONS * tl.sqrt(share) + 2.0).to(tl.int32)
    bound = tl.zeros((), tl.uint32)
    if guess < count:
        for shift in tl.static_range(24, -1, -8):
            match = first_valid
            if shift < 24:
                match = match & ((first_key >> (shift + 8)) == (bound >> (shift + 8)))
            histogram = tl.histogram(((first_key >> shift) & 255).to(tl.int32), 256, mask=match)
            guess, bound = _narrow(histogram, guess, bound, shift)

    # One pass over the row: leave out the anchor's own cluster, count, keep what may belong to the pool.
    others = tl.zeros((), tl.int32)
    kept = tl.zeros((), tl.int32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(line + column, inside, other=float("-inf"))
        same = inside & (tl.load(column_label + column, inside, other=0) == own)
        tl.store(line + column, float("-inf"), same)
        valid = inside & (same == 0)
        chosen = valid & (_ordered(value) >= bound)
        place = kept + tl.cumsum(chosen.to(tl.int32)) - 1
        keep = chosen & (place < KEPT)
        tl.store(kept_line + place, value, keep)
        tl.store(kept_places + place, column, keep)
        others += tl.sum(valid.to(tl.int32))
        kept += tl.sum(chosen.to(tl.int32))
    tl.debug_barrier()  # what one thread has stored is read by others
    wanted = ((others.to(tl.int64) * numerator + denominator - 1) // denominator).to(tl.int32)  # ⌈fraction · m⌉

    if (kept >= wanted) & (kept <= KEPT):
        ties, last = _threshold(kept_line, kept, wanted, KEPT, BLOCK)
        _collect(
            kept_line, kept_places, column_index, index + row * width, taken + row * width, kept, width, last, ties,
            KEPT, BLOCK, True,
        )  # fmt: skip
    else:
        ties, last = _threshold(line, columns, wanted, columns, BLOCK)
        _collect(
            line, kept_places, column_index, index + row * width, taken + row * width, columns, width, last, ties,
            columns, BLOCK, False,
        )  # fmt: skip
