"""The seam for intra-image methods: embed, loss, inter_loss, commit. A new method is one file and one line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from interclr.bank import MemoryBank
from interclr.losses import MarginKind, cosines, margin_nce
from interclr.models import Encoded, Encoder, joined, split_batch_norm, takes_views_together
from interclr.types import Batch, Config, Embeddings, Pairs


@dataclass(frozen=True, slots=True)
class Margin:
    """m of MarginNCE: above 0 is stricter, below 0 forgives noisy labels."""

    value: float = 0.0
    kind: MarginKind = "cosine"


class MethodSettings(Config):
    """A method's settings, and what is known of it before it is built."""

    title: ClassVar[str] = ""  # as pages name it; else by its name
    views_needed: ClassVar[int] = 2  # how many views of an image ``embed`` reads
    separate_heads: ClassVar[bool] = True  # whether the inter branch can have a head of its own
    with_negatives: ClassVar[bool] = True  # whether its own inter loss has any
    keeps_slow_encoder: ClassVar[bool] = False  # else soft targets' own view is seen by a copy that the learner keeps


class IntraMethod(nn.Module, ABC):
    """Turns a batch into embeddings and a loss; owns every piece of its own state (queue, momentum encoder)."""

    views_needed: int = MethodSettings.views_needed
    encoded_views: int = 2  # how many of them go through one encoder
    directions: int = 2  # V of the embeddings
    uses_bank: bool = False  # True where the intra loss itself reads the bank (NPID)
    starts_from_features: bool = (
        False  # whether the bank it uses begins with every image as the untrained network sees it
    )
    uses_negatives: bool = MethodSettings.with_negatives  # False where the inter loss has none: none are looked for
    bank_momentum: float = 1.0  # ω that suits this method
    momentum_varies: bool = False  # whether ``momentum_at`` depends on the step
    temperature: float = 0.2

    def __init__(self, encoder: Encoder, dim: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.dim = dim
        self.margin = Margin()
        self.inter_margin = Margin()
        self.generator: torch.Generator | None = None  # seeded by the engine before every step, equal on all ranks
        self.together = False
        self._forward: Callable[[Tensor], tuple[Tensor, ...]]
        self.train_through(encoder)

    def train_through(self, forward: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        """Run the trainable encoder through ``forward`` (a DDP wrapper). Bank, queue and target stay outside it."""
        object.__setattr__(self, "_forward", forward)  # not a submodule: the state dict must not hold it twice

    def join_views(self) -> None:
        """From now on one forward takes the views of a batch together, each still normalised by itself.

        The same function in half as many, twice as large kernels: for a compiled encoder, where that counts.
        """
        encoders = {self.encoder, self.bank_encoder()}
        if self.encoded_views > 1 and all(takes_views_together(encoder) for encoder in encoders):
            for encoder in encoders:
                split_batch_norm(encoder, 1, self.encoded_views)
            self.together = True

    def encode(self, forward: Callable[[Tensor], tuple[Tensor, ...]], views: Sequence[Tensor]) -> list[Encoded]:
        if not self.together:
            return [Encoded(*forward(view)) for view in views]
        parts = [output.chunk(len(views)) for output in forward(joined(views))]
        return [Encoded(*part) for part in zip(*parts, strict=True)]

    @abstractmethod
    def embed(self, batch: Batch) -> Embeddings: ...

    @abstractmethod
    def loss(self, embeddings: Embeddings, bank: MemoryBank | None) -> Tensor: ...

    def inter_loss(self, embeddings: Embeddings, pairs: Pairs, bank: MemoryBank) -> Tensor:
        """MarginNCE between each anchor, its in-cluster positive and its negatives from other clusters."""
        anchors = embeddings.inter_query.flatten(0, 1)  # (V·B, D)
        positive, negative = cosines(anchors, bank.features, pairs)  # (V·B,), (V·B, K)
        return margin_nce(positive, negative, self.temperature, self.inter_margin.value, self.inter_margin.kind)

    def target_of(self, embeddings: Embeddings, bank: MemoryBank | None) -> Tensor:
        """(V, B, D) What each query should agree with, from wherever the method has it."""
        return embeddings.target

    def commit(self, embeddings: Embeddings) -> None:
        """Write the method's own state (a queue) after the backward, perhaps beside the optimiser's step."""

    def momentum_at(self, step: int, total: int) -> float:
        """The momentum encoder's momentum at an optimiser step, where the method has one."""
        return 0.0

    def after_optimiser(self, momentum: float | Tensor) -> None:
        """Once per optimiser step (not per micro-batch): move the momentum encoder.

        A tensor (0-d, on the device) where the step is a captured graph, which cannot be handed a number.
        """

    def synchronise_norm(self) -> None:
        """BatchNorm statistics over all ranks instead of each rank's own."""
        self.encoder = nn.SyncBatchNorm.convert_sync_batchnorm(self.encoder)

    def bank_encoder(self) -> Encoder:
        """The encoder whose features the memory bank holds."""
        return self.encoder


class PositiveOnly(IntraMethod):
    """BYOL and SimSiam: a predictor, no negatives, and so no margin and no temperature: one distance in both branches.

    Intra to the image's other view, inter to an image of its cluster. Where the inter branch is asked for negatives
    all the same (``inter.loss: margin_nce``, not in the paper) it is MarginNCE of predictions, as of others' queries.
    """

    uses_negatives = False

    @abstractmethod
    def distance(self, query: Tensor, target: Tensor) -> Tensor:
        """Of predictions from what they should be, (V, B, D) each, as one number."""

    def loss(self, embeddings: Embeddings, bank: MemoryBank | None) -> Tensor:
        return self.distance(embeddings.query, embeddings.target)

    def inter_loss(self, embeddings: Embeddings, pairs: Pairs, bank: MemoryBank) -> Tensor:
        if self.uses_negatives:
            return super().inter_loss(embeddings, pairs, bank)
        positive = bank.features[pairs.positive].float()  # (V·B, D)
        return self.distance(embeddings.inter_query, positive.view_as(embeddings.inter_query))


def by_direction(parts: Sequence[Tensor]) -> Tensor:
    """V × (B, D) → (V, B, D)."""
    whole = joined(parts)
    return whole.view(len(parts), -1, whole.shape[1])


def mean_direction(features: Tensor) -> Tensor:
    """(V, B, D) → (B, D): the normalised mean over directions; with one direction, that one."""
    return features[0] if features.shape[0] == 1 else nn.functional.normalize(features.mean(0), dim=1)
