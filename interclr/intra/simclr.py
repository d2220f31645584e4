"""SimCLR (Chen et al. 2020): two views against every other view in the global batch."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from interclr import dist
from interclr.bank import MemoryBank
from interclr.intra.base import IntraMethod, MethodSettings, mean_direction
from interclr.losses import margin_nce
from interclr.models import Backbone, Encoder, mlp
from interclr.types import Batch, Embeddings


class SimCLRConfig(MethodSettings):
    title = "SimCLR"
    name: Literal["simclr"] = "simclr"
    temperature: Annotated[float, Field(gt=0)] = 0.2
    hidden: Annotated[int, Field(ge=1)] = 2048
    dim: Annotated[int, Field(ge=1)] = 128

    def build(self, backbone: Backbone, *, separate_head: bool = False) -> SimCLR:
        return SimCLR(backbone, self, separate_head)


class SimCLR(IntraMethod):
    encoded_views = 1  # both views are one batch to its BatchNorm as well

    def __init__(self, backbone: Backbone, config: SimCLRConfig, separate_head: bool) -> None:
        inter_head = mlp(backbone.features, config.hidden, config.dim) if separate_head else None
        projector = mlp(backbone.features, config.hidden, config.dim)
        super().__init__(Encoder(backbone, projector, inter_projector=inter_head), config.dim)
        self.temperature = config.temperature

    def embed(self, batch: Batch) -> Embeddings:
        # One forward of 2B: BatchNorm sees both views together, as in the original on one device.
        (encoded,) = self.encode(self._forward, [torch.cat(batch.views[:2])])
        query = torch.stack(encoded.query.chunk(2))  # (2, B, D)
        inter = torch.stack(encoded.inter_query.chunk(2))
        return Embeddings(batch.index, query, query.flip(0), inter, mean_direction(inter.detach()))

    def loss(self, embeddings: Embeddings, bank: MemoryBank | None) -> Tensor:
        """NT-Xent: every view's positive is its twin, its negatives the 2B − 2 views of other images."""
        query, target = embeddings.query, embeddings.target  # (2, B, D)
        everyone = torch.cat([dist.all_gather_with_gradient(view) for view in query])  # (2·world·B, D)
        images = dist.all_gather(embeddings.index).repeat(2)
        cosine = query.flatten(0, 1) @ everyone.T  # (2B, 2·world·B)
        same_image = embeddings.index.repeat(2)[:, None] == images
        negative = cosine.masked_fill(same_image, -torch.inf)
        positive = (query * target).sum(-1).flatten()
        return margin_nce(positive, negative, self.temperature, self.margin.value, self.margin.kind)
