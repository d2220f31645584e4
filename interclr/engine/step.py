"""One training step behind one call: eager or compiled. Nothing in it waits for the host."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from interclr import dist
from interclr.data.views import Views
from interclr.learner import Learner
from interclr.optim import learning_rate, set_learning_rate
from interclr.types import Images

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
VIEW_STREAM, LEARNER_STREAM = 1, 2  # kinds of random numbers, so that one does not shift the other


@dataclass(frozen=True, slots=True)
class Plan:
    """The arithmetic of a run. A step is one micro-batch; ``accumulate`` of them make an optimiser step."""

    epochs: int
    steps_per_epoch: int
    accumulate: int
    warmup_epochs: float
    peak_rate: float
    seed: int

    @property
    def total(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def updates(self) -> int:
        return max(1, self.total // self.accumulate)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def rate(self, step: int) -> float:
        warmup = round(self.warmup_epochs * self.steps_per_epoch / self.accumulate)
        return learning_rate(step // self.accumulate, self.updates, warmup, self.peak_rate)

    def seed_of(self, step: int, stream: int) -> int:
        """Random numbers are a function of (seed, step), so resuming needs no generator state."""
        return (self.seed * 1_000_003 + step) * 8 + stream


class TrainStep:
    """views → loss → backward → optimiser → momentum encoder → commit."""

    def __init__(
        self,
        learner: Learner,
        views: Views,
        optimiser: torch.optim.Optimizer,
        plan: Plan,
        device: torch.device,
        precision: str,
        channels_last: bool,
        compiled: bool,
    ) -> None:
        self.learner, self.views, self.optimiser, self.plan = learner, views, optimiser, plan
        self.device, self.dtype, self.channels_last = device, PRECISIONS[precision], channels_last
        self.scaler = GradScaler(device.type, enabled=precision == "fp16")
        self.view_generator = torch.Generator(device)
        learner.intra.generator = torch.Generator(device)
        if compiled:
            learner.intra.encoder.compile(dynamic=False)
            if learner.intra.bank_encoder() is not learner.intra.encoder:
                learner.intra.bank_encoder().compile(dynamic=False)
        self.parallel: DistributedDataParallel | None = None
        if dist.world() > 1:
            # Buffers stay each rank's own: broadcasting them between two forwards of one step breaks backward.
            self.parallel = DistributedDataParallel(learner.intra.encoder, broadcast_buffers=False)
            learner.intra.train_through(self.parallel)

    def __call__(self, images: Images, step: int) -> dict[str, Tensor]:
        plan, learner, epoch = self.plan, self.learner, self.plan.epoch(step)
        assert learner.intra.generator is not None
        learner.intra.generator.manual_seed(plan.seed_of(step, LEARNER_STREAM))
        self.view_generator.manual_seed(plan.seed_of(step, VIEW_STREAM))
        batch = self.views(images, self.view_generator, len(images) * dist.world(), len(images) * dist.rank())
        if self.channels_last:
            views = tuple(view.contiguous(memory_format=torch.channels_last) for view in batch.views)
            batch = type(batch)(batch.index, views, batch.label)
        last = (step + 1) % plan.accumulate == 0
        unsynced = self.parallel.no_sync() if self.parallel is not None and not last else contextlib.nullcontext()
        with unsynced:
            with torch.autocast(self.device.type, self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                loss, embeddings, terms = learner.loss(batch, epoch)
            self.scaler.scale(loss / plan.accumulate).backward()
        if last:
            set_learning_rate(self.optimiser, plan.rate(step))
            self.scaler.step(self.optimiser)
            self.scaler.update()
            self.optimiser.zero_grad(set_to_none=True)
            learner.intra.after_optimiser(step // plan.accumulate, plan.updates)
        return {"loss": loss.detach()} | terms | learner.commit(embeddings, step, epoch)
