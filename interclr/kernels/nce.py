"""−log softmax of one positive among many negatives, and its gradient, in one pass over the negatives each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # negatives at a time


def nce(positive: Tensor, negative: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(B,) float32 loss and (B,) log Σ exp, of cosines (B,) and (B, K) divided by the temperature; −inf is absent."""
    rows, width = negative.shape
    loss = torch.empty(rows, dtype=torch.float32, device=negative.device)
    total = torch.empty_like(loss)
    _nce[(rows,)](positive, negative, loss, total, width, negative.stride(0), 1 / temperature, BLOCK, num_warps=4)
    return loss, total


def nce_backward(
    gradient: Tensor, positive: Tensor, negative: Tensor, total: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Gradients of both kinds of cosines, like them, for that of the loss (B,)."""
    of_positive, of_negative = torch.empty_like(positive), torch.empty_like(negative)
    rows, width = negative.shape
    grid = (rows, triton.cdiv(width, BLOCK))
    _nce_backward[grid](
        gradient, positive, negative, total, of_positive, of_negative, width, negative.stride(0), of_negative.stride(0),
        1 / temperature, BLOCK, num_warps=4,
    )  # fmt: skip
    return of_positive, of_negative


@triton.jit
def _nce(positive, negative, loss, total, width, stride, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(positive + row).to(tl.float32) * scale
    most = own  # the largest so far, and the sum relative to it
    sum_of = tl.full((), 1.0, tl.float32)
    begin = tl.zeros((), tl.int32)
    while begin < width:
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(negative + row * stride + column, column < width, other=float("-inf")).to(tl.float32) * scale
        higher = tl.maximum(most, tl.max(value, axis=0))
        sum_of = sum_of * tl.exp(most - higher) + tl.sum(tl.exp(value - higher), axis=0)
        most = higher
        begin += BLOCK
    log = most + tl.log(sum_of)
    tl.store(loss + row, log - own)
    tl.store(total + row, log)


@triton.jit
def _nce_backward(
    gradient, positive, negative, total, of_positive, of_negative, width, stride, result_stride, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    given, log = tl.load(gradient + row) * scale, tl.load(total + row)
    value = tl.load(negative + row * stride + column, column < width, other=float("-inf")).to(tl.float32) * scale
    result = given * tl.exp(value - log)
    tl.store(of_negative + row * result_stride + column, result.to(of_negative.dtype.element_ty), column < width)
    if tl.program_id(1) == 0:
        own = tl.load(positive + row).to(tl.float32) * scale
        tl.store(of_positive + row, (given * (tl.exp(own - log) - 1)).to(of_positive.dtype.element_ty))
