"""Projection and prediction heads, and the encoder that joins them to a backbone."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from interclr.models.backbones import Backbone


def mlp(features: int, hidden: int, output: int, *, batch_norm: bool = False, layers: int = 2) -> nn.Sequential:
    """``layers`` linear layers with ReLU between; with ``batch_norm`` a BN before every ReLU (BYOL, SimSiam)."""
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        parts.append(nn.Linear(features, hidden, bias=not batch_norm))
        if batch_norm:
            parts.append(nn.BatchNorm1d(hidden))
        parts.append(nn.ReLU(inplace=True))
        features = hidden
    return nn.Sequential(*parts, nn.Linear(features, output))


class Encoded(NamedTuple):
    """L2-normalised outputs of an encoder. Without a predictor ``query`` is ``projection`` itself."""

    projection: Tensor  # (B, D) what a target or a bank keeps
    query: Tensor  # (B, D) what is compared with a target
    inter_projection: Tensor  # (B, D) the same two for the inter branch: the same tensors when the head is shared
    inter_query: Tensor  # (B, D)


class Encoder(nn.Module):
    """Backbone → projector (→ predictor). ``inter_projector`` gives the inter branch a head of its own."""

    def __init__(
        self,
        backbone: Backbone,
        projector: nn.Module,
        predictor: nn.Module | None = None,
        inter_projector: nn.Module | None = None,
        inter_predictor: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = projector
        self.predictor = predictor
        self.inter_projector = inter_projector
        self.inter_predictor = inter_predictor

    def forward(self, images: Tensor) -> Encoded:
        hidden = self.backbone(images)
        projection, query = _head(hidden, self.projector, self.predictor)
        if self.inter_projector is None:
            return Encoded(projection, query, projection, query)
        return Encoded(projection, query, *_head(hidden, self.inter_projector, self.inter_predictor))


def _head(hidden: Tensor, projector: nn.Module, predictor: nn.Module | None) -> tuple[Tensor, Tensor]:
    raw = projector(hidden)
    projection = F.normalize(raw.float(), dim=1)  # float: cosines and temperatures need the mantissa
    if predictor is None:
        return projection, projection
    return projection, F.normalize(predictor(raw).float(), dim=1)
