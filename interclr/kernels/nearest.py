"""argmax over centroids of f·c − ‖c‖²/2, without the (M, k) scores in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_DIM = 256


def block_sizes(depth: int) -> tuple[int, int]:
    """Rows and centroids at a time, so that a block of each, the latter twice, fits into 227 kB of shared memory."""
    return (128, 128) if depth <= 128 else (64, 64)


def rough_nearest(features: Tensor, centroids: Tensor) -> Tensor:
    """(M,) int64. Products in TF32 on a GPU: for callers that check the distance themselves before they believe it."""
    size, dim = features.shape
    clusters = len(centroids)
    bias = -0.5 * centroids.float().square().sum(dim=1)
    result = torch.empty(size, dtype=torch.int64, device=features.device)
    depth = max(16, triton.next_power_of_2(dim))
    assert depth <= LARGEST_DIM, f"features of {dim} numbers do not fit"
    rows, columns = block_sizes(depth)
    _nearest[(triton.cdiv(size, rows),)](
        features, centroids.contiguous(), bias, result, size, clusters, dim, features.stride(0),
        rows, columns, depth, num_warps=8, num_stages=2,
    )  # fmt: skip
    return result


@triton.jit
def _nearest(
    features, centroids, bias, result, size, clusters: tl.constexpr, dim, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DIM)
    mask = (row < size)[:, None] & (depth < dim)[None, :]
    mine = tl.load(features + row.to(tl.int64)[:, None] * stride + depth[None, :], mask, other=0.0).to(tl.float32)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    where = tl.zeros((ROWS,), tl.int32)
    for begin in range(0, clusters, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        across = tl.load(
            centroids + column[None, :] * dim + depth[:, None],
            (column < clusters)[None, :] & (depth < dim)[:, None],
            other=0.0,
        )
        score = tl.dot(mine, across, input_precision="tf32")
        score += tl.load(bias + column, column < clusters, other=float("-inf"))[None, :]
        top, place = tl.max(score, axis=1, return_indices=True)
        better = top > best
        where = tl.where(better, begin + place, where)
        best = tl.maximum(best, top)
    tl.store(result + row, where.to(tl.int64), row < size)
