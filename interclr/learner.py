"""Intra and inter branch composed: the algorithm of the paper on one screen.

    loss = λ·intra + (1 − λ)·inter

A loss reads the bank as it was before the step and writes nothing. State is written in two places afterwards:
``commit`` what the device can, beside the optimiser, then ``maintain`` what the host has to decide.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from interclr import dist
from interclr.bank import MemoryBank
from interclr.data.view_parameters import View
from interclr.intra.base import IntraMethod, Margin
from interclr.labels import Labels, LabelsConfig, OnlineLabelsConfig
from interclr.losses import MarginKind, soft_labels
from interclr.models import Encoded, momentum_copy, running_statistics, update_seeing_copy
from interclr.samplers import Sampler, SamplerConfig, SemiHardConfig
from interclr.samplers.base import Prepared, select_positive
from interclr.streams import start_beside, wait_for_side_streams
from interclr.types import Batch, Config, Embeddings, Pairs


class InterConfig(Config):
    """The inter branch. Defaults are the paper's; ``auto`` follows the number of images."""

    intra_weight: Annotated[float, Field(ge=0, le=1)] = 0.75  # λ; 1 is exactly the plain method
    clusters: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"  # k
    labels: LabelsConfig = OnlineLabelsConfig()
    sampler: SamplerConfig = SemiHardConfig(negatives="auto")
    # own: the method's; of BYOL and SimSiam that is the distance to the positive, without negatives (paper).
    # soft: no pairs; the query is to be divided over the clusters as its target is (losses.soft_labels)
    loss: Literal["own", "margin_nce", "soft"] = "own"
    soft_temperature: Annotated[float, Field(gt=0)] = 0.1  # of the query's division, where the loss is soft
    soft_target_temperature: Annotated[float, Field(gt=0)] = 0.05
    target_view: View | None = None  # of which soft targets are, such as a weak one; None: the method's own
    # Of the copy of the encoder that sees that view, where the method has no slow encoder of its own.
    target_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.99
    margin: Annotated[float, Field(ge=-2, le=2)] = -0.5  # m of the inter loss
    margin_kind: MarginKind = "cosine"
    # Epochs of intra only, at no cost; clusters start after them. auto: half of all.
    warmup_epochs: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    head: Literal["shared", "separate"] = "shared"
    bank_momentum: Annotated[float, Field(gt=0, le=1)] | None = None  # ω; None: what suits the method
    bank_dtype: Literal["float32", "bfloat16"] = "float32"

    def uses_negatives(self, own: bool) -> bool:
        """Whether negatives are drawn; ``own``: whether the method's own inter loss has them."""
        return self.loss == "margin_nce" or (self.loss == "own" and own)


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
        self.generator: torch.Generator | None = None  # of the pairs; seeded by the engine, equal on all ranks
        if inter is not None:
            intra.inter_margin = Margin(inter.margin, inter.margin_kind)
            own = type(intra).uses_negatives  # the class's: another learner may have changed this one's
            intra.uses_negatives = inter.uses_negatives(own)
        # What sees the view of soft targets where the method keeps no slow encoder: seen by the encoder itself, queries
        # run after targets that run after queries, and the bank is left behind (docs/results-choices.md).
        alone = inter is not None and inter.target_view is not None and intra.bank_encoder() is intra.encoder
        self.slow = momentum_copy(intra.encoder) if alone else None

    def inter_active(self, epoch: int) -> bool:
        if self.inter is None:
            return False
        assert isinstance(self.inter.warmup_epochs, int), "auto is resolved before anything is built"
        return self.inter.intra_weight < 1 and epoch >= self.inter.warmup_epochs

    def loss(self, batch: Batch, epoch: int) -> tuple[Tensor, Embeddings, dict[str, Tensor]]:
        """The loss of a batch, the embeddings to commit, and named terms to log."""
        active, index = self.inter_active(epoch), batch.index
        prepared = start_beside(lambda: self._prepare_draw(index), index) if active and self.draws_pairs else None
        embeddings = self.intra.embed(batch)
        intra = self.intra.loss(embeddings, self.bank)
        terms = {"intra_loss": intra.detach(), "alignment": self._alignment(embeddings)}
        if not active:
            if self.inter is not None and self.inter.head == "separate":
                intra = intra + 0 * embeddings.inter_query.sum()  # DDP waits for a gradient of every parameter
            return intra, embeddings, terms
        assert self.inter is not None
        inter, weight = self._inter_loss(embeddings, prepared, batch), self.inter.intra_weight  # λ
        return weight * intra + (1 - weight) * inter, embeddings, terms | {"inter_loss": inter.detach()}

    @property
    def draws_pairs(self) -> bool:
        return self.inter is not None and self.inter.loss != "soft"

    def _inter_loss(self, embeddings: Embeddings, prepared: Prepared | None, batch: Batch) -> Tensor:
        assert self.bank is not None
        if prepared is None:
            return self._soft_inter_loss(embeddings, batch, self.bank)
        wait_for_side_streams()
        return self.intra.inter_loss(embeddings, self._complete_draw(embeddings, prepared), self.bank)

    def _soft_inter_loss(self, embeddings: Embeddings, batch: Batch, bank: MemoryBank) -> Tensor:
        """Each anchor is to be divided over the clusters as its target is, of a view of its own where asked."""
        assert self.inter is not None
        inter, anchors = self.inter, embeddings.inter_query  # (V, B, D)
        if inter.target_view is None:
            target = self.intra.target_of(embeddings, bank)
        else:
            assert len(batch.views) > self.intra.views_needed, "the targets' view comes after the method's"
            target = self._seen(batch.views[-1]).expand_as(anchors)
        temperatures = inter.soft_temperature, inter.soft_target_temperature
        return soft_labels(anchors.flatten(0, 1), target.flatten(0, 1), bank.centroids, *temperatures)

    @torch.no_grad()
    def _seen(self, view: Tensor) -> Tensor:
        """(B, D) A view as a slow encoder sees it, as it is measured by: no batch tells on its images.

        Neither running statistics nor the parts of a split BatchNorm know of it. All ranks see by the first one's
        statistics, which are those that a checkpoint has: else a resumed run would have other targets.
        """
        encoder = self.intra.bank_encoder() if self.slow is None else self.slow
        dist.broadcast_all(running_statistics(encoder))
        training = encoder.training
        try:
            encoded: Encoded = encoder.eval()(view)
        finally:  # a capture that fails goes on without one
            encoder.train(training)
        return encoded.inter_projection

    @torch.no_grad()
    def _prepare_draw(self, index: Tensor) -> Prepared:
        """The random numbers of a draw for all directions at once, and what follows from them and the bank alone.

        Drawn for the global batch: the number of ranks makes no difference.
        """
        assert self.bank is not None
        assert self.sampler is not None
        bank, generator, total = self.bank, self.generator, len(index) * dist.world()
        source = bank.labels.device if generator is None else generator.device
        lots = torch.randint(2**62, (self.intra.directions, total), generator=generator, device=source)
        lots = lots.to(bank.labels.device)[:, dist.slice_of_rank(total)].flatten()  # (V·B,)
        anchors = index.repeat(self.intra.directions)
        if not self.intra.uses_negatives:
            label = bank.labels[anchors]
            return Prepared(label, select_positive(anchors, label, bank, lots), lots.new_empty(0), None)
        priority = torch.randperm(bank.size, generator=generator, device=source).to(bank.labels.device)
        return self.sampler.prepare(anchors, bank, priority, lots)

    def _complete_draw(self, embeddings: Embeddings, prepared: Prepared) -> Pairs:
        assert self.bank is not None
        assert self.sampler is not None
        if not self.intra.uses_negatives:
            return Pairs(prepared.positive, prepared.positive.new_empty(len(prepared.positive), 0))
        return self.sampler.complete(embeddings.inter_query.detach().flatten(0, 1), prepared, self.bank)

    @torch.no_grad()
    def _alignment(self, embeddings: Embeddings) -> Tensor:
        """Mean squared distance of query and target."""
        return 2 - 2 * (embeddings.query * self.intra.target_of(embeddings, self.bank)).sum(-1).mean()

    @torch.no_grad()
    def commit(self, embeddings: Embeddings, epoch: int) -> dict[str, Tensor]:
        """Bank, labels and queue after the backward; nothing of it waits for the host. Terms to log.

        Every rank gathers the same (index, feature) pairs and applies the same writes.
        """
        terms: dict[str, Tensor] = {}
        if self.bank is not None and (self.intra.uses_bank or self.inter_active(epoch)):
            index, feature = dist.all_gather(embeddings.index), dist.all_gather(embeddings.feature)
            if self.inter_active(epoch):
                assert self.labels is not None
                terms["labels_changed"] = self.labels.update(self.bank, index, feature) / len(index)
            else:
                self.bank.write(index, feature)
        self.intra.commit(embeddings)
        return terms

    def after_optimiser(self, momentum: float | Tensor, epoch: int) -> None:
        """Once per optimiser step: what follows the encoder slowly moves."""
        self.intra.after_optimiser(momentum)
        if self.slow is not None and self.inter_active(epoch):
            assert self.inter is not None
            update_seeing_copy(self.slow, self.intra.encoder, self.inter.target_momentum)

    def maintain(self, step: int, epoch: int) -> None:
        """The end of a step, which may wait for the host: repairs of small clusters."""
        if self.inter_active(epoch):
            assert self.bank is not None
            assert self.labels is not None
            self.labels.maintain(self.bank, step)

    def start_clusters(self, features: Tensor, generator: torch.Generator) -> None:
        """Fill the bank with features (N, D) of every image, which may be its own, and cluster them: once."""
        assert self.bank is not None
        assert self.labels is not None
        if self.slow is not None:
            self.slow.load_state_dict(self.intra.encoder.state_dict())
        self.labels.initialise(self.bank, features, generator)
        self._check_sampler()

    def end_epoch(self, epoch: int, generator: torch.Generator) -> None:
        if self.inter_active(epoch):
            assert self.bank is not None
            assert self.labels is not None
            self.labels.end_epoch(self.bank, epoch, generator)
            self._check_sampler()

    def _check_sampler(self) -> None:
        assert self.bank is not None
        assert self.sampler is not None
        if self.intra.uses_negatives:
            self.sampler.check(self.bank)
