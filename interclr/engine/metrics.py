"""Figures of a run: averaged on the device, copied without waiting, written to metrics.jsonl and the loggers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from interclr import dist
from interclr.run.files import write_text
from interclr.run.folder import read_lines
from interclr.types import UserError

Record = dict[str, Any]


class Averages:
    """Sums named 0-d tensors over some steps. ``flush`` starts a copy to the host and returns the one before it.

    The copy read at a flush was started a whole logging interval earlier, so reading it does not wait.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}
        self._pending: tuple[Record, list[str], Tensor, torch.cuda.Event | None] | None = None

    def add(self, terms: dict[str, Tensor]) -> None:
        values = {name: value.detach().float() for name, value in terms.items()}
        known = [name for name in values if name in self._sums]
        if known:  # one kernel for all of them: between two steps the device has nothing else to do
            sums = torch._foreach_add([self._sums[name] for name in known], [values[name] for name in known])
            values |= dict(zip(known, sums, strict=True))
        self._sums |= values
        for name in terms:
            self._steps[name] = self._steps.get(name, 0) + 1

    def flush(self, record: Record) -> Record | None:
        """Start copying the averages to go with ``record``; return the record finished by the earlier copy."""
        finished = self.drain()
        if self._sums:
            names = list(self._sums)
            values = dist.all_reduce_mean(torch.stack([self._sums[name] / self._steps[name] for name in names]))
            event = None
            if values.is_cuda:
                host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                host.copy_(values, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                values = host
            self._pending = (record, names, values, event)
            self._sums, self._steps = {}, {}
        return finished

    def drain(self) -> Record | None:
        """The record whose copy is under way, waited for."""
        if self._pending is None:
            return None
        record, names, values, event = self._pending
        if event is not None:
            event.synchronize()
        self._pending = None
        return record | dict(zip(names, values.tolist(), strict=True))

    def finished(self) -> list[Record]:
        """``drain`` as a list, for callers that log whatever there is."""
        record = self.drain()
        return [] if record is None else [record]

    def all_finite(self) -> bool:
        """Whether every sum of the interval under way is a number. Waits for the host."""
        return all(bool(value.isfinite()) for value in self._sums.values())

    def state(self) -> dict[str, Any]:
        """Sums of an interval under way, so that an interrupted run logs the very averages it would have logged."""
        return {"sums": {name: value.cpu() for name, value in self._sums.items()}, "steps": dict(self._steps)}

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        self._sums = {name: value.to(device) for name, value in state["sums"].items()}
        self._steps = dict(state["steps"])


class Logger(Protocol):
    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: one object a line. On resume, lines after the checkpoint's step are dropped, not repeated."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self.path = path
        with _writing(path):
            if resume_step is None:
                path.write_text("")
            elif path.exists():
                kept = [line for line in read_lines(path) if _at(line) <= resume_step]
                temporary = path.with_suffix(".tmp")
                temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
                os.replace(temporary, path)
            self._file = open(path, "a", buffering=1)  # noqa: SIM115 - open for the life of the run

    def log(self, record: Record) -> None:
        with _writing(self.path):
            self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written has been said already
            self._file.close()


def _at(line: Record) -> float:
    """The step of a line; one that has been damaged is not kept."""
    step = line.get("step", 0)
    return step if isinstance(step, int | float) else math.inf


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"could not write {path}: {error.strerror or error}. Checkpoints are untouched; make room or permission, "
            "then continue with --resume"
        ) from error


class TensorBoard:
    """Curves in another form: where they cannot be written (a full disk, a path it does not take) the run goes on."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = None
        with self._left_out_if_it_fails():
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, record: Record) -> None:
        for name, value in record.items():
            if name not in ("step", "event") and isinstance(value, int | float) and math.isfinite(value):
                with self._left_out_if_it_fails():
                    if self._writer is not None:
                        self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        with self._left_out_if_it_fails():
            if self._writer is not None:
                self._writer.close()

    @contextlib.contextmanager
    def _left_out_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # a name that is not UTF-8 is a ValueError
            self._writer = None
            warnings.warn(f"no more lines for TensorBoard: {error}", stacklevel=2)


def _kept_id(path: Path, resume_step: int | None) -> str | None:
    """By which a service knows the run that is resumed; None for one that begins, also where another began before."""
    try:
        return None if resume_step is None else path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


class WandB:
    def __init__(self, folder: Path, resume_step: int | None) -> None:
        import wandb

        own = _kept_id(folder / "wandb.id", resume_step)
        if own is None:  # many folders have the same name, which used to be the id
            own = secrets.token_hex(8) if resume_step is None else folder.name
        self._run = wandb.init(dir=str(folder), name=folder.name, resume="allow", id=own)
        write_text(folder / "wandb.id", own)

    def log(self, record: Record) -> None:
        self._run.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, folder: Path, resume_step: int | None) -> None:
        import mlflow

        self._mlflow = mlflow
        self._start(folder, _kept_id(folder / "mlflow.id", resume_step))

    def _start(self, folder: Path, known: str | None) -> None:
        """Go on with the run of before; where the server does not know it, with a new one: training matters more."""
        try:
            run = self._mlflow.start_run(run_id=known) if known else self._mlflow.start_run(run_name=folder.name)
        except self._mlflow.exceptions.MlflowException as error:
            if not known:
                raise
            warnings.warn(f"MLflow cannot go on with run {known} and begins another: {error}", stacklevel=2)
            return self._start(folder, None)
        write_text(folder / "mlflow.id", run.info.run_id)

    def log(self, record: Record) -> None:
        numbers = {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
        self._mlflow.log_metrics(numbers, step=record["step"])

    def close(self) -> None:
        self._mlflow.end_run()


LOGGERS: dict[str, Callable[[Path, int | None], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}
EXTRAS = ("wandb", "mlflow")  # packages, which have the names of their loggers


def open_loggers(names: Iterable[str], folder: Path, resume_step: int | None) -> list[Logger]:
    """The run's own file comes last, and what it held beyond ``resume_step`` goes: another may still refuse."""
    others = [LOGGERS[name](folder, resume_step) for name in names]
    return [JsonLines(folder / "metrics.jsonl", resume_step), *others]


def check_loggers(names: Iterable[str]) -> None:
    """What is not installed is said before any image is read."""
    for name in set(names) & set(EXTRAS):
        try:
            import_module(name)
        except ImportError as error:
            raise UserError(f"engine.loggers: {name} is not installed: pip install 'interclr[{name}]'") from error
