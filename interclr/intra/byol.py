"""BYOL (Grill et al. 2020): predict a slowly moving target network's view of the other augmentation, no negatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from interclr.intra.base import MethodSettings, PositiveOnly, by_direction, mean_direction
from interclr.losses import byol_mse
from interclr.models import Backbone, Encoded, Encoder, mlp, momentum_copy, update_momentum_copy
from interclr.optim import cosine
from interclr.streams import run_beside
from interclr.types import Batch, Embeddings


class BYOLConfig(MethodSettings):
    title = "BYOL"
    with_negatives = False
    keeps_slow_encoder = True
    name: Literal["byol"] = "byol"
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.99  # of the target at the start; rises to 1 by a cosine
    hidden: Annotated[int, Field(ge=1)] = 4096
    dim: Annotated[int, Field(ge=1)] = 256

    def build(self, backbone: Backbone, *, separate_head: bool = False) -> BYOL:
        return BYOL(backbone, self, separate_head)


class BYOL(PositiveOnly):
    momentum_varies = True

    def __init__(self, backbone: Backbone, config: BYOLConfig, separate_head: bool) -> None:
        def projector() -> torch.nn.Module:
            return mlp(backbone.features, config.hidden, config.dim, batch_norm=True)

        def predictor() -> torch.nn.Module:
            return mlp(config.dim, config.hidden, config.dim, batch_norm=True)

        inter = (projector(), predictor()) if separate_head else (None, None)
        super().__init__(Encoder(backbone, projector(), predictor(), *inter), config.dim)
        self.momentum = config.momentum
        self.target_encoder = momentum_copy(self.encoder)
        self.target_encoder.predictor = self.target_encoder.inter_predictor = None  # the target does not predict

    def embed(self, batch: Batch) -> Embeddings:
        views = batch.views[:2]
        target, online = run_beside(lambda: self._targets(views), lambda: self.encode(self._forward, views))
        return Embeddings(
            index=batch.index,
            query=by_direction([e.query for e in online]),
            target=torch.stack([e.projection for e in reversed(target)]),  # each query's is of the other view
            inter_query=by_direction([e.inter_query for e in online]),
            feature=mean_direction(by_direction([e.inter_projection for e in target])),
        )

    @torch.no_grad()
    def _targets(self, views: Sequence[Tensor]) -> list[Encoded]:
        return self.encode(self.target_encoder, views)

    def distance(self, query: Tensor, target: Tensor) -> Tensor:
        """Mean over images, sum over the V directions: BYOL's symmetric loss."""
        return byol_mse(query, target) * query.shape[0]

    def momentum_at(self, step: int, total: int) -> float:
        return cosine(step, total, self.momentum, 1.0)

    def after_optimiser(self, momentum: float | Tensor) -> None:
        update_momentum_copy(self.target_encoder, self.encoder, momentum)

    def synchronise_norm(self) -> None:
        super().synchronise_norm()
        self.target_encoder = torch.nn.SyncBatchNorm.convert_sync_batchnorm(self.target_encoder)

    def bank_encoder(self) -> Encoder:
        return self.target_encoder
