"""NPIDv2 (Wu et al. 2018 with an MLP head and blur): an image against its own bank entry and random other entries."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from interclr.bank import MemoryBank
from interclr.intra.base import IntraMethod, MethodSettings
from interclr.losses import margin_nce
from interclr.models import Backbone, Encoder, mlp
from interclr.types import Batch, Embeddings


class NPIDConfig(MethodSettings):
    title = "NPID v2"
    views_needed = 1
    separate_heads = False
    name: Literal["npidv2"] = "npidv2"
    negatives: Annotated[int, Field(ge=1)] | Literal["auto"] = 16_384
    temperature: Annotated[float, Field(gt=0)] = 0.1
    bank_momentum: Annotated[float, Field(gt=0, le=1)] = 0.5
    # What the bank holds at first: random unit vectors, as in NPID, or every image as the untrained network sees it. An
    # inter branch that begins with the first epoch fills it with these in any case.
    bank_start: Literal["random", "features"] = "random"
    hidden: Annotated[int, Field(ge=1)] = 2048
    dim: Annotated[int, Field(ge=1)] = 128

    def build(self, backbone: Backbone, *, separate_head: bool = False) -> NPID:
        assert not separate_head, "one bank for both branches: Settings refuses it"
        assert isinstance(self.negatives, int), "auto is resolved before anything is built"
        return NPID(backbone, self.negatives, self)


class NPID(IntraMethod):
    views_needed = NPIDConfig.views_needed
    encoded_views = 1
    directions = 1
    uses_bank = True

    def __init__(self, backbone: Backbone, negatives: int, config: NPIDConfig) -> None:
        super().__init__(Encoder(backbone, mlp(backbone.features, config.hidden, config.dim)), config.dim)
        self.temperature, self.bank_momentum, self.negatives = config.temperature, config.bank_momentum, negatives
        self.starts_from_features = config.bank_start == "features"

    def embed(self, batch: Batch) -> Embeddings:
        (encoded,) = self.encode(self._forward, batch.views[:1])
        query = torch.stack([encoded.query])  # (1, B, D)
        # The target of NPID is the image's own entry in the bank, which only ``loss`` may read.
        return Embeddings(batch.index, query, query.detach(), query, query[0].detach())

    def target_of(self, embeddings: Embeddings, bank: MemoryBank | None) -> Tensor:
        """The image's own entry in the bank."""
        assert bank is not None, "NPID reads its positives and negatives from the bank"
        return bank.features[embeddings.index].float()[None]

    def loss(self, embeddings: Embeddings, bank: MemoryBank | None) -> Tensor:
        """K entries drawn once and shared by the batch: one matrix product; uniform for every anchor on its own.

        Drawn with replacement, as in NPID; an anchor's own entry among them is left out for that anchor.
        """
        assert bank is not None
        query, index = embeddings.query[0], embeddings.index
        drawn = torch.randint(len(bank.features), (self.negatives,), generator=self.generator, device=query.device)
        positive = (query * self.target_of(embeddings, bank)[0]).sum(1)  # (B,)
        negative = query @ bank.features[drawn].float().T  # (B, K)
        negative = negative.masked_fill(drawn == index[:, None], -torch.inf)
        return margin_nce(positive, negative, self.temperature, self.margin.value, self.margin.kind)
