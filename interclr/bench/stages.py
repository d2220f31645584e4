"""Where the time of a step goes on a CPU: wall time by stage, of the very step that training makes."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from interclr.bench.setup import Prepared
from interclr.screen import Screen

FORWARD_BACKWARD = ("encoders forward", "soft targets forward", "losses forward", "backward")


class Stages:
    """Times calls of methods by replacing them on their objects; nested stages count for the inner one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[float] = []

    def watch(self, owner: Any, method: str, stage: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.stage(stage):
                return original(*args, **kwargs)

        object.__setattr__(owner, method, timed)

    def timed(self, stage: str, work: Callable[[], Any]) -> Any:
        with self.stage(stage):
            return work()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        self._open.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            inner = self._open.pop()
            self.seconds[name] += spent - inner
            if self._open:
                self._open[-1] += spent


def measure_stages(prepared: Prepared, steps: int, screen: Screen) -> dict[str, Any]:
    """Shares of the wall time of ``steps`` steps, by stage, after a warm-up."""
    stages, step, learner = Stages(), prepared.step, prepared.learner
    stages.watch(learner.intra, "embed", "encoders forward")
    stages.watch(learner, "loss", "losses forward")
    if learner.sampler is not None:
        stages.watch(learner, "_prepare_draw", "draw of pairs")
        stages.watch(learner, "_complete_draw", "draw of pairs")
    stages.watch(step.optimiser, "step", "optimiser")
    stages.watch(learner, "after_optimiser", "momentum encoder")
    stages.watch(learner, "_seen", "soft targets forward")
    stages.watch(learner, "commit", "commit to the bank")
    stages.watch(learner, "maintain", "commit to the bank")

    def timed(views: Any) -> Any:
        def call(*args: Any) -> Any:
            with stages.stage("views"):
                return views(*args)

        return call

    def timed_backward(loss: Tensor) -> Any:
        """What the step calls ``backward`` of: the loss, with a watch on it."""
        return SimpleNamespace(backward=lambda: stages.timed("backward", loss.backward))

    step.views = timed(step.views)
    step.target_view = None if step.target_view is None else timed(step.target_view)
    step.scaler.scale = timed_backward  # type: ignore[method-assign, assignment]
    batches = iter(prepared.loader.iterate(0, steps + WARM))
    rounds: list[dict[str, float]] = []
    with screen.working("timing the stages of a step") as progress:
        for number in range(steps + WARM):
            stages.seconds.clear()
            started = time.perf_counter()
            with stages.stage("loading"):
                images = next(batches)
            with stages.stage("the rest of the step"):
                step(images, number)
            total = time.perf_counter() - started
            if number >= WARM:
                rounds.append({name: seconds / total for name, seconds in stages.seconds.items()} | {"step": total})
            progress(number + 1, steps + WARM)
    shares = {name: statistics.median(r.get(name, 0.0) for r in rounds) for name in rounds[0] if name != "step"}
    outside = [1 - sum(r.get(name, 0.0) for name in FORWARD_BACKWARD) for r in rounds]
    together = sum(share * r["step"] for share, r in zip(outside, rounds, strict=True)) / sum(r["step"] for r in rounds)
    return {
        "steps": steps,
        "threads": torch.get_num_threads(),
        "milliseconds_per_step": 1e3 * statistics.median(r["step"] for r in rounds),
        "shares": shares,
        "outside_forward_backward": statistics.median(outside),
        "outside_of_all_steps_together": together,  # with those that repair clusters
        "outside_range": [min(outside), max(outside)],
    }


WARM = 3
