"""Semi-supervised: the whole network fine-tuned on a class-balanced hundredth and tenth of the labels."""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor, nn

from interclr.data.canvas import Canvas
from interclr.data.loader import Order, ResidentLoader
from interclr.data.reading import Unreadable, at_hand
from interclr.data.source import Source
from interclr.data.stream import StreamLoader, in_order
from interclr.data.subset import Subset
from interclr.data.view_parameters import Fractions, View
from interclr.data.views import Views, centre_crop
from interclr.evaluate.base import (
    BATCH,
    Context,
    Evaluation,
    LabelledData,
    Subject,
    add_weights,
    check_labels,
    kept_state,
    preparation,
    refuse_broken,
)
from interclr.evaluate.draws import balanced_draw, smallest_class
from interclr.evaluate.heads import ACCURACIES
from interclr.evaluate.knn import accuracies
from interclr.evaluate.plots import figure
from interclr.features import embed_all
from interclr.models import Backbone
from interclr.run.files import load_state, save_state, save_tensors
from interclr.types import Images, UserError

FEW = 0.02  # below this share of the labels the weight decay is stronger; the paper has 5e-4 at 1 % and 1e-4 at 10 %
SHAPE = (12 / 20, 16 / 20)  # of all epochs, after which the rates are divided: the paper's
NOTICEABLE = 0.1  # of a share: rounding to whole images of each class changes it by less without a word
STEPS, SMALLEST_BATCH = 16, 8  # a small subset is cut into about this many batches of at least this many images
Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Part:
    """A labelled part of the training images."""

    name: str  # for people and for file names: '1%', or the list's
    rows: list[int]
    decay: float


class FineTuningView(View):
    """As supervised training on ImageNet crops; what else is set of a view leaves this as it is."""

    crop_scale: Fractions = (0.08, 1.0)


class SemiSupervised(Evaluation):
    """The paper's: 20 epochs of SGD, backbone at 0.01 and classifier at 1, divided by 5 after epochs 12 and 16.

    Another number of ``epochs`` has its drops in the same places, at 60 % and 80 %, unless ``drops`` names others.

    A subset has as many images of each class as every other: the share of the average class, at least one, and at
    most what the smallest class has. ``lists`` name text files of training images, one name or base name a line, to be
    used in place of ``fractions`` (SimCLR's 1 % and 10 % of ImageNet, which the paper uses).

    ``batch`` is for subsets as large as ImageNet's. One of less than 16 batches is cut into batches of a sixteenth of
    it, but not below 8 images, so that a hundredth of a small set still makes some steps; the classifier's rate shrinks
    with the batch, the backbone's stays. The rule is ours and was picked among about a dozen by synthetic *test*
    accuracy, one seed and backbone: compare small sets with each other, not with protocols tuned elsewhere. The last,
    incomplete batch of an epoch is dropped; the next epoch's order drops others.

    A checkpoint after every epoch makes an interrupted run continue where it was, bit for bit; another backbone,
    subset, seed or setting starts afresh. Checkpoints go when the result is written.
    """

    name: Literal["semi-supervised"] = "semi-supervised"
    fractions: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.01, 0.1)
    lists: tuple[Path, ...] = ()
    epochs: Annotated[int, Field(ge=1)] = 20
    batch: Annotated[int, Field(ge=2)] = 256
    backbone_lr: Rate = 0.01
    head_lr: Rate = 1.0
    drops: tuple[Annotated[int, Field(ge=0)], ...] | None = None  # epochs after which the rates are divided; see above
    drop_by: Rate = 5.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: Decay | None = None  # None: 5e-4 where less than two per cent are asked for, 1e-4 from there on
    view: FineTuningView = FineTuningView()
    workers: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=true needs a momentum above 0")
        return self

    @model_validator(mode="after")
    def _drops_are_reached(self) -> Self:
        if late := [drop for drop in self.drops or () if drop >= self.epochs]:
            raise ValueError(
                f"drops: {', '.join(map(str, late))} would never come in {self.epochs} epochs; name earlier ones, or "
                "leave drops out for 60 % and 80 % of the epochs"
            )
        return self

    @classmethod
    def qualifier(cls, figure: str, figures: Mapping[str, float]) -> str:
        part = figure.partition("@")[2]
        return f"{figures[f'images@{part}']:,.0f} images"

    def continues(self, data: LabelledData) -> bool:
        return True

    def run(self, subject: Subject, data: LabelledData, context: Context) -> dict[str, float]:
        check_labels(data)
        assert data.test.labels is not None
        parts = self._parts(data, context)
        figures: dict[str, float] = {}
        kept: dict[str, Tensor] = {"label": data.test.labels}
        details: list[dict[str, Any]] = []
        for part in parts:
            tuned = _FineTuning(self, subject, data, part, context)
            losses = tuned.train()
            logits = tuned.predict(data.test)
            for name, value in accuracies(logits, data.test.labels).items():
                figures[f"{name}@{part.name}"] = value
            figures[f"images@{part.name}"] = float(len(part.rows))
            kept |= {f"rows_{part.name}": torch.tensor(part.rows), f"prediction_{part.name}": logits.argmax(1)}
            kept[f"logits_{part.name}"] = logits
            images = {"images": len(part.rows), "batch": tuned.order.batch, "head_lr": tuned.head_lr}
            details.append({"part": part.name, **images, "weight_decay": part.decay, "loss_by_epoch": losses})
        save_tensors(context.out / "predictions.safetensors", kept)
        self._show(figures, details, f"{subject.name} on {data.name}", context)
        self.write_result(
            subject,
            data.name,
            context,
            {
                "figures": figures,
                "drops": self.drop_epochs,
                "parts": details,
            },
        )
        shutil.rmtree(context.out / "checkpoint", ignore_errors=True)
        return figures

    def _parts(self, data: LabelledData, context: Context) -> list[Part]:
        assert data.train.labels is not None
        labels = data.train.labels.numpy()
        if self.lists:
            named = [(path.stem, rows_of_list(path, data.train, context.left_out > 0)) for path in self.lists]
            parts = [Part(name, rows, self._decay(len(rows) / len(labels))) for name, rows in named]
        else:
            parts = [self._drawn(fraction, labels, context) for fraction in self.fractions]
        if not parts:
            raise UserError("semi-supervised needs fractions or lists of labelled images")
        if len({part.name for part in parts}) < len(parts):
            raise UserError(f"two parts have the same name: {', '.join(part.name for part in parts)}")
        for part in parts:
            if len(part.rows) < 2 or len(np.unique(labels[part.rows])) < 2:
                raise UserError(f"{part.name} holds images of one class only; a classifier needs two")
        for one, other in combinations(parts, 2):
            if one.rows == other.rows:
                context.screen.warn(f"{one.name} and {other.name} hold the same {len(one.rows):,} images")
        return parts

    def _drawn(self, fraction: float, labels: NDArray[np.int64], context: Context) -> Part:
        name, classes, smallest = f"{100 * fraction:g}%", len(np.unique(labels)), smallest_class(labels)
        each = min(max(1, round(fraction * len(labels) / classes)), smallest)
        share = each * classes / len(labels)
        if abs(share - fraction) > NOTICEABLE * fraction:
            limit = ", and the smallest has no more" if share < fraction and each == smallest else ""
            many = f"{each * classes:,} of {len(labels):,} images ({100 * share:.3g} %)"
            context.screen.say_once(f"{name} means {many} here: {each} of each class{limit}")
        random = np.random.default_rng([context.seed, round(1e6 * fraction)])
        rows = np.sort(balanced_draw(labels, each, random).ravel()).tolist()
        return Part(name, rows, self._decay(fraction))  # what was asked for, not what rounding made of it

    def _decay(self, share: float) -> float:
        if self.weight_decay is not None:
            return self.weight_decay
        return 5e-4 if share < FEW else 1e-4

    @property
    def drop_epochs(self) -> tuple[int, ...]:
        """``drops``, or the paper's shape over these epochs as far as they last."""
        if self.drops is not None:
            return self.drops
        return tuple(drop for part in SHAPE if (drop := round(part * self.epochs)) < self.epochs)

    def rate(self, epoch: int) -> float:
        """What both learning rates are multiplied by in ``epoch``, counted from 0."""
        return self.drop_by ** -sum(epoch >= drop for drop in self.drop_epochs)

    def _show(self, figures: dict[str, float], details: list[dict[str, Any]], title: str, context: Context) -> None:
        names = [str(each["part"]) for each in details]
        kinds = {key: column for key, column in ACCURACIES.items() if f"{key}@{names[0]}" in figures}
        rows = [
            (name, str(each["images"]), *(f"{figures[f'{key}@{name}']:.2f}" for key in kinds))
            for name, each in zip(names, details, strict=True)
        ]
        context.screen.table(f"semi-supervised of {title}", rows, ("labels", "images", *kinds.values()))
        with figure(context.out / "semi-supervised", columns=2) as (bars, curve):
            for offset, (key, label) in zip((-0.2, 0.2) if len(kinds) > 1 else (0.0,), kinds.items(), strict=True):
                values = [figures[f"{key}@{name}"] for name in names]
                drawn = bars.bar(np.arange(len(names)) + offset, values, 0.38, label=label.removesuffix(" %"))
                bars.bar_label(drawn, fmt="%.1f")
            bars.set_xticks(range(len(names)), names)
            bars.set_ylim(0, 108)
            bars.set_ylabel("accuracy, %")
            bars.set_title(f"semi-supervised of {title}")
            bars.legend(loc="upper left")
            for name, each in zip(names, details, strict=True):
                curve.plot(range(1, len(each["loss_by_epoch"]) + 1), each["loss_by_epoch"], label=name)
            curve.set_xlabel("epoch")
            curve.set_ylabel("training loss")
            curve.legend()


class Classifier(nn.Module):
    def __init__(self, backbone: Backbone, classes: int, seed: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.features, classes)
        nn.init.normal_(self.head.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.head(self.backbone(images))
        return output


class _FineTuning:
    """One network on one part of the labels. Every step is a function of the seed and its number."""

    def __init__(
        self, protocol: SemiSupervised, subject: Subject, data: LabelledData, part: Part, context: Context
    ) -> None:
        self.protocol, self.subject, self.part, self.context = protocol, subject, part, context
        count = len(part.rows)
        batch = protocol.batch
        if count < STEPS * batch:
            batch = min(batch, count, max(count // STEPS, SMALLEST_BATCH))
        self.head_lr = protocol.head_lr * batch / protocol.batch
        self.order = Order(count, batch, context.seed)
        self.images = Subset(data.train, part.rows)
        backbone = copy.deepcopy(subject.backbone).requires_grad_(True)  # the subject itself is never changed
        self.network = Classifier(backbone, data.classes, context.seed).to(context.device)
        if context.device.type == "cuda":
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimiser = torch.optim.SGD(
            [
                {"params": list(backbone.parameters()), "lr": protocol.backbone_lr},
                {"params": list(self.network.head.parameters()), "lr": self.head_lr},
            ],
            momentum=protocol.momentum,
            nesterov=protocol.nesterov,
            weight_decay=part.decay,
        )
        self.views = Views([protocol.view], subject.image_size, subject.mean, subject.std)
        self.checkpoint = context.out / "checkpoint" / f"{part.name}.pt"
        self.key = self._key()

    def train(self) -> list[float]:
        """The mean loss of every epoch."""
        losses = self._resume()
        steps, epochs, device = self.order.steps_per_epoch, self.protocol.epochs, self.context.device
        batches = self._batches(len(losses) * steps, epochs * steps)
        what = f"fine-tuning on {self.part.name}, {len(self.part.rows):,} images"
        cuda = [device] if device.type == "cuda" else []
        # Without enabled=True this would switch cuDNN off altogether.
        repeatable = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True)
        with self.context.screen.working(what) as progress, torch.random.fork_rng(cuda), repeatable:
            for epoch in range(len(losses), epochs):
                factor = self.protocol.rate(epoch)
                self.optimiser.param_groups[0]["lr"] = self.protocol.backbone_lr * factor
                self.optimiser.param_groups[1]["lr"] = self.head_lr * factor
                self.network.train()
                total = torch.zeros((), device=device)
                for step in range(epoch * steps, (epoch + 1) * steps):
                    total += self._step(next(batches), step)
                    progress(step + 1, epochs * steps)
                losses.append(total.item() / steps)
                self._save(losses)
        if not np.isfinite(losses).all():
            raise UserError(f"fine-tuning on {self.part.name} diverged: lower backbone_lr or head_lr")
        return losses

    def _step(self, images: Images, step: int) -> Tensor:
        seed = self.context.seed * 1_000_003 + step
        torch.manual_seed(seed)  # for dropout, should the backbone have any
        generator = torch.Generator(self.context.device).manual_seed(seed)
        batch = self.views(images, generator)
        inputs, label = batch.views[0], batch.label
        assert label is not None
        if self.context.device.type == "cuda":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        autocast = self.context.autocast
        with torch.autocast(self.context.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            logits = self.network(inputs)
        loss = F.cross_entropy(logits.float(), label)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    def _batches(self, first: int, last: int) -> Iterator[Images]:
        images = at_hand(self.images)
        if isinstance(images, Canvas):
            return ResidentLoader(images.to(self.context.device), self.order).iterate(first, last)
        loader = StreamLoader(self.images, self.order, self.context.device, self.protocol.workers)
        return self._refusing(loader, first, last)

    def _refusing(self, loader: StreamLoader, first: int, last: int) -> Iterator[Images]:
        for images in loader.iterate(first, last):
            refuse_broken(loader.unreadable)
            yield images

    def predict(self, source: Source) -> Tensor:
        """Logits (N, classes) of every image's centre crop, in memory of the host."""
        subject, context = self.subject, self.context

        def transform(batch: Images) -> Tensor:
            return centre_crop(batch, subject.image_size, subject.mean, subject.std)

        met = Unreadable()
        with context.screen.working(f"testing on {len(source):,} images") as progress:
            logits = embed_all(
                self.network,
                in_order(source, context.device, BATCH, self.protocol.workers, met),
                transform,
                channels_last=context.device.type == "cuda",
                autocast=context.autocast,
                progress=lambda done: progress(done, len(source)),
                total=len(source),
                keep_on=torch.device("cpu"),
            )
        refuse_broken(met)
        return logits

    def _key(self) -> str:
        """Of everything that decides the result: a checkpoint of anything else is not continued."""
        digest = hashlib.sha256()
        # Lists only name the rows, other fractions are other parts, and workers change nothing.
        settings = self.protocol.model_dump_json(exclude={"fractions", "lists", "workers"})
        subject, context = self.subject, self.context
        plain = (settings, context.seed, preparation(subject, context), subject.image_size, self.part.decay)
        digest.update(repr(plain).encode())
        digest.update(self.images.fingerprint().encode())
        add_weights(digest, self.network)
        return digest.hexdigest()

    def _save(self, losses: list[float]) -> None:
        state = {
            "key": self.key,
            "losses": losses,
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        save_state(self.checkpoint, state)

    def _resume(self) -> list[float]:
        """Losses of the epochs already done."""
        state = kept_state(self.checkpoint, lambda path: load_state(path, self.context.device), self.context.screen)
        if state is None or state.get("key") != self.key:
            return []
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])
        losses: list[float] = state["losses"]
        self.context.screen.say(f"continuing on {self.part.name} after epoch {len(losses)}")
        return losses


def rows_of_list(path: Path, source: Source, some_left_out: bool = False) -> list[int]:
    """Indices of the images that a text file names, one a line, all by whole name or all by base name.

    Where ``some_left_out`` of the source, as unreadable, a list may name some that are not there.
    """
    try:
        wanted = [line.strip() for line in path.expanduser().read_text().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read the list {path}: {error.strerror}") from None
    names = [source.name_of(index) for index in range(len(source))]
    whole = {name: index for index, name in enumerate(names)}
    bases: dict[str, int | None] = {}
    for index, name in enumerate(names):
        base = name.rpartition("/")[2]
        bases[base] = None if base in bases else index  # None: two images share it
    by_whole_name = any(name in whole for name in wanted)
    rows = [whole.get(name) if by_whole_name else bases.get(name.rpartition("/")[2]) for name in wanted]
    unknown = [name for name, row in zip(wanted, rows, strict=True) if row is None]
    if unknown and not (some_left_out and len(unknown) < len(wanted)):
        raise UserError(
            f"{len(unknown)} of the {len(wanted)} images named in {path} are not in {source.name}, or not by that name "
            f"alone; the first is {unknown[0]!r} (images are called like {names[0]!r})"
        )
    if not wanted:
        raise UserError(f"the list {path} names no images")
    return sorted({row for row in rows if row is not None})
