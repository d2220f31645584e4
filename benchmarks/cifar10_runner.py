"""One run of the plan: trained, measured and put on record by processes of its own, or continued."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from cifar10_plan import CLI, ROOT, Job
from cifar10_record import (
    Record,
    as_json,
    by_epoch,
    failures_before,
    figures_of,
    line_of,
    says_more,
    settings_of,
    so_far,
)

from interclr.evaluate.requested import Request
from interclr.evaluate.session import place_of
from interclr.run import checkpoint
from interclr.run.files import write_text
from interclr.run.folder import Run, environment

ERROR_LENGTH = 600
TAIL = 2**16  # bytes: many lines of metrics
NOTE_EVERY = 20.0  # seconds: where a training is, into its record


class Failure(Exception):
    """Why a run has no figures."""


class Interrupted(Exception):
    """The run was asked to stop, and can be continued."""


class Runner:
    def __init__(self, work: Path, out: Path, jobs: int) -> None:
        self.work, self.out, self.jobs = work, out, jobs
        self.starts: dict[str, list[int]] = {}  # finished runs that are trained again, up to which epochs
        self.stopping = False
        self.began = time.monotonic()
        self.processes: set[subprocess.Popen[str]] = set()
        self.lock = threading.Lock()
        # Each its share of the cores: where two have all of them, on a CPU both take more than twice as long.
        self.threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, torch.get_num_threads() // jobs))

    def folder(self, job: Job, title: str | None = None) -> Path:
        return self.work / job.group / (title or job.title)

    def record(self, job: Job) -> Record | None:
        path = self.out / job.group / f"{job.title}.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def finished(self, job: Job) -> bool:
        record = self.record(job)
        return record is not None and "error" not in record and not record.get("unmeasured")

    def start_step(self, job: Job) -> int:
        """The step of the parent's checkpoint from which ``job`` goes on."""
        assert job.entry.start is not None
        step = step_of(self.folder(job, job.parent), job.entry.start.epoch)
        if step is None:
            raise Failure(f"{job.parent}, which this run continues, has not been trained")
        return step

    def start_checkpoint(self, job: Job) -> Path:
        path = checkpoint_at(self.folder(job, job.parent), self.start_step(job))
        if not path.exists():
            raise Failure(f"{job.parent} has no {path.name}: it did not get there, or its checkpoint.keep is too small")
        return path

    def can_start(self, job: Job) -> bool:
        try:
            return job.entry.start is None or self.start_checkpoint(job).exists()
        except Failure:
            return False

    def can_start_now(self, job: Job, parent: Job) -> bool:
        """The same while ``parent`` is being trained: only once its metrics up to there are written as well.

        What lies in its folder may still be of other settings, and vanish at any moment.
        """
        folder = self.folder(parent)
        try:
            ours = (folder / "command.txt").read_text() == self.training_command(parent)
            newest = newest_metrics(folder)
            return ours and newest is not None and self.can_start(job) and newest["step"] > self.start_step(job)
        except (OSError, Failure):
            return False

    def is_again(self, job: Job) -> bool:
        """Whether the parent here is not the one of the record, but trained again for its checkpoint."""
        path = self.out / job.group / f"{job.parent}.json"
        recorded = path.exists() and "error" not in json.loads(path.read_text())
        return recorded and not Run(self.folder(job, job.parent)).finished

    def train(self, job: Job) -> bool:
        """Train and record; whether there is something to measure."""
        began = time.monotonic()
        self.say(job, "started")
        again, before = job.key in self.starts, Run(self.folder(job)).finished
        try:
            self._train(job, began)
        except Interrupted:
            self._note(job, began)
            raise
        except Failure as failure:
            if again:  # the record stays as it was
                self.say(job, str(failure))
            else:
                self._record(job, str(failure), time.monotonic() - began)
            return False
        if again:
            self.say(job, "trained again as far as needed")
            return False
        self._record(job, None, time.monotonic() - began, before)
        return bool(self._unmeasured(job))

    def measure(self, job: Job) -> None:
        """Measure what is trained, and complete its record, as far as it gets: what was trained stays in it."""
        began, failed = time.monotonic(), None
        try:
            self._measure(job)
        except Interrupted:
            pass
        except Failure as failure:
            failed = str(failure)
        self._record(job, None, time.monotonic() - began, trained_before=True, not_measured=failed)

    def say(self, job: Job, text: str) -> None:
        # in one piece: other trainings speak from threads of their own
        print(f"{time.monotonic() - self.began:.0f} s: {job.key}: {text}\n", end="", flush=True)

    def _record(
        self, job: Job, error: str | None, seconds: float, trained_before: bool = False, not_measured: str | None = None
    ) -> None:
        found = self.record(job)
        record = self._describe(job, error, seconds) | {"failed_before": failures_before(found)}
        if not_measured is not None:
            record["failed_before"].append({"date": record["date"], "commit": record["commit"], "error": not_measured})
            self.say(job, not_measured)
        if trained_before and found is not None:  # by another call, beside others than now
            record |= {key: found[key] for key in ("jobs", "threads", "mps") if key in found}
        self._write(job, record)
        self.say(job, line_of(record))

    def _note(self, job: Job, began: float) -> None:
        """What the training has measured so far, unless there is a record that says more."""
        folder, found, start = self.folder(job), self.record(job), job.entry.start
        metrics = Run(folder).metrics if (folder / "metrics.jsonl").exists() else []
        text = so_far(metrics, 0 if start is None else start.epoch)
        if text is None or job.key in self.starts or says_more(found, metrics):
            return
        record = self._describe(job, text, time.monotonic() - began)
        self._write(job, record | {"cut_off": True, "failed_before": failures_before(found)})

    def _write(self, job: Job, record: Record) -> None:
        place = self.out / job.group / f"{job.title}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, as_json(record))

    def _train(self, job: Job, began: float) -> None:
        folder = self.folder(job)
        log, about = folder.with_name(f"{folder.name}.log"), folder / "command.txt"
        started = bool(checkpoint.find(folder / "checkpoint"))
        if not (started and about.exists() and about.read_text() == self.training_command(job)):
            shutil.rmtree(folder, ignore_errors=True)  # of other settings, or without anything to go on from
            started = False
        folder.mkdir(parents=True, exist_ok=True)
        if not started and job.entry.start is not None:
            self._copy_start(job, folder)
            started = True
        about.write_text(self.training_command(job))
        words = [job.entry.recipe, *job.overrides, f"seed={job.seed}", "--no-report", "--out", str(folder)]

        def enough() -> bool:
            steps = [step_of(folder, epoch) for epoch in self.starts.get(job.key, [])]
            return bool(steps) and all(step is not None and checkpoint_at(folder, step).exists() for step in steps)

        noted = began

        def look() -> bool:
            nonlocal noted
            if time.monotonic() - noted > NOTE_EVERY:
                self._note(job, began)
                noted = time.monotonic()
            return enough()

        self._call([*job.program, "pretrain", *words, *["--resume"] * started], log, folder, look)
        if not enough() and not Run(folder).finished:
            raise Interrupted if self.stopping else Failure("the training was stopped from outside")

    def _unmeasured(self, job: Job) -> list[str]:
        done = place_of(Request(str(self.folder(job)), held_out=job.held_out))
        return [each for each in job.evaluate if not (done / each.split()[0] / "result.json").exists()]

    def _measure(self, job: Job) -> None:
        folder = self.folder(job)
        log = folder.with_name(f"{folder.name}.log")
        for names, settings in calls_of(self._unmeasured(job)):
            words = ["evaluate", names, str(folder), *settings, *["--held-out"] * job.held_out]
            self._call([*CLI, *words], log, folder)

    def _copy_start(self, job: Job, folder: Path) -> None:
        """The parent's checkpoint, and its metrics up to there, which are this run's as well.

        A link: checkpoints are written whole and never changed, and copies of some hundred megabytes, a few at a time,
        have kept runs waiting for minutes.
        """
        source = self.start_checkpoint(job)
        (folder / "checkpoint").mkdir()
        try:
            os.link(source, folder / "checkpoint" / source.name)
        except OSError:  # a file system without links
            shutil.copyfile(source, folder / "checkpoint" / source.name)
        step = self.start_step(job)
        lines = [line for line in Run(source.parent.parent).metrics if line["step"] <= step]
        write_text(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def _call(self, words: list[str], log: Path, folder: Path, look: Callable[[], bool] = lambda: False) -> None:
        """Run Python with ``words`` to its end, or until ``look``, called all the while, says that it is far enough."""
        command = [sys.executable, *words]
        with open(log, "a") as output:
            with self.lock:
                if self.stopping:
                    raise Interrupted
                # A session of its own: Ctrl-C reaches this script, which asks its processes to stop.
                process = subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                    env=os.environ | {"OMP_NUM_THREADS": self.threads},
                )
                self.processes.add(process)
            errors, asked = None, False
            while errors is None:
                try:
                    errors = process.communicate(timeout=0.5)[1]
                except subprocess.TimeoutExpired:
                    if not asked and look():
                        process.terminate()
                        asked = True
            self.processes.discard(process)
            output.write(errors)
        if process.returncode and self.stopping:
            raise Interrupted
        if process.returncode and not asked:
            text = errors.strip().replace(str(folder), "OUT").replace(f"{ROOT}/", "")
            raise Failure(text[-ERROR_LENGTH:] or f"it ended with {process.returncode}")

    def stop(self) -> None:
        """Every training saves a checkpoint and ends."""
        with self.lock:
            self.stopping = True
            for process in list(self.processes):
                process.terminate()

    def command(self, job: Job, step: int | None = None) -> str:
        """What to type for the same run, with OUT for its folder and PARENT for that of the run it continues."""
        commands = [self.training_command(job, step)]
        for names, settings in calls_of(job.evaluate):
            commands.append(
                shlex.join(["interclr", "evaluate", names, "OUT", *settings, *["--held-out"] * job.held_out])
            )
        return " && ".join(commands)

    def training_command(self, job: Job, step: int | None = None) -> str:
        program = ["python", *job.entry.control] if job.entry.control else ["interclr"]
        words = [*program, "pretrain", job.entry.recipe, *job.portable(), f"seed={job.seed}", "--no-report"]
        command = shlex.join([*words, "--out", "OUT", *["--resume"] * (job.entry.start is not None)])
        if job.entry.start is None:
            return command
        copy = f"cp PARENT/checkpoint/{'STEP' if step is None else f'step-{step:010d}'}.pt OUT/checkpoint/"
        return f"mkdir -p OUT/checkpoint && {copy} && {command}"

    def _describe(self, job: Job, error: str | None, seconds: float) -> Record:
        folder, start = self.folder(job), job.entry.start
        run = Run(folder)
        result = run.result
        metrics = run.metrics if (folder / "metrics.jsonl").exists() else []
        about = result or environment()
        step = self.start_step(job) if start is not None and self.can_start(job) else None
        record: Record = {
            "group": job.group,
            "name": job.name,
            "seed": job.seed,
            "recipe": job.entry.recipe,
            "overrides": job.portable(),
            "note": job.entry.note,
            "classes": list(job.entry.classes),
            "own_target": job.entry.own_target,
            "from": None if start is None else start.model_dump() | {"step": step, "again": self.is_again(job)},
            "command": self.command(job, step),
            "commit": about["commit"],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {name: about[name] for name in ("torch", "torchvision", "python")},
            "machine": about["machine"],
            "jobs": self.jobs,  # runs at a time on this machine, and whether their kernels do: what the times depend on
            "threads": self.threads,
            "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
            "settings": settings_of(job, folder),
        }
        record["measured_on"] = "held-out" if record["settings"]["data"]["hold_out"] else "test"
        if error is None:
            record["figures"] = figures_of(folder, result, metrics, job.held_out)
            record["unmeasured"] = self._unmeasured(job)
        else:
            record["error"] = error
        own = [line for line in metrics if start is None or line["epoch"] > start.epoch]
        speeds = [line["images_per_second"] for line in own if "images_per_second" in line]
        return record | {
            "seconds": result.get("seconds", round(seconds, 2)),  # of training, a parent's share included
            "compile_seconds": result.get("compile_seconds"),
            "images_per_second": round(statistics.median(speeds), 1) if speeds else None,
            "peak_memory_bytes": result.get("peak_memory_bytes"),
            "epochs": by_epoch(metrics),
        }


def step_of(folder: Path, epoch: int) -> int | None:
    """The step at the end of ``epoch`` of the run in ``folder``; None while it has not logged any."""
    newest = newest_metrics(folder)
    return epoch * round(newest["step"] / newest["epoch"]) if newest is not None else None


def newest_metrics(folder: Path) -> Record | None:
    """The last line that a training has logged; None before the first step's.

    Only the end is read: this is asked again and again of runs with thousands of lines.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        ended = file.read().split(b"\n")[:-1]  # what follows the last end of a line is still being written
    for text in reversed(ended):
        with contextlib.suppress(ValueError):  # torn, by a crash or at the beginning of what was read
            line: Record = json.loads(text)
            return line if line["epoch"] > 0 else None
    return None


def checkpoint_at(folder: Path, step: int) -> Path:
    return folder / "checkpoint" / f"step-{step:010d}.pt"


def calls_of(protocols: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Protocols and their settings; those without any are measured by one process."""
    each = [(name, settings) for name, *settings in (protocol.split() for protocol in protocols)]
    plain = ",".join(name for name, settings in each if not settings)
    return [(plain, [])] * bool(plain) + [(name, settings) for name, settings in each if settings]
