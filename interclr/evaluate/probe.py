"""Frozen features of one backbone on one set, kept where they fit, and linear heads fitted to them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from interclr.data.canvas import Canvas
from interclr.data.loader import Order, ResidentLoader
from interclr.data.reading import Unreadable, at_hand
from interclr.data.source import Source
from interclr.data.stream import StreamLoader, in_order
from interclr.data.subset import Subset
from interclr.data.view_parameters import View
from interclr.data.views import Views, centre_crop
from interclr.evaluate.base import (
    BATCH,
    Context,
    LabelledData,
    Subject,
    add_weights,
    kept_state,
    preparation,
    refuse_broken,
)
from interclr.evaluate.heads import Heads
from interclr.evaluate.stages import Stages
from interclr.optim import cosine
from interclr.run.files import save_tensors
from interclr.types import Images

Labelled = Iterator[tuple[Tensor, Tensor]]  # features (B, ΣD) and labels (B,)


class Limits(Protocol):
    """What a protocol allows a probe."""

    @property
    def cache_gb(self) -> float:
        """Of features that are kept; where they would take more, the backbone runs in every epoch."""

    @property
    def save_epochs(self) -> int:
        """After so many of those the state is saved."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A protocol in full. Learning rates are for a batch of 256 and scale with it."""

    epochs: int
    learning_rates: tuple[float, ...]
    drops: tuple[float, ...] | None  # epochs at which the rate falls to a tenth; None: half a cosine to zero
    batch_norm: bool
    augment: bool
    dims: int = 9000
    batch: int = 256
    weight_decay: float = 1e-4

    def factor(self, step: int, steps_per_epoch: int) -> float:
        """What the learning rates are multiplied with at ``step``."""
        if self.drops is None:
            return cosine(step, self.epochs * steps_per_epoch, 1.0)
        return 0.1 ** sum(step >= epoch * steps_per_epoch for epoch in self.drops)


class Probe:
    """Features of one subject on one set, from the cache or from the backbone, and heads fitted to them."""

    def __init__(
        self, plan: Plan, subject: Subject, data: LabelledData, context: Context, stages: Stages, limits: Limits
    ) -> None:
        self.plan, self.subject, self.data, self.save_epochs = plan, subject, data, limits.save_epochs
        self.context, self.stages, self.device = context, stages, context.device
        self.cache: Tensor | None = None
        assert data.train.labels is not None
        self.labels = data.train.labels.to(context.device)
        self.images = {id(source): at_hand(source) for source in (data.train, data.test)}
        if not plan.augment:
            needed, allowed, free = (
                len(data.train) * stages.width * 2,
                limits.cache_gb * 2**30,
                memory_left(context.device),
            )
            if needed <= min(allowed, free):
                self.cache = self._embed_all(data.train)
            else:
                limit = (
                    "cache_gb"
                    if allowed < free
                    else f"{free / 2**30:.1f} GB of memory may be used; dims makes them fewer"
                )
                context.screen.warn(
                    f"the features of {data.train.name} would take {needed / 2**30:.1f} GB: too much to keep "
                    f"({limit}), so the backbone runs in every epoch"
                )

    def _embed_all(self, source: Source) -> Tensor:
        kept = torch.empty(len(source), self.stages.width, dtype=torch.float16, device=self.device)
        done = 0
        with self.context.screen.working(f"embedding {len(source):,} images of {source.name}") as progress:
            met = Unreadable()
            for images in in_order(self.images[id(source)], self.device, BATCH, unreadable=met):
                kept[done : done + len(images)] = self._forward(self._centre(images))
                done += len(images)
                progress(done, len(source))
        refuse_broken(met)
        return kept

    def _centre(self, images: Images) -> Tensor:
        return centre_crop(images, self.subject.image_size, self.subject.mean, self.subject.std)

    def _forward(self, inputs: Tensor) -> Tensor:
        if self.device.type == "cuda":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        dtype = self.context.autocast
        with torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            features: Tensor = self.stages(inputs)
        return features

    def shown(self, source: Source, rows: Tensor | None = None) -> Labelled:
        """Centre-cropped, in order: for measuring."""
        if source is self.data.train and self.cache is not None:
            for part in (torch.arange(len(source)) if rows is None else rows).to(self.device).split(BATCH):
                yield self.cache[part], self.labels[part]
            return
        images: Canvas | Source = self.images[id(source)]
        if rows is not None:
            images = images.rows(rows) if isinstance(images, Canvas) else Subset(source, rows.tolist())
        done = 0
        with self.context.screen.working(f"measuring on {len(images):,} images of {source.name}") as progress:
            met = Unreadable()
            for batch in in_order(images, self.device, BATCH, unreadable=met):
                assert batch.label is not None
                yield self._forward(self._centre(batch)), batch.label
                done += len(batch)
                progress(done, len(images))
        refuse_broken(met)

    def _training(self, order: Order, rows: Tensor, first: int, last: int) -> Labelled:
        """Steps ``first`` … ``last`` − 1: a function of the step, so going on after a stop changes nothing."""
        if self.cache is not None:
            rows = rows.to(self.device)
            for step in range(first, last):
                chosen = rows[order.indices(step).to(self.device, non_blocking=True)]
                yield self.cache[chosen], self.labels[chosen]
            return
        images, source = self.images[id(self.data.train)], self.data.train
        every = len(rows) == len(source)
        if isinstance(images, Canvas):
            loader: ResidentLoader | StreamLoader = ResidentLoader(images if every else images.rows(rows), order)
        else:
            loader = StreamLoader(source if every else Subset(source, rows.tolist()), order, self.device)
        views = Views([View(crop_scale=(0.08, 1.0))], self.subject.image_size, self.subject.mean, self.subject.std)
        generator = torch.Generator(self.device)
        for step, batch in zip(range(first, last), loader.iterate(first, last), strict=True):
            if isinstance(loader, StreamLoader):
                refuse_broken(loader.unreadable)
            batch = batch.to(self.device)
            assert batch.label is not None
            if self.plan.augment:
                generator.manual_seed(self.context.seed * 1_000_003 + step)
                inputs = views(batch, generator).views[0]
            else:
                inputs = self._centre(batch)
            yield self._forward(inputs), batch.label

    def fit(self, what: str, rates: Tensor, rows: Tensor) -> tuple[Heads, Tensor]:
        """Train one head for each stage and rate (S, L) on ``rows``; returns them and losses (epochs, S, L)."""
        plan = self.plan
        batch = min(plan.batch, len(rows))
        order = Order(len(rows), batch, self.context.seed)
        parts = list(self.stages.parts.values())
        scaled = rates * batch / 256
        heads = Heads(parts, scaled, self.data.classes, plan.batch_norm, plan.weight_decay, self.device)
        curves = torch.zeros(plan.epochs, *rates.shape, device=self.device)
        path, key = self.context.out / f"state-{what}.safetensors", self._key(rates, rows)
        first = 0
        if self.cache is None and (found := self._kept(path, key)) is not None:
            first, state = found
            heads.load(state)
            curves[:first] = state["curves"]
        per_epoch = order.steps_per_epoch
        total = plan.epochs * per_epoch
        batches = self._training(order, rows, first * per_epoch, total)
        description = f"{rates.numel()} linear heads" + (" to choose learning rates" if what == "search" else "")
        with self.context.screen.working(description) as progress:
            for step, (features, label) in enumerate(batches, first * per_epoch):
                losses = heads.step(features, label, step, plan.factor(step, per_epoch))
                epoch, position = divmod(step, per_epoch)
                curves[epoch] += losses / per_epoch
                if position == per_epoch - 1:
                    progress(epoch + 1, plan.epochs)
                    if self.cache is None and (epoch + 1) % self.save_epochs == 0:
                        save_tensors(
                            path,
                            {**heads.state(), "curves": curves[: epoch + 1]},
                            {"key": key, "epoch": str(epoch + 1)},
                        )
        heads.rates = rates.to(self.device)  # as the user gave them
        return heads, curves.cpu()

    def _kept(self, path: Path, key: str) -> tuple[int, dict[str, Tensor]] | None:
        """Epochs done and the heads after them, where they were left by this very probe."""

        def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
            with safe_open(path, "pt") as opened:
                return opened.metadata() or {}, load_file(path)

        about, state = kept_state(path, read, self.context.screen) or ({}, {})
        if about.get("key") != key:
            return None
        return int(about["epoch"]), {name: tensor.to(self.device) for name, tensor in state.items()}

    def _key(self, rates: Tensor, rows: Tensor) -> str:
        """What a saved state belongs to."""
        if self.cache is not None:
            return ""
        digest = hashlib.sha256()
        add_weights(digest, self.subject.backbone)
        digest.update(preparation(self.subject, self.context).encode())
        said = [asdict(self.plan), list(self.stages.parts), rates.tolist(), self.context.seed, self.subject.image_size]
        digest.update(json.dumps(said).encode() + self.data.train.fingerprint().encode() + rows.numpy().tobytes())
        return digest.hexdigest()

    def forget(self) -> None:
        """The result is written: states to go on from are of no more use."""
        for what in ("search", "final"):
            (self.context.out / f"state-{what}.safetensors").unlink(missing_ok=True)


def memory_left(device: torch.device) -> float:
    """Bytes the cache may take: seven tenths of what is free."""
    if device.type == "cuda":
        return 0.7 * torch.cuda.mem_get_info(device)[0]
    try:  # what the page cache holds counts as free: it makes room
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 0.7 * 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not known on every system
        return math.inf
