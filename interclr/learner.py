"""Intra and inter branch composed: the algorithm of the paper on one screen.

    loss = λ·intra + (1 − λ)·inter

The bank is read as it was before the step; ``commit`` is the only place where it is written.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from interclr import dist
from interclr.bank import MemoryBank
from interclr.intra.base import IntraMethod, Margin
from interclr.labels import Labels, LabelsConfig, OnlineLabelsConfig
from interclr.samplers import Sampler, SamplerConfig, SemiHardConfig
from interclr.types import Batch, Config, Embeddings, Pairs

MarginKind = Literal["cosine", "arc"]


class InterConfig(Config):
    """The inter branch. Defaults are the paper's; ``auto`` follows the number of images."""

    intra_weight: Annotated[float, Field(ge=0, le=1)] = 0.75  # λ; 1 is exactly the plain method
    clusters: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"  # k
    labels: LabelsConfig = OnlineLabelsConfig()
    sampler: SamplerConfig = SemiHardConfig(negatives="auto")
    margin: Annotated[float, Field(ge=-2, le=2)] = -0.5  # m of the inter loss
    margin_kind: MarginKind = "cosine"
    warmup_epochs: Annotated[int, Field(ge=0)] = 0  # epochs of intra only, at no cost; clusters start after them
    head: Literal["shared", "separate"] = "shared"
    bank_momentum: Annotated[float, Field(gt=0, le=1)] | None = None  # ω; None: what suits the method
    bank_dtype: Literal["float32", "bfloat16"] = "float32"


class Learner(nn.Module):
    """One intra method, and where asked for the inter branch beside it. Holds all state a checkpoint needs."""

    def __init__(
        self,
        intra: IntraMethod,
        bank: MemoryBank | None = None,
        labels: Labels | None = None,
        sampler: Sampler | None = None,
        inter: InterConfig | None = None,
    ) -> None:
        super().__init__()
        self.intra, self.bank, self.labels, self.sampler, self.inter = intra, bank, labels, sampler, inter
        if inter is not None:
            intra.inter_margin = Margin(inter.margin, inter.margin_kind)

    def inter_active(self, epoch: int) -> bool:
        return self.inter is not None and self.inter.intra_weight < 1 and epoch >= self.inter.warmup_epochs

    def loss(self, batch: Batch, epoch: int) -> tuple[Tensor, Embeddings, dict[str, Tensor]]:
        """The loss of a batch, the embeddings to commit, and named terms to log."""
        embeddings = self.intra.embed(batch)
        intra = self.intra.loss(embeddings, self.bank)
        alignment = 2 - 2 * (embeddings.query * embeddings.target).sum(-1).mean().detach()
        terms = {"intra_loss": intra.detach(), "alignment": alignment}
        if not self.inter_active(epoch):
            return intra, embeddings, terms
        assert self.bank is not None
        assert self.inter is not None
        inter = self.intra.inter_loss(embeddings, self._draw(embeddings, self.bank), self.bank)
        weight = self.inter.intra_weight  # λ
        return weight * intra + (1 - weight) * inter, embeddings, terms | {"inter_loss": inter.detach()}

    def _draw(self, embeddings: Embeddings, bank: MemoryBank) -> Pairs:
        """Pairs for every direction in turn, so that the draw does not depend on the number of ranks."""
        assert self.sampler is not None
        total = len(embeddings.index) * dist.world()
        first = len(embeddings.index) * dist.rank()
        drawn = [
            self.sampler.draw(query, embeddings.index, bank, self.intra.generator, total, first)
            for query in embeddings.inter_query.detach()
        ]
        return Pairs(torch.cat([pairs.positive for pairs in drawn]), torch.cat([pairs.negative for pairs in drawn]))

    @torch.no_grad()
    def commit(self, embeddings: Embeddings, step: int, epoch: int) -> dict[str, Tensor]:
        """Every rank gathers the same (index, feature) pairs and applies the same writes."""
        terms: dict[str, Tensor] = {}
        if self.bank is not None and (self.intra.uses_bank or self.inter_active(epoch)):
            index, feature = dist.all_gather(embeddings.index), dist.all_gather(embeddings.feature)
            if self.inter_active(epoch):
                assert self.labels is not None
                terms["labels_changed"] = self.labels.commit(self.bank, index, feature, step) / len(index)
            else:
                self.bank.write(index, feature)
        self.intra.commit(embeddings)
        return terms

    def start_clusters(self, features: Tensor, generator: torch.Generator) -> None:
        """Fill the bank with the features (N, D) of every image and cluster them: once, before the branch starts."""
        assert self.bank is not None
        assert self.labels is not None
        assert self.sampler is not None
        self.labels.initialise(self.bank, features, generator)
        self.sampler.check(self.bank)

    def end_epoch(self, epoch: int, generator: torch.Generator) -> None:
        if self.inter_active(epoch):
            assert self.bank is not None
            assert self.labels is not None
            assert self.sampler is not None
            self.labels.end_epoch(self.bank, epoch, generator)
            self.sampler.check(self.bank)
