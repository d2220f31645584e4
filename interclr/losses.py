"""The losses as pure functions of cosines (MarginNCE) or of embeddings (BYOL), and the cosines of drawn pairs.

Nothing here holds or changes state. Everything is computed in float32 at least, whatever the precision of the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from interclr import kernels
from interclr.types import Pairs

MarginKind = Literal["cosine", "arc"]
Reduction = Literal["mean", "sum", "none"]


def margin_nce(
    positive: Tensor,  # (B,) cosines
    negative: Tensor,  # (B, K) cosines, -inf where there is no negative
    temperature: float | Tensor,
    margin: float = 0.0,
    kind: MarginKind = "cosine",
    reduction: Reduction = "mean",
) -> Tensor:
    """MarginNCE: −log( e^{(cos⁺−m)/τ} / (e^{(cos⁺−m)/τ} + Σ e^{cos⁻/τ}) ).

    m > 0 asks more of the positive than plain InfoNCE (m = 0), m < 0 asks less. With ``kind="arc"`` the margin is an
    angle in radians and cos⁺ − m becomes cos(θ⁺ + m), see :func:`arc_margin`. An entry of −inf in ``negative`` is an
    absent negative: it adds nothing to the sum and receives a gradient of zero. An anchor without any has loss 0.
    A temperature may be a tensor, which is learnt where it asks for a gradient; on a GPU a number is faster.
    """
    learnt = isinstance(temperature, Tensor)
    seen = not (isinstance(temperature, Tensor) and temperature.is_cuda)  # to look at it there would wait for the GPU
    if seen and not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    fused = kernels.usable(positive, negative) and negative.dtype != torch.float64 and not learnt
    positive, negative = _at_least_float32(positive), negative if fused else _at_least_float32(negative)
    if kind == "cosine":
        positive = positive - margin
    elif kind == "arc":
        positive = arc_margin(positive, margin)
    else:
        raise ValueError(f"margin kind must be 'cosine' or 'arc', not {kind!r}")
    if fused:
        loss: Tensor = _fused_nce(positive, negative, temperature)
    else:
        logits = torch.cat([positive[:, None], negative], dim=1) / temperature  # (B, 1 + K)
        first = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        loss = F.cross_entropy(logits, first, reduction="none")  # (B,)
    if reduction == "mean":
        return loss.mean()
    if reduction == "sum":
        return loss.sum()
    if reduction == "none":
        return loss
    raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")


# torch.compile (2.11) would trace into these two and, as their forward writes in place, drop their gradient without a
# word: they are called as they are.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _fused_nce(positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    loss: Tensor = _FusedNCE.apply(positive, negative, temperature)  # type: ignore[no-untyped-call]
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _negative_cosines(query: Tensor, bank: Tensor, pairs: Pairs, workspace: int) -> Tensor:
    negative: Tensor = _NegativeCosines.apply(query, bank, pairs.negative, pairs.cosine, workspace)  # type: ignore[no-untyped-call]
    return negative


class _FusedNCE(torch.autograd.Function):
    """The same as the two lines beside its only use, without their copies of (B, K) numbers."""

    @staticmethod
    def forward(ctx: Any, positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
        from interclr.kernels.nce import nce

        negative = negative if negative.stride(1) == 1 else negative.contiguous()
        loss, total = nce(positive.contiguous(), negative, temperature)
        ctx.save_for_backward(positive, negative, total)
        ctx.temperature = temperature
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from interclr.kernels.nce import nce_backward

        positive, negative, total = ctx.saved_tensors
        return *nce_backward(gradient.contiguous(), positive.contiguous(), negative, total, ctx.temperature), None


def arc_margin(cosine: Tensor, margin: float) -> Tensor:
    """cos(θ + m) for cosines of θ, increasing in the cosine everywhere.

    cos(θ + m) = cos θ · cos m − sin θ · sin m, so no arccos and nothing undefined at cos θ = ±1 (or just beyond, by
    rounding). The slope of sin θ is infinite there; below sin θ = 10⁻⁶ it counts as zero, which keeps gradients finite.

    Where θ + m leaves [0, π] the cosine would turn round and reward the wrong direction. There the value goes on
    as a line of slope 1 in cos θ from the end it has reached: −1 at θ = π − m (m > 0), +1 at θ = −m (m < 0). ArcFace's
    own continuation, cos θ − m·sin m, is also increasing but jumps at that point.
    """
    if not abs(margin) < math.pi:
        raise ValueError(f"an arc margin is an angle in radians between −π and π, not {margin}")
    sine = ((1 - cosine) * (1 + cosine)).clamp_min(1e-12).sqrt()
    shifted = cosine * math.cos(margin) - sine * math.sin(margin)
    if margin >= 0:
        return torch.where(cosine > -math.cos(margin), shifted, cosine + math.cos(margin) - 1)
    return torch.where(cosine < math.cos(margin), shifted, cosine - math.cos(margin) + 1)


def byol_mse(prediction: Tensor, target: Tensor) -> Tensor:
    """BYOL's loss, the squared distance of the normalised vectors: mean of 2 − 2 cos(prediction, target).

    Both are (..., D) and are normalised here, which changes nothing if they already are. Whether the target carries
    gradient is the caller's decision.
    """
    prediction = F.normalize(_at_least_float32(prediction), dim=-1)
    target = F.normalize(_at_least_float32(target), dim=-1)
    return (2 - 2 * (prediction * target).sum(dim=-1)).mean()


def soft_labels(
    query: Tensor,  # (A, D) normalised, with gradient
    target: Tensor,  # (A, D) normalised
    centroids: Tensor,  # (k, D)
    temperature: float = 0.1,
    target_temperature: float = 0.05,
) -> Tensor:
    """Cross-entropy −Σ_c p_c·log q_c, mean over anchors: q is how the query is divided over the clusters, p the target.

    Both are softmax of the cosines with the centroids, p at the lower temperature, so that it is the surer of the two,
    and without gradient. Beyond the paper, whose pseudo-labels are hard: there a wrong one counts as much as a right
    one. Here an image between clusters belongs to all of them a little, and what is learnt is how alike others are.
    """
    if not temperature > 0 or not target_temperature > 0:
        raise ValueError(f"temperatures must be positive, not {temperature} and {target_temperature}")
    with torch.autocast(query.device.type, enabled=False):
        centres = F.normalize(_at_least_float32(centroids.detach()), dim=1)  # (k, D)
        with torch.no_grad():
            expected = (_at_least_float32(target) @ centres.T / target_temperature).softmax(dim=1)  # (A, k)
        found = (_at_least_float32(query) @ centres.T / temperature).log_softmax(dim=1)  # (A, k)
        return -(expected * found).sum(dim=1).mean()


def cosines(
    query: Tensor,  # (A, D) normalised, with gradient
    bank_features: Tensor,  # (N, D) normalised, without gradient
    pairs: Pairs,
    workspace: int = 2**28,
) -> tuple[Tensor, Tensor]:
    """Cosines of each anchor to its positive (A,) and its negatives (A, K); −inf where ``pairs`` has no negative (−1).

    The gathered negatives would be A·K·D floats (2 GB at ImageNet scale), in the forward and again for the backward.
    Neither keeps them: anchors are taken in chunks whose temporaries stay within ``workspace`` bytes, and the backward
    is a weighted sum of bank rows. A bank in half precision is read as it is and multiplied in float32. On a GPU one
    Triton kernel gathers and multiplies (``kernels/gather.py``). Cosines that the sampler has handed on (those
    of the query it drew for) are not worked out again.
    """
    query, bank_features = _at_least_float32(query), bank_features.detach()
    positive = (query * bank_features[pairs.positive]).sum(dim=1)  # (A,)
    return positive, _negative_cosines(query, bank_features, pairs, workspace)


# Multiplying with the whole bank and picking K of N results beats gathering K rows per anchor until N is about this
# many times K: measured 66 to 70 on one CPU core, and level at 78 on an H200 (N = 1.28M, K = 16,384: 3.1 and 3.4 ms).
_DENSE_UP_TO = 64


class _NegativeCosines(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, bank: Tensor, negative: Tensor, known: Tensor | None, workspace: int
    ) -> Tensor:
        ctx.save_for_backward(bank, negative)
        ctx.workspace = workspace
        if known is not None:
            return known.clone()  # an output must not be an input
        if kernels.usable(query, bank) and query.dtype == torch.float32:
            from interclr.kernels.gather import gathered_products

            return gathered_products(query, bank, negative)
        whole = _widened(bank, query.dtype, workspace)
        dense = whole is not None and len(bank) <= _DENSE_UP_TO * negative.shape[1]
        result = query.new_empty(negative.shape)
        per_anchor = len(bank) if dense else negative.shape[1] * bank.shape[1]
        with torch.autocast(query.device.type, enabled=False):
            for rows in _chunks(len(query), per_anchor * query.element_size(), workspace):
                index = negative[rows].clamp_min(0)  # (a, K)
                if dense and whole is not None:
                    result[rows] = (query[rows] @ whole.T).gather(1, index)
                else:
                    result[rows] = (bank[index].to(query.dtype) @ query[rows, :, None]).squeeze(2)
        return result.masked_fill_(negative < 0, -math.inf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Σ_k gradient_ik · bank[negative_ik] for every anchor i."""
        bank, negative = ctx.saved_tensors
        if kernels.usable(gradient, bank) and gradient.dtype == torch.float32:
            from interclr.kernels.gather import weighted_rows

            return weighted_rows(gradient, bank, negative), None, None, None, None
        weight, index = gradient.masked_fill(negative < 0, 0.0), negative.clamp_min(0)  # (A, K)
        whole = _widened(bank, weight.dtype, ctx.workspace)
        if whole is not None:
            return F.embedding_bag(index, whole, per_sample_weights=weight, mode="sum"), None, None, None, None
        result = weight.new_empty(len(weight), bank.shape[1])  # (A, D)
        with torch.autocast(weight.device.type, enabled=False):
            per_anchor = index.shape[1] * bank.shape[1] * weight.element_size()
            for rows in _chunks(len(weight), per_anchor, ctx.workspace):
                result[rows] = (weight[rows, None] @ bank[index[rows]].to(weight.dtype)).squeeze(1)
        return result, None, None, None, None


def _widened(bank: Tensor, dtype: torch.dtype, workspace: int) -> Tensor | None:
    """The bank in ``dtype``; None if that takes a copy (of a bank in half precision) larger than the workspace."""
    if bank.dtype == dtype or bank.numel() * dtype.itemsize <= workspace:
        return bank.to(dtype)
    return None


def _chunks(count: int, bytes_each: int, workspace: int) -> Iterator[slice]:
    step = max(1, workspace // max(1, bytes_each))
    return (slice(begin, begin + step) for begin in range(0, count, step))


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
