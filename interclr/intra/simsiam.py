"""SimSiam (Chen & He 2021): predict the other view's projection behind a stop-gradient; no negatives, no momentum."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from interclr.intra.base import MethodSettings, PositiveOnly, mean_direction
from interclr.models import Backbone, Encoder, mlp
from interclr.types import Batch, Embeddings


class SimSiamConfig(MethodSettings):
    title = "SimSiam"
    with_negatives = False
    name: Literal["simsiam"] = "simsiam"
    dim: Annotated[int, Field(ge=1)] = 2048
    hidden: Annotated[int, Field(ge=1)] = 512  # the predictor's bottleneck
    layers: Annotated[int, Field(ge=2)] = 3  # of the projector; 2 on CIFAR-10

    def build(self, backbone: Backbone, *, separate_head: bool = False) -> SimSiam:
        return SimSiam(backbone, self, separate_head)


class SimSiam(PositiveOnly):
    def __init__(self, backbone: Backbone, config: SimSiamConfig, separate_head: bool) -> None:
        def projector() -> nn.Module:
            layers = mlp(backbone.features, config.dim, config.dim, batch_norm=True, layers=config.layers)
            return nn.Sequential(*layers, nn.BatchNorm1d(config.dim, affine=False))

        def predictor() -> nn.Module:
            return mlp(config.dim, config.hidden, config.dim, batch_norm=True)

        inter = (projector(), predictor()) if separate_head else (None, None)
        super().__init__(Encoder(backbone, projector(), predictor(), *inter), config.dim)

    def embed(self, batch: Batch) -> Embeddings:
        encoded = self.encode(self._forward, batch.views[:2])
        return Embeddings(
            index=batch.index,
            query=torch.stack([e.query for e in encoded]),
            target=torch.stack([e.projection.detach() for e in reversed(encoded)]),
            inter_query=torch.stack([e.inter_query for e in encoded]),
            feature=mean_direction(torch.stack([e.inter_projection.detach() for e in encoded])),
        )

    def distance(self, query: Tensor, target: Tensor) -> Tensor:
        """½·D(p₁, z₂) + ½·D(p₂, z₁), D = −cos: from 0 down to −1. A quarter of BYOL's slope, as the rates assume."""
        return -(query * target).sum(-1).mean()
