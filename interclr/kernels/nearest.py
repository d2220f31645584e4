"""argmax over centroids of f·c − ‖c‖²/2, without the (M, k) scores in memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = ((128, 128), (128, 64), (64, 64), (64, 32), (32, 32))  # rows and centroids at a time, best first
HOPPER = 227 * 1024  # bytes of shared memory a program may have


def depth_of(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def block_sizes(depth: int, shared_memory: int = HOPPER) -> tuple[int, int] | None:
    """The largest blocks of features and, twice, of centroids that fit; None where none does."""
    fitting = [pair for pair in BLOCKS if 4 * depth * (pair[0] + 2 * pair[1]) + 1024 <= shared_memory]
    return fitting[0] if fitting else None


def blocks_for(features: Tensor) -> tuple[int, int] | None:
    """``block_sizes`` on the device of ``features``: 99 kB on most GPUs that are not for data centres."""
    limit = HOPPER
    if features.is_cuda:
        properties: Any = torch.cuda.get_device_properties(features.device)
        limit = properties.shared_memory_per_block_optin
    return block_sizes(depth_of(features.shape[1]), limit)


def rough_nearest(features: Tensor, centroids: Tensor) -> Tensor | None:
    """(M,) int64, None where no block fits into the GPU's shared memory.

    Products in TF32 on a GPU: for callers that check the distance themselves before they believe it.
    """
    blocks = blocks_for(features)
    if blocks is None:
        return None
    size, dim = features.shape
    clusters = len(centroids)
    bias = -0.5 * centroids.float().square().sum(dim=1)
    result = torch.empty(size, dtype=torch.int64, device=features.device)
    rows, columns = blocks
    _nearest[(triton.cdiv(size, rows),)](
        features, centroids.contiguous(), bias, result, size, clusters, dim, features.stride(0),
        rows, columns, depth_of(dim), num_warps=8 if rows == 128 else 4, num_stages=2,
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
