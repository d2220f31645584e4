"""One training step behind one call: eager, compiled or captured. Nothing in it waits for the host."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from interclr import dist, kernels
from interclr.data.views import Views
from interclr.engine.capture import CapturedStep, CaptureFailed, can_capture
from interclr.learner import Learner
from interclr.models import fuse
from interclr.optim import learning_rate, set_learning_rate
from interclr.streams import join_side_streams, run_beside
from interclr.types import Batch, Images

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# Kinds of random numbers, so that one does not shift the other.
VIEW_STREAM, METHOD_STREAM, CLUSTER_STREAM, PAIR_STREAM = 1, 2, 3, 4


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
    """views → loss → backward → (commit | optimiser → momentum encoder) → maintain.

    Neither side of ``|`` reads what the other writes: in a graph they run beside each other, else from left to right.

    ``mode`` is ``eager``, ``compile`` (encoders and views are compiled) or ``graph`` (all that follows the views is one
    CUDA graph; ResNets run on our own kernels). All compute the same function; fused kernels round differently.
    """

    def __init__(
        self,
        learner: Learner,
        views: Views,
        optimiser: torch.optim.Optimizer,
        plan: Plan,
        device: torch.device,
        precision: str,
        channels_last: bool,
        mode: str = "eager",
        target_view: Views | None = None,
    ) -> None:
        self.learner, self.views, self.optimiser, self.plan = learner, views, optimiser, plan
        self.target_view = target_view  # one more view while the inter branch is there: of which its soft targets are
        self.device, self.dtype, self.channels_last = device, PRECISIONS[precision], channels_last
        self.scaler = GradScaler(device.type, enabled=precision == "fp16")
        self.view_generator = torch.Generator(device)
        self._give_generators()
        if mode != "eager":
            # Tuning reductions by the clock would make their rounding a matter of luck, and resuming inexact.
            inductor.deterministic = torch.backends.cudnn.deterministic
            learner.intra.join_views()
            encoders = {learner.intra.encoder, learner.intra.bank_encoder()}
            # Captured, a ResNet of our own kernels is faster than a compiled one and there at once. Launched one by
            # one they would keep the host too busy.
            if mode == "compile" or not kernels.usable(next(learner.parameters())) or not all(map(fuse, encoders)):
                for encoder in encoders:
                    encoder.compile(dynamic=False)
        self.captures = mode == "graph"
        assert not self.captures or can_capture(device, precision, plan.accumulate), "see can_capture"
        self.captured: dict[bool, CapturedStep] = {}
        self.beside = torch.cuda.Stream(device) if self.captures else None  # for what comes before the graph
        self.fetched = False  # whether the batch at hand was loaded there
        self.warn: Callable[[str], None] = warnings.warn
        # Numbers that change from step to step. A graph reads them from the device.
        self.rate: float | Tensor = torch.zeros((), device=device) if self.captures else 0.0
        varies = self.captures and learner.intra.momentum_varies
        self.momentum: float | Tensor = torch.zeros((), device=device) if varies else 0.0
        self.parallel: DistributedDataParallel | None = None
        if dist.world() > 1:
            # Buffers stay each rank's own: broadcasting them between two forwards of one step breaks backward.
            self.parallel = DistributedDataParallel(learner.intra.encoder, broadcast_buffers=False)
            learner.intra.train_through(self.parallel)

    def fetch(self, batches: Iterator[Images]) -> Images:
        """The next batch. Where steps are captured, it is loaded and its views are made beside the step before it."""
        with self._before_the_graph():
            images = next(batches)
        self.fetched = self.beside is not None
        return images

    def __call__(self, images: Images, step: int) -> dict[str, Tensor]:
        self._prepare(step)
        epoch, last = self.plan.epoch(step), (step + 1) % self.plan.accumulate == 0
        active = self.learner.inter_active(epoch)
        if self.fetched:
            assert self.beside is not None
            self.fetched = False
            with self._before_the_graph():
                batch = self.make_views(images, active)
                # The views' memory may be used again once the graph has its copy; a loader's index is another's memory.
                batch = replace(batch, index=batch.index.clone())
            torch.cuda.current_stream().wait_stream(self.beside)
        else:
            batch = self.make_views(images, active)
        if self.captures:
            if active not in self.captured:  # the inter branch has begun: another graph, and this one's memory back
                self.captured = {active: CapturedStep(self._generators()[1:])}
            try:
                terms = self.captured[active](lambda batch: self._compute(batch, epoch, last), batch)
            except CaptureFailed as error:
                self._give_up_capturing(error)
                terms = self(images, step)
                if self.device.type == "cuda":  # the batch was loaded for another stream: not to be freed too early
                    torch.cuda.synchronize()
                return terms
        else:
            terms = self._compute(batch, epoch, last)
        self.learner.maintain(step, epoch)
        return terms

    def _before_the_graph(self) -> AbstractContextManager[object]:
        """Work on a stream that waits for the last step only until its graph has taken the batch given to it."""
        if self.beside is None:
            return contextlib.nullcontext()
        taken = [captured.taken for captured in self.captured.values() if captured.graph is not None]
        for event in taken:
            self.beside.wait_event(event)
        if not taken:
            self.beside.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.beside)

    def _give_up_capturing(self, error: CaptureFailed) -> None:
        """A capture computes nothing, so the step can be made in the ordinary way, as all that follow."""
        self.warn(f"the step cannot be captured as a CUDA graph and is launched in the ordinary way: {error}")
        self.captures, self.captured, self.beside = False, {}, None
        self.optimiser.zero_grad(set_to_none=True)
        self._give_generators()  # those before belong to the graph that failed
        torch.cuda.empty_cache()

    def _give_generators(self) -> None:
        self.learner.intra.generator = torch.Generator(self.device)
        self.learner.generator = torch.Generator(self.device)

    def _generators(self) -> tuple[torch.Generator, ...]:
        method, pairs = self.learner.intra.generator, self.learner.generator
        assert method is not None
        assert pairs is not None
        return self.view_generator, method, pairs

    def _prepare(self, step: int) -> None:
        """Everything that depends on the number of the step."""
        plan = self.plan
        for generator, stream in zip(self._generators(), (VIEW_STREAM, METHOD_STREAM, PAIR_STREAM), strict=True):
            generator.manual_seed(plan.seed_of(step, stream))
        rate, momentum = plan.rate(step), self.learner.intra.momentum_at(step // plan.accumulate, plan.updates)
        self.rate = self.rate.fill_(rate) if isinstance(self.rate, Tensor) else rate
        self.momentum = self.momentum.fill_(momentum) if isinstance(self.momentum, Tensor) else momentum

    def make_views(self, images: Images, active: bool) -> Batch:
        """The method's views and, last and with random numbers after theirs, that of the branch's soft targets."""
        kinds = [self.views] if self.target_view is None or not active else [self.views, self.target_view]
        total, first = len(images) * dist.world(), len(images) * dist.rank()
        batches = [kind(images, self.view_generator, total, first) for kind in kinds]
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        views = (view.contiguous(memory_format=layout) for batch in batches for view in batch.views)
        return Batch(images.index, tuple(views), batches[0].label)

    def _compute(self, batch: Batch, epoch: int, last: bool) -> dict[str, Tensor]:
        """The work of a step behind its views: only the device is busy with it, and its shapes never change."""
        learner = self.learner
        unsynced = self.parallel.no_sync() if self.parallel is not None and not last else contextlib.nullcontext()
        with unsynced:
            with torch.autocast(self.device.type, self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                loss, embeddings, terms = learner.loss(batch, epoch)
            self.scaler.scale(loss / self.plan.accumulate).backward()
        join_side_streams()
        # Beside each other: neither reads what the other writes.
        written: dict[str, Tensor]
        written, _ = run_beside(
            lambda: learner.commit(embeddings, epoch), lambda: self._update(epoch) if last else None
        )
        return {"loss": loss.detach()} | terms | written

    def _update(self, epoch: int) -> None:
        set_learning_rate(self.optimiser, self.rate)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.optimiser.zero_grad(set_to_none=True)
        self.learner.after_optimiser(self.momentum, epoch)
