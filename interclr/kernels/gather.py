"""Products of each query with rows gathered from the bank, and their gradient, without the (A, K, D) rows in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # bank rows in flight per program
PARTS = 16  # programs that share an anchor's backward; their sums are added in a fixed order


def gathered_products(query: Tensor, bank: Tensor, index: Tensor) -> Tensor:
    """(A, K) float32 query[a] · bank[index[a, k]]; −inf where the index is negative."""
    anchors, width = index.shape
    result = torch.empty(anchors, width, dtype=torch.float32, device=query.device)
    dim = query.shape[1]
    grid = (anchors, triton.cdiv(width, ROWS))
    _products[grid](
        query, bank, index, result, width, dim, query.stride(0), bank.stride(0), ROWS, triton.next_power_of_2(dim)
    )
    return result


def weighted_rows(weight: Tensor, bank: Tensor, index: Tensor) -> Tensor:
    """(A, D) float32 Σ_k weight[a, k] · bank[index[a, k]]; negative indices count for nothing."""
    anchors, width = index.shape
    dim = bank.shape[1]
    parts = min(PARTS, triton.cdiv(width, ROWS))
    each = triton.cdiv(triton.cdiv(width, parts), ROWS) * ROWS
    partial = torch.empty(anchors, parts, dim, dtype=torch.float32, device=weight.device)
    _weighted[(anchors, parts)](
        weight.contiguous(), bank, index, partial, width, dim, bank.stride(0), each, parts, ROWS,
        triton.next_power_of_2(dim),
    )  # fmt: skip
    return partial.sum(1)


@triton.jit
def _products(query, bank, index, result, width, dim, query_stride, bank_stride, ROWS: tl.constexpr, DIM: tl.constexpr):
    anchor = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, DIM)
    inside = slot < width
    row = tl.load(index + anchor * width + slot, inside, other=-1)
    present = row >= 0
    mine = tl.load(query + anchor * query_stride + feature, feature < dim, other=0.0).to(tl.float32)
    mask = present[:, None] & (feature < dim)[None, :]
    rows = tl.load(bank + row[:, None] * bank_stride + feature[None, :], mask, other=0.0).to(tl.float32)
    product = tl.sum(rows * mine[None, :], axis=1)
    tl.store(result + anchor * width + slot, tl.where(present, product, float("-inf")), inside)


@triton.jit
def _weighted(
    weight,
    bank,
    index,
    partial,
    width,
    dim,
    bank_stride,
    each: tl.constexpr,
    parts,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    anchor = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    feature = tl.arange(0, DIM)
    total = tl.zeros((DIM,), tl.float32)
    for begin in range(0, each, ROWS):
        slot = part * each + begin + tl.arange(0, ROWS)
        inside = slot < width
        row = tl.load(index + anchor * width + slot, inside, other=-1)
        present = row >= 0
        share = tl.load(weight + anchor * width + slot, inside & present, other=0.0).to(tl.float32)
        mask = present[:, None] & (feature < dim)[None, :]
        rows = tl.load(bank + row[:, None] * bank_stride + feature[None, :], mask, other=0.0).to(tl.float32)
        total += tl.sum(rows * share[:, None], axis=0)
    tl.store(partial + (anchor * parts + part) * dim + feature, total, feature < dim)
