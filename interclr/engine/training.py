"""One run: its state, the loop over it, and the figures at its end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from interclr import dist
from interclr.config import Settings, dump
from interclr.data.loader import Loader
from interclr.engine.build import build_plan, build_step
from interclr.engine.capture import WARM_UP
from interclr.engine.dataset import TrainingData
from interclr.engine.interrupt import Interruption
from interclr.engine.metrics import Averages, Logger, Record, open_loggers
from interclr.engine.monitor import Monitor, describe
from interclr.engine.ranks import Looks, lost_another, same_on_all_ranks, same_settings_on_all_ranks
from interclr.engine.restore import FORMAT, restore
from interclr.engine.step import CLUSTER_STREAM
from interclr.engine.waiting import DataWait
from interclr.models import running_statistics
from interclr.run import checkpoint
from interclr.run.files import write_text
from interclr.run.folder import (
    Run,
    command_line,
    environment,
    forget_result,
    know_images,
    save_backbone,
)
from interclr.screen import Screen, TrainingBar
from interclr.types import UserError

SHORT_RECORDS = 10  # of the losses of a run that would have one or none, so that it has curves as well
PREPARING = {
    "compile": "compiling encoders and views: a minute or two",
    "graph": "compiling views and capturing the step: a quarter of a minute, or two where the encoder is no ResNet",
}


class Stopped(Exception):
    """The run was asked to stop while clusters were made: there is no step to wait for."""


class Training:
    """One run: its state, where it is written, and the loop over it."""

    def __init__(
        self, settings: Settings, folder: Path, data: TrainingData, device: torch.device, screen: Screen, resume: bool
    ) -> None:
        self.settings, self.folder, self.data, self.device, self.screen = settings, folder, data, device, screen
        batch = int(settings.data.batch)
        if batch % dist.world():
            raise UserError(f"data.batch: {batch} does not divide over {dist.world()} processes")
        if batch // dist.world() < 2:
            raise UserError(f"data.batch: {batch} over {dist.world()} processes leaves one image for each; at least 2")
        self.images = len(data.source)
        same_on_all_ranks("number of images (is it the same folder on every machine?)", self.images)
        same_on_all_ranks("set of images (is it the same folder on every machine?)", data.fingerprint)
        same_settings_on_all_ranks(settings)  # after the images, which settle what is auto
        if batch > self.images:
            raise UserError(f"data.batch: {batch} images a batch, but only {self.images} can be read")
        if settings.branch is not None and int(settings.branch.clusters) > self.images:
            raise UserError(f"inter.clusters: {settings.branch.clusters}, but only {self.images} images can be read")
        self.batch = batch
        engine = settings.engine
        self.plan = build_plan(settings, self.images)
        if self.plan.total < engine.accumulate:
            raise UserError(
                f"engine.accumulate: {engine.accumulate} micro-batches make a step, but the run has {self.plan.total}"
            )
        splits = getattr(settings.method, "key_splits", 1)
        if engine.mode == "graph" and batch % splits:
            screen.warn(
                f"data.batch: {batch} is not a multiple of method.key_splits={splits}, which makes steps slower"
            )
        if settings.schedule.warmup_epochs > self.plan.epochs:
            screen.warn(
                f"schedule.warmup_epochs: a warm-up of {settings.schedule.warmup_epochs:g} epochs does not end in "
                f"{self.plan.epochs}, so the learning rate never reaches what was asked for"
            )
        self.step_once = build_step(settings, self.images, device)
        self.learner, self.optimiser = self.step_once.learner, self.step_once.optimiser
        self.step_once.warn = screen.warn
        self.monitor = Monitor(settings, data, device, screen)
        self.averages = Averages()
        self.step = 0
        self.clusters_started = False
        self.seconds = 0.0  # spent training in earlier sittings
        self.measured: dict[str, float] = {}  # k-NN before training, and of pixels
        self.logged: Record = {}  # of the latest whole interval
        self.bar: TrainingBar | None = None  # while steps are made
        self.log_every = engine.log_every
        if self.plan.total < 2 * self.log_every:
            self.log_every = max(1, self.plan.total // SHORT_RECORDS)
        self.met_before: dict[str, str] = {}  # unreadable images of earlier sittings
        self.commands: list[str] = []  # of earlier sittings, and this one
        self.changes: list[str] | None = []  # between sittings, of what decides the result; None where nobody knows
        self.resumed = resume and self._go_on()
        here = self.step if self.resumed else None
        same_on_all_ranks("checkpoint to go on from (--out has to be a folder that all machines share), step", here)
        self.commands.append(command_line())
        self.loader: Loader = data.loader(batch, settings.seed, device, settings.data, screen)
        self.loader.unreadable.reasons.update(self.met_before)
        self.interruption = Interruption()
        self.compile_seconds = 0.0
        self.looks = Looks(device, self.step, engine.log_every)

    # State.

    def _state(self) -> checkpoint.State:
        return {
            "format": FORMAT,
            "step": self.step,
            "learner": self.learner.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "scaler": self.step_once.scaler.state_dict(),
            "averages": self.averages.state(),
            "clusters_started": self.clusters_started,
            "seconds": self._elapsed(),
            "measured": self.measured,
            "unreadable": self._unreadable(),
            "commands": self.commands,
            "changes": self.changes,
            "processes": dist.world(),
            "data": self.data.source.fingerprint(),
            "images": self.images,
            "settings": dump(self.settings),
        }

    def _go_on(self) -> bool:
        """From the latest checkpoint; False where there is none."""
        restored = restore(self.step_once, self.settings, self.folder, self.data, self.screen)
        if restored is None:
            return False
        self.settings, self.changes, state = restored.settings, restored.changes, restored.state
        self.averages.load_state(state["averages"], self.device)
        self.step, self.clusters_started = state["step"], state["clusters_started"]
        self.seconds, self.measured = state["seconds"], state["measured"]
        self.met_before = state["unreadable"]
        self.commands = list(state.get("commands", [""]))  # which checkpoints of before do not tell
        return True

    def _save(self) -> None:
        for record in self.averages.finished():
            self._log(record)
        if not self.averages.all_finite() or not self._weights_are_finite():
            self._diverged(self.step)
        if dist.is_main():
            checkpoint.save(self.folder / "checkpoint", self.step, self._state(), self.settings.checkpoint.keep)
        self.saved_at, self.saved_step = time.monotonic(), self.step

    def _met(self) -> dict[str, str]:
        """Images that could not be read so far, by this rank, with the reason."""
        return self.data.unreadable.reasons | self.loader.unreadable.reasons

    def _unreadable(self) -> dict[str, str]:
        """By any of them, as far as they have told each other."""
        return self.looks.unreadable | self._met()

    def _weights_are_finite(self) -> bool:
        """A loss can be the last finite one of a run whose weights are lost already: such a state is not saved."""
        with torch.no_grad():
            return bool(torch.stack(torch._foreach_norm(list(self.learner.parameters()))).isfinite().all())

    def _elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.started

    # The loop.

    def run(self, stop_after: int | None) -> Run:
        if self.resumed and self.step == self.plan.total and Run(self.folder).finished:
            self.screen.say(f"the run in {self.folder} is finished: nothing to continue")
            return Run(self.folder)
        self.started = self.saved_at = time.monotonic()
        self.saved_step = self.step if self.resumed else -1
        loggers, resume_step = self.settings.engine.loggers, self.step if self.resumed else None
        # First: one that refuses leaves a finished run as it was.
        self.loggers: list[Logger] = open_loggers(loggers, self.folder, resume_step) if dist.is_main() else []
        try:
            if dist.is_main():
                forget_result(self.folder)  # a finished run that goes on is not finished
                write_text(self.folder / "resolved.yaml", dump(self.settings))
            if self.resumed:
                self.screen.say(f"continuing at step {self.step:,} of {self.plan.total:,}")
            else:
                self._measure_start()
                self._fill_bank_if_wanted()
            last = self.plan.total
            if stop_after is not None:  # whole optimiser steps: a checkpoint holds no half-summed gradients
                last = min(last, math.ceil((self.step + stop_after) / self.plan.accumulate) * self.plan.accumulate)
            with self.interruption.heeded(), self.screen.training(self.plan.total, self.step) as self.bar:
                self._train(last, self.bar)
            self.bar = None
            if self.step < self.plan.total:
                self._save()
                self.screen.say(f"stopped at step {self.step:,} of {self.plan.total:,}; continue with --resume")
            else:
                self._finish()
        except RuntimeError as error:
            if not lost_another(error):
                raise
            raise UserError(
                "another process of this run has ended, or cannot be reached: see what it said, then continue with "
                f"--resume ({' '.join(str(error).split())[:200]})"
            ) from error
        finally:
            for logger in self.loggers:
                logger.close()
        return Run(self.folder)

    def _train(self, last: int, bar: TrainingBar) -> None:
        with suppress(Stopped):  # before clusters: their start is what a resumed run begins with
            self._take_steps(last, bar)

    def _take_steps(self, last: int, bar: TrainingBar) -> None:
        self.learner.train()
        per_epoch, total, log_every = self.plan.steps_per_epoch, self.plan.total, self.log_every
        self._start_clusters_if_due()
        batches = iter(self.loader.iterate(self.step, last))
        mark, since, wait = time.monotonic(), self.step, DataWait(self.device)
        compiling, began = self._announce_compiling(), mark
        self.interruption.preparing = compiling is not None
        while self.step < last:
            wait.ask()
            try:
                images = self.step_once.fetch(batches)
            except RuntimeError:
                if not self.interruption.asked:
                    raise
                # A signal to the whole process group has also ended the workers.
                batches = iter(self.loader.iterate(self.step, last))
                images = self.step_once.fetch(batches)
            wait.arrived()
            self.averages.add(self.step_once(images, self.step))
            wait.stepped()
            self.step += 1
            if self.step == compiling:
                self.interruption.preparing = False
                self.compile_seconds = time.monotonic() - began
                self.screen.say(f"compiled in {self.compile_seconds:.0f} s")
            bar.advance(self.step, self._epoch_of(self.step))
            if self.step % log_every == 0 or self.step == total:
                now = time.monotonic()
                record = {
                    "step": self.step,
                    "epoch": self.step / per_epoch,
                    "lr": self.plan.rate(self.step - 1),
                    "images_per_second": (self.step - since) * self.batch / (now - mark),
                    "data_wait": wait.take() / (now - mark),
                    "unreadable": len(self._unreadable()),
                }
                # Before the wait below, in which the device catches up with what it was given.
                mark, since = now, self.step
                if (before := self.averages.flush(record)) is not None:
                    self._log(before)
            if self.step % per_epoch == 0:
                self._end_epoch(self.step // per_epoch - 1)
                mark, since = time.monotonic(), self.step
                wait.take()
            self._save_if_due()
            if self.step % self.plan.accumulate == 0 and self._all_stop():
                break

    def _announce_compiling(self) -> int | None:
        """Say what the first steps are slow for; the step after which that is over."""
        mode = self.settings.engine.mode
        if mode == "eager":
            return None
        self.screen.say(PREPARING[str(mode)] + ", once (engine.mode=eager does without)")
        return self.step + (WARM_UP + 1 if mode == "graph" else 1)

    def _all_stop(self) -> bool:
        before = self.looks.unreadable
        stop = self.looks.all_stop(self.step, self.interruption.asked, self._met)
        for name in self.looks.unreadable.keys() - before.keys() - self._met().keys() if self.looks.unreadable else ():
            self.screen.warn(f"unreadable by another process: {name}: {self.looks.unreadable[name]}")
        return stop

    def _epoch_of(self, step: int) -> str:
        """The epoch, counted from 1, that a finished step was of."""
        return f"{-(-step // self.plan.steps_per_epoch)}/{self.plan.epochs}"

    def _log(self, record: Record) -> None:
        for logger in self.loggers:
            logger.log(record)
        if "loss" in record and self.bar is not None:
            self.bar.show(self._epoch_of(record["step"]), record)
        if "loss" in record and record["step"] % self.log_every == 0:
            self.logged = record
        if not math.isfinite(record.get("loss", 0.0)):
            self._diverged(record["step"])

    def _diverged(self, step: int) -> NoReturn:
        raise UserError(
            f"the loss or the weights became NaN or infinite before step {step}: lower optimiser.base_lr, lengthen "
            "schedule.warmup_epochs or use engine.precision=bf16. Checkpoints from before that are kept"
        )

    def _end_epoch(self, epoch: int) -> None:
        """Between epochs: offline labels or repair, the start of the inter branch, k-NN and health."""
        with self._clustering():
            self.learner.end_epoch(epoch, self._cluster_generator(epoch))
        every = int(self.settings.monitor.every_epochs)
        final = epoch + 1 == self.plan.epochs
        if not final and every and (epoch + 1) % every == 0:
            self._measure(epoch)
        self._start_clusters_if_due()

    def _fill_bank_if_wanted(self) -> None:
        """Before the first step; clusters that start there bring the same features with them."""
        if self.learner.intra.starts_from_features and not self.learner.inter_active(0):
            bank = self.learner.bank
            assert bank is not None
            bank.fill(self._embed_all("embedding every image for the bank"))
            dist.broadcast(bank.features)  # devices may differ in their rounding; banks may not
            bank.rebuild()

    def _embed_all(self, what: str) -> Tensor:
        """Features (N, D) of every image. Each process embeds its share of them, and has them all then."""
        encoder, world = self.learner.intra.bank_encoder(), dist.world()
        if world == 1:
            return self.monitor.embed(encoder, self.data.images, what, heed=self._heed)
        dist.broadcast_all(running_statistics(encoder))  # each process has its own, and only the first one's are saved
        begins = [self.images * rank // world for rank in range(world + 1)]
        own = self.monitor.take(torch.arange(*begins[dist.rank() : dist.rank() + 2]))
        features = self.monitor.embed(encoder, own, what)
        share = -(-self.images // world)
        padded = features.new_zeros(share, features.shape[1])  # all of one size
        padded[: len(features)] = features
        parts = dist.all_gather(padded).split(share)
        return torch.cat([part[: end - begin] for part, (begin, end) in zip(parts, pairwise(begins), strict=True)])

    def _heed(self) -> None:
        """Several ranks go on until they can compare, as one that left would keep the others waiting; and half-summed
        gradients until they are whole."""
        if self.interruption.asked and dist.world() == 1 and self.step % self.plan.accumulate == 0:
            raise Stopped

    @contextmanager
    def _clustering(self, heed: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Show k-means over all images, which can take minutes."""
        labels = self.learner.labels
        if labels is None:
            yield
            return
        with self.screen.working(f"clustering {self.images:,} images") as progress:

            def tell(done: int, total: int) -> None:
                progress(done, total)
                heed()

            labels.progress = tell
            try:
                yield
            finally:
                labels.progress = None

    def _start_clusters_if_due(self) -> None:
        """Before the first epoch of the inter branch: cluster every image as the network sees it now.

        A method with a bank of its own keeps it: its averages over many views are what the intra loss goes on with.
        (Of images that no step has seen yet, unreadable ones for instance, it has what it started with.)
        """
        if self.clusters_started or self.step >= self.plan.total:
            return
        epoch = self.plan.epoch(self.step)
        if self.learner.inter_active(epoch):
            if self.learner.intra.uses_bank and self.step > 0:
                assert self.learner.bank is not None
                features = self.learner.bank.features
            else:
                features = self._embed_all("embedding every image for the first clusters")
            with self._clustering(self._heed):
                self.learner.start_clusters(features, self._cluster_generator(epoch))
            self.clusters_started = True

    def _cluster_generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.plan.seed_of(epoch, CLUSTER_STREAM))

    def _save_if_due(self) -> None:
        if self.step % self.plan.accumulate or self.step >= self.plan.total:
            return  # a checkpoint holds no half-summed gradients; the last one is written at the end
        every = int(self.settings.checkpoint.every_epochs) * self.plan.steps_per_epoch
        passed = self.step // every > max(self.saved_step, 0) // every  # since the last checkpoint, not just now
        late = time.monotonic() - self.saved_at > 60 * self.settings.checkpoint.every_minutes
        if passed or late:
            self._save()

    # Figures.

    def _measure_start(self) -> None:
        if self.monitor.measures_knn:
            pixels, before = self.monitor.knn_of_pixels(), self.monitor.knn(self.learner.intra.encoder.backbone)
            self.measured |= {} if pixels is None else {"knn_pixels": pixels}
            self.measured |= {} if before is None else {"knn_before": before}
            guessing = self.monitor.guessing
            self.measured |= {} if guessing is None else {"knn_guessing": guessing}
            text = self._floors()
            yardstick = f"k={self.monitor.k}, T={self.monitor.temperature}"
            if before is not None:
                self.screen.say(f"k-NN before training ({yardstick}): {text}random weights {before:.1f} %")
        self._log({"step": 0, "epoch": 0.0, "event": "start"} | self.measured)

    def _floors(self) -> str:
        """What any training has to leave behind."""
        kinds = {"knn_guessing": "always the commonest class", "knn_pixels": "raw pixels"}
        return "".join(f"{told} {self.measured[key]:.1f} %, " for key, told in kinds.items() if key in self.measured)

    def _measure(self, epoch: int) -> dict[str, float]:
        figures: dict[str, float] = {}
        accuracy = self.monitor.knn(self.learner.intra.encoder.backbone)
        if accuracy is not None:
            figures["knn"] = accuracy
        figures |= self.monitor.health(self.learner, epoch)
        for record in self.averages.finished():
            self._log(record)
        self._log({"step": self.step, "epoch": epoch + 1.0, "event": "monitor"} | figures)
        self.screen.say(f"epoch {epoch + 1}/{self.plan.epochs}: " + describe(self.logged | figures))
        return figures

    def _finish(self) -> None:
        self._save()  # first: a run killed while it is measured loses nothing
        if dist.is_main():
            know_images(self.learner.intra.encoder.backbone, self.settings)
            save_backbone(self.folder / "backbone.safetensors", self.learner.intra.encoder.backbone)
        figures = self._measure(self.plan.epochs - 1)
        seconds = self._elapsed()
        unreadable = dict(item for found in dist.gathered(self._met()) for item in found.items())
        if not dist.is_main():
            return
        result = {
            "finished": True,
            "method": self.settings.method.name,
            "inter": self.learner.inter_active(self.plan.epochs),
            "data": self.data.source.name,
            "images": self.images,
            "fingerprint": self.data.fingerprint,
            "epochs": self.plan.epochs,
            "steps": self.step,
            "seed": self.settings.seed,
            "knn_k": self.monitor.k,
            "knn_temperature": self.monitor.temperature,
            **self.measured,
            **figures,
            "seconds": round(seconds, 2),
            "compile_seconds": round(self.compile_seconds, 2),  # of those, in the last sitting
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None,
            "unreadable": unreadable,
            "command": self.commands[0],  # which started the run; those that continued it follow
            **({"continued_by": self.commands[1:]} if len(self.commands) > 1 else {}),
            "changes": self.changes,
            "processes": dist.world(),
            **environment(),
        }
        write_text(self.folder / "result.json", json.dumps(result, indent=2) + "\n")
        if "knn" in figures:
            self.screen.say(
                f"k-NN (k={self.monitor.k}, T={self.monitor.temperature}): {self._floors()}before "
                f"{self.measured.get('knn_before', math.nan):.1f} %, after {figures['knn']:.1f} %"
            )
        if unreadable:
            self.screen.warn(f"unreadable images: {len(unreadable)}; their names are in result.json")
        self.screen.say(f"done in {seconds:.0f} s; the run is in {self.folder}")
