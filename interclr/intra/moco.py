"""MoCo v2 (He et al. 2020, Chen et al. 2020): keys from a momentum encoder, negatives from a queue of earlier keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from interclr import dist
from interclr.bank import MemoryBank
from interclr.intra.base import IntraMethod, MethodSettings, by_direction, mean_direction
from interclr.losses import margin_nce
from interclr.models import Backbone, Encoder, joined, mlp, momentum_copy, split_batch_norm, update_momentum_copy
from interclr.streams import run_beside
from interclr.types import Batch, Embeddings


class MoCoConfig(MethodSettings):
    title = "MoCo v2"
    keeps_slow_encoder = True
    name: Literal["mocov2"] = "mocov2"
    queue: Annotated[int, Field(ge=1)] | Literal["auto"] = 65_536
    temperature: Annotated[float, Field(gt=0)] = 0.2
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.999
    hidden: Annotated[int, Field(ge=1)] = 2048
    dim: Annotated[int, Field(ge=1)] = 128
    symmetric: bool = False
    key_splits: Annotated[int, Field(ge=1)] = 4  # parts in which keys are normalised on one device; 1 lets BN leak

    def build(self, backbone: Backbone, *, separate_head: bool = False) -> MoCo:
        assert isinstance(self.queue, int), "auto is resolved before anything is built"
        return MoCo(backbone, self.queue, self, separate_head)


class MoCo(IntraMethod):
    queue: Tensor
    queue_position: Tensor

    def __init__(self, backbone: Backbone, queue: int, config: MoCoConfig, separate_head: bool) -> None:
        inter_head = mlp(backbone.features, config.hidden, config.dim) if separate_head else None
        super().__init__(
            Encoder(backbone, mlp(backbone.features, config.hidden, config.dim), inter_projector=inter_head), config.dim
        )
        self.encoded_views = self.directions = 2 if config.symmetric else 1
        self.temperature, self.momentum, self.symmetric = config.temperature, config.momentum, config.symmetric
        splits = config.key_splits if dist.world() == 1 else 1  # several ranks have their own statistics already
        self.key_encoder = split_batch_norm(momentum_copy(self.encoder), splits)
        self.register_buffer("queue", F.normalize(torch.randn(queue, config.dim), dim=1))
        self.register_buffer("queue_position", torch.zeros((), dtype=torch.int64))

    def embed(self, batch: Batch) -> Embeddings:
        views = batch.views[:2]
        queries, keys = (views, views) if self.symmetric else (views[:1], views[1:])
        (target, features), encoded = run_beside(lambda: self._keys(keys), lambda: self.encode(self._forward, queries))
        return Embeddings(
            index=batch.index,
            query=by_direction([e.query for e in encoded]),
            target=target,
            inter_query=by_direction([e.inter_query for e in encoded]),
            feature=mean_direction(features),
        )

    @torch.no_grad()
    def _keys(self, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(V, B, D) twice: the keys for the queries, each of the other view, and what the bank is to hold.

        Encoded in an order shuffled across the global batch, so that no key shares statistics with its query.
        """
        count, total = len(views), views[0].shape[0] * dist.world()
        mine, device = dist.slice_of_rank(total), views[0].device
        order = torch.rand((count, total), generator=self.generator, device=device).argsort(1)
        places = torch.arange(count * total, device=device).view(count, total)
        back = torch.empty_like(order).scatter_(1, order, places[:1].expand_as(order))
        start = places[:, :1]  # of a view in what all ranks have together
        there, home = ((index[:, mine] + start).flatten() for index in (order, back))
        home = home.view(count, -1).flip(0).flatten()  # the first direction's key is of the second view
        everyone = joined([dist.all_gather(view) for view in views])
        encoded = self.encode(self.key_encoder, rows_of(everyone, there).chunk(count))
        keys = _at_home([e.projection for e in encoded], home)
        shared = self.encoder.inter_projector is None
        return keys, keys if shared else _at_home([e.inter_projection for e in encoded], home)

    def loss(self, embeddings: Embeddings, bank: MemoryBank | None) -> Tensor:
        query, key = embeddings.query.flatten(0, 1), embeddings.target.flatten(0, 1)  # (V·B, D)
        positive = (query * key).sum(1)  # (V·B,)
        negative = query @ self.queue.T  # (V·B, Q)
        return margin_nce(positive, negative, self.temperature, self.margin.value, self.margin.kind)

    @torch.no_grad()
    def commit(self, embeddings: Embeddings) -> None:
        """First in, first out. Directions stay apart so that the order is the same on any number of ranks."""
        keys = torch.cat([dist.all_gather(key) for key in embeddings.target])[-len(self.queue) :]
        slots = (self.queue_position + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue.index_copy_(0, slots, keys)
        self.queue_position.copy_((self.queue_position + len(keys)) % len(self.queue))

    def momentum_at(self, step: int, total: int) -> float:
        return self.momentum

    def after_optimiser(self, momentum: float | Tensor) -> None:
        update_momentum_copy(self.key_encoder, self.encoder, momentum)

    def bank_encoder(self) -> Encoder:
        assert isinstance(self.key_encoder, Encoder)
        return self.key_encoder


def _at_home(parts: list[Tensor], home: Tensor) -> Tensor:
    back = joined([dist.all_gather(part) for part in parts])[home]
    return back.view(len(parts), -1, back.shape[1])


def rows_of(images: Tensor, order: Tensor) -> Tensor:
    """``images[order]`` for (B, 3, S, S) that keeps channels last in memory where they are: indexing would not."""
    if images.is_contiguous(memory_format=torch.channels_last):
        return images.permute(0, 2, 3, 1)[order].permute(0, 3, 1, 2)
    return images[order]
