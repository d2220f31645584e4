"""Trains and measures the runs of a plan (benchmarks/cifar10.yaml), several at a time; one JSON record for each.

    python benchmarks/cifar10.py main --jobs 2 --set "data.root=/data"
    python benchmarks/cifar10.py choices-mocov2 plain paper + choices-byol plain --seeds 0,1 --until 1500

Finished runs are skipped, failed ones are recorded and tried again by the next call, interrupted ones continue.
``benchmarks/cifar10_page.py`` makes docs/results.md of the records.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from cifar10_plan import PLAN, ROOT, Job, jobs_of, read_plan

from interclr.config import load_settings
from interclr.evaluate.requested import Request
from interclr.evaluate.session import place_of
from interclr.run import checkpoint
from interclr.run.files import write_text
from interclr.run.folder import Run, environment
from interclr.types import UserError

RECORDS = ROOT / "results" / "cifar10"
NOT_TERMS = ("step", "epoch", "event", "lr", "images_per_second", "data_wait", "unreadable")
ERROR_LENGTH = 600
Record = dict[str, Any]


# One run.


class Failure(Exception):
    """Why a run has no figures."""


class Interrupted(Exception):
    """The run was asked to stop, and can be continued."""


class Runner:
    def __init__(self, work: Path, out: Path, jobs: int) -> None:
        self.work, self.out, self.jobs = work, out, jobs
        self.starts: dict[str, list[int]] = {}  # finished runs that are trained again, up to which epochs
        self.stopping = False
        self.processes: set[subprocess.Popen[str]] = set()
        self.lock = threading.Lock()

    def folder(self, job: Job, title: str | None = None) -> Path:
        return self.work / job.group / (title or job.title)

    def record(self, job: Job) -> Record | None:
        path = self.out / job.group / f"{job.title}.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def finished(self, job: Job) -> bool:
        record = self.record(job)
        return record is not None and "error" not in record

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

    def is_again(self, job: Job) -> bool:
        """Whether the parent here is not the one of the record, but trained again for its checkpoint."""
        return not Run(self.folder(job, job.parent)).finished

    def run(self, job: Job) -> Record:
        """Train, measure, record. Raises ``Interrupted`` where there is nothing to record yet."""
        began, error = time.monotonic(), None
        print(f"{job.key}: started", flush=True)
        try:
            self._train(job)
            if job.key not in self.starts:
                self._measure(job)
        except Failure as failure:
            error = str(failure)
        found = self.record(job)
        if found is not None and "error" not in found:  # trained again: the record stays as it was
            print(f"{job.key}: {error or 'trained again as far as needed'}", flush=True)
            return found
        record = self._describe(job, error, time.monotonic() - began) | {"failed_before": failures_of(found)}
        place = self.out / job.group / f"{job.title}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, as_json(record))
        print(f"{job.key}: {line_of(record)}", flush=True)
        return record

    def _train(self, job: Job) -> None:
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

        self._call(["pretrain", *words, *["--resume"] * started], log, folder, enough)
        if not enough() and not Run(folder).finished:
            raise Interrupted if self.stopping else Failure("the training was stopped from outside")

    def _measure(self, job: Job) -> None:
        folder = self.folder(job)
        log = folder.with_name(f"{folder.name}.log")
        done = place_of(Request(str(folder), held_out=job.held_out))
        left = [each for each in job.evaluate if not (done / each.split()[0] / "result.json").exists()]
        for names, settings in calls_of(left):
            self._call(["evaluate", names, str(folder), *settings, *["--held-out"] * job.held_out], log, folder)

    def _copy_start(self, job: Job, folder: Path) -> None:
        """The parent's checkpoint, and its metrics up to there, which are this run's as well."""
        source = self.start_checkpoint(job)
        (folder / "checkpoint").mkdir()
        shutil.copyfile(source, folder / "checkpoint" / source.name)
        lines = [line for line in Run(source.parent.parent).metrics if line["step"] <= self.start_step(job)]
        write_text(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def _call(self, words: list[str], log: Path, folder: Path, enough: Callable[[], bool] = lambda: False) -> None:
        """Run the command line to its end, or until there is ``enough``."""
        command = [sys.executable, "-m", "interclr.cli", *words]
        with open(log, "a") as output:
            with self.lock:
                if self.stopping:
                    raise Interrupted
                # A session of its own: Ctrl-C reaches this script, which asks its processes to stop.
                process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.PIPE, text=True, start_new_session=True
                )
                self.processes.add(process)
            errors, asked = None, False
            while errors is None:
                try:
                    errors = process.communicate(timeout=0.5)[1]
                except subprocess.TimeoutExpired:
                    if not asked and enough():
                        process.terminate()
                        asked = True
            self.processes.discard(process)
            output.write(errors)
        if process.returncode and self.stopping:
            raise Interrupted
        if process.returncode and not asked:
            text = errors.strip().replace(str(folder), "OUT").replace(f"{ROOT}/", "")
            raise Failure(text[-ERROR_LENGTH:] or f"{words[0]} ended with {process.returncode}")

    def stop(self) -> None:
        """Every training saves a checkpoint and ends."""
        with self.lock:
            self.stopping = True
            for process in self.processes:
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
        words = ["interclr", "pretrain", job.entry.recipe, *job.portable(), f"seed={job.seed}", "--no-report"]
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
            "from": None if start is None else start.model_dump() | {"step": step, "again": self.is_again(job)},
            "command": self.command(job, step),
            "commit": about["commit"],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {name: about[name] for name in ("torch", "torchvision", "python")},
            "machine": about["machine"],
            "jobs": self.jobs,  # runs at a time on this machine, and whether their kernels do: what the times depend on
            "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
            "settings": settings_of(job, folder),
        }
        record["measured_on"] = "held-out" if record["settings"]["data"]["hold_out"] else "test"
        if error is None:
            record["figures"] = figures_of(folder, result, metrics, job.held_out)
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


def failures_of(record: Record | None) -> list[Record]:
    """All that went wrong with a run so far: a try that succeeds does not wipe it out."""
    if record is None:
        return []
    latest = [{key: record[key] for key in ("date", "commit", "error")}] if "error" in record else []
    return [*record.get("failed_before", []), *latest]


def step_of(folder: Path, epoch: int) -> int | None:
    """The step at the end of ``epoch`` of the run in ``folder``; None while it has not logged any."""
    path = folder / "metrics.jsonl"
    lines = [line for line in (Run(folder).metrics if path.exists() else []) if line["epoch"] > 0]
    return epoch * round(lines[-1]["step"] / lines[-1]["epoch"]) if lines else None


def checkpoint_at(folder: Path, step: int) -> Path:
    return folder / "checkpoint" / f"step-{step:010d}.pt"


def calls_of(protocols: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Protocols and their settings; those without any are measured by one process."""
    each = [(name, settings) for name, *settings in (protocol.split() for protocol in protocols)]
    plain = ",".join(name for name, settings in each if not settings)
    return [(plain, [])] * bool(plain) + [(name, settings) for name, settings in each if settings]


def settings_of(job: Job, folder: Path) -> Record:
    """The whole tree as carried out, or as far as it was known, without this machine's paths."""
    resolved = folder / "resolved.yaml"
    if resolved.exists():
        tree: Record = yaml.safe_load(resolved.read_text())
    else:
        tree = load_settings(job.entry.recipe, [*job.overrides, f"seed={job.seed}"]).model_dump(mode="json")
    gone = {"root"} | ({"source"} if Path(tree["data"]["source"]).is_absolute() else set())
    return tree | {"data": {key: value for key, value in tree["data"].items() if key not in gone}}


def figures_of(folder: Path, result: Record, metrics: list[Record], held_out: bool) -> Record:
    """The last epoch's figures, and under ``evaluate`` those of each protocol."""
    last = [line for line in metrics if line.get("event") == "monitor"][-1]
    names = ["knn_k", "knn_temperature", "knn_pixels", "knn_before", *(name for name in last if name not in NOT_TERMS)]
    figures: Record = {name: result[name] for name in names if name in result}
    measured: Record = {}
    for path in sorted(place_of(Request(str(folder), held_out=held_out)).glob("*/result.json")):
        found = json.loads(path.read_text())
        told = {key: found[key] for key in ("preset", "selected_on", "best_stage") if key in found}
        measured[path.parent.name] = {key: short(value) for key, value in found["figures"].items()} | told
    return figures | ({"evaluate": measured} if measured else {})


def by_epoch(metrics: list[Record]) -> list[Record]:
    """For each epoch the mean of its logged loss terms, and the figures where they were measured."""
    epochs: dict[int, dict[str, list[float]]] = {}
    for line in metrics:
        row = epochs.setdefault(math.ceil(line["epoch"]), {})  # an interval counts for the epoch it ends in
        for name in line.keys() - set(NOT_TERMS):
            if math.isfinite(line[name]):
                row.setdefault(name, []).append(line[name])
    return [
        {"epoch": epoch, **{name: short(statistics.mean(row[name])) for name in sorted(row)}}
        for epoch, row in sorted(epochs.items())
        if row
    ]


def short(value: float) -> float:
    return float(f"{value:.6g}")


def as_json(record: Record) -> str:
    """Indented, but with one line for each epoch."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["epochs"])
    last = {"epochs": []}
    whole = json.dumps({key: record[key] for key in record if key not in last} | last, indent=1, ensure_ascii=False)
    return whole.removesuffix("[]\n}") + f"[\n{rows}\n ]\n}}\n"


def line_of(record: Record) -> str:
    speed = record["images_per_second"]
    tail = f"{record['seconds']:.0f} s" + (f", {speed:,.0f} images/s" if speed else "")
    if "error" in record:
        return f"FAILED after {tail}: {' '.join(record['error'].split())[-200:]}"
    knn = record["figures"].get("knn")
    return ("no labels" if knn is None else f"k-NN {knn:.2f} %") + f", {tail}"


# All of them.


def run_all(runner: Runner, jobs: list[Job], until: float | None) -> list[Job]:
    """``runner.jobs`` at a time, each as soon as its parent is through; returns those left out."""
    began = time.monotonic()
    waiting, running = list(jobs), dict[Future[Record], Job]()
    with ThreadPoolExecutor(runner.jobs) as pool:
        try:
            while waiting or running:
                left = None if until is None or not waiting else until - (time.monotonic() - began)
                in_time = left is None or left > 0
                busy = {job.key for job in (*waiting, *running.values())}
                ready = [job for job in waiting if in_time and job.parent_key not in busy]
                for job in ready[: runner.jobs - len(running)]:
                    waiting.remove(job)
                    running[pool.submit(runner.run, job)] = job
                if not running:
                    break
                for future in wait(running, left if in_time else None, FIRST_COMPLETED).done:
                    del running[future]
                    future.result()
        except BaseException:
            runner.stop()
            raise
    return waiting


def to_do(runner: Runner, jobs: list[Job]) -> list[Job]:
    """Those without a finished record, and their parents where the checkpoint to go on from is gone."""
    wanted = {job.key for job in jobs if not runner.finished(job)}
    runner.starts = {}
    for job in reversed(jobs):  # children first: a parent's own parent may be needed again as well
        if job.key not in wanted and job.key not in runner.starts:
            record = runner.record(job)
            assert record is not None
            same = record["command"] == runner.command(job, (record["from"] or {}).get("step"))
            print(f"{job.key}: finished before" + ("" if same else ", with another command: remove it to run again"))
        elif job.parent_key is not None and job.parent_key not in wanted and not runner.can_start(job):
            assert job.entry.start is not None
            print(f"{job.parent_key}: trained again, as {job.key} needs its checkpoint")
            runner.starts.setdefault(job.parent_key, []).append(job.entry.start.epoch)
    return [job for job in jobs if job.key in wanted or job.key in runner.starts]


def table(runner: Runner, jobs: list[Job]) -> str:
    width = max(len(job.key) for job in jobs)
    lines = []
    for job in jobs:
        record = runner.record(job)
        lines.append(f"{job.key:{width}}  {'not run' if record is None else line_of(record)}")
    return "\n".join(lines)


def split_at_plus(words: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "+":
            parts.append([])
        else:
            parts[-1].append(word)
    if not all(parts):
        raise UserError("a + stands between two groups")
    return parts


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train and measure the runs of a group of the plan, or of several.")
    parser.add_argument("group")
    parser.add_argument("runs", nargs="*", help="by default all of the group; after a + another group and its runs")
    parser.add_argument("--seeds", default="", help="such as 0,1; by default the group's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "cifar10", help="where the run folders lie")
    parser.add_argument("--out", type=Path, default=RECORDS, help="where the records go")
    parser.add_argument("--set", default="", help='overrides of every run, "key=value …"')
    parser.add_argument("--until", type=float, help="start nothing new after so many seconds")
    parser.add_argument("--plan", type=Path, default=PLAN)
    given = parser.parse_intermixed_args(words)
    try:
        if given.jobs < 1:
            raise UserError(f"--jobs {given.jobs}: at least 1")
        if not re.fullmatch(r"(\d+(,\d+)*)?", given.seeds):
            raise UserError(f"--seeds {given.seeds}: numbers with commas, such as 0,1")
        seeds = [int(seed) for seed in given.seeds.split(",") if seed]
        plan, extra = read_plan(given.plan), shlex.split(given.set)
        jobs: list[Job] = []
        for group, *names in split_at_plus([given.group, *given.runs]):
            jobs += [job for job in jobs_of(plan, group, names, seeds, extra) if job not in jobs]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    runner = Runner(given.work.absolute(), given.out, given.jobs)
    try:
        left = run_all(runner, to_do(runner, jobs), given.until)
    except KeyboardInterrupt:
        print("interrupted; the same call continues", file=sys.stderr)
        return 130
    if left:
        print(f"left out, as {given.until:.0f} s are over: {', '.join(job.key for job in left)}")
    print(table(runner, jobs))
    return int(any("error" in (runner.record(job) or {}) for job in jobs))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
