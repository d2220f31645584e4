"""Trains and measures the runs of a plan (benchmarks/cifar10.yaml), several at a time; one JSON record for each.

    python benchmarks/cifar10.py main --jobs 2 --set "data.root=/data"
    python benchmarks/cifar10.py choices-mocov2 plain paper + choices-byol plain@0 plain@1 --until 1500
    benchmarks/cifar10_gpu.sh 1500 choices-byol          (several on one GPU under MPS, as most records were made;
                                                          cifar10_detached.sh where commands are of limited length)

Finished runs are skipped, failed ones are recorded and tried again by the next call, interrupted ones continue. A run
has a record as soon as it is trained, which is completed when it is measured, and before that one of a run that was cut
off, with what it has measured so far: a machine may go away at any moment. A run that continues another starts when
the other's checkpoint is there: what is asked for first is finished first, also where time runs out.
``benchmarks/cifar10_page.py`` makes the pages of the records.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from types import FrameType

from cifar10_plan import PLAN, RECORDS, ROOT, Job, jobs_of, read_plan
from cifar10_record import line_of
from cifar10_runner import Runner

from interclr.types import UserError

MEASURED_AT_ONCE = 3
LOOK_EVERY = 1.0  # seconds: whether a parent has got far enough, whether the time is over


def run_all(runner: Runner, jobs: list[Job], until: float | None) -> list[Job]:
    """``runner.jobs`` trainings at a time, each as soon as its parent's checkpoint is there; returns those left out.

    What is trained is measured beside the trainings, a few at a time: SVMs keep a GPU idle for a minute. Where only one
    is trained at a time, so that it has the machine for itself, it is measured before the next.
    """
    began = time.monotonic()
    waiting, running, measuring = list(jobs), dict[Future[bool], Job](), set[Future[None]]()
    with ThreadPoolExecutor(runner.jobs) as trainings, ThreadPoolExecutor(MEASURED_AT_ONCE) as protocols:
        try:
            while waiting or running or measuring:
                in_time = until is None or time.monotonic() - began < until
                behind, ahead = {job.key for job in waiting}, {job.key: job for job in running.values()}
                ready = (
                    job
                    for job in waiting
                    if job.parent_key not in behind
                    and (job.parent_key not in ahead or runner.can_start_now(job, ahead[job.parent_key]))
                )
                taken = len(running) + len(measuring) * (runner.jobs == 1)
                for job in list(islice(ready, max(0, runner.jobs - taken) if in_time else 0)):
                    waiting.remove(job)
                    running[trainings.submit(runner.train, job)] = job
                if not running and not measuring:
                    break
                done = wait([*running, *measuring], LOOK_EVERY, FIRST_COMPLETED).done
                for trained in [future for future in running if future in done]:
                    job = running.pop(trained)
                    if trained.result():
                        measuring.add(protocols.submit(runner.measure, job))
                for measured in [future for future in measuring if future in done]:
                    measuring.discard(measured)
                    measured.result()
        except BaseException:
            runner.stop()
            raise
    return waiting


def to_do(runner: Runner, jobs: list[Job]) -> list[Job]:
    """Those without a finished record, and their parents where the checkpoint to go on from is gone."""
    wanted = {job.key for job in jobs if not runner.finished(job)}
    runner.starts = {}
    needed: dict[str, list[str]] = {}
    for job in reversed(jobs):  # children first: a parent's own parent may be needed again as well
        if job.key not in wanted and job.key not in runner.starts:
            record = runner.record(job)
            assert record is not None
            same = record["command"] == runner.command(job, (record["from"] or {}).get("step"))
            print(f"{job.key}: finished before" + ("" if same else ", with another command: remove it to run again"))
        elif job.parent_key is not None and job.parent_key not in wanted and not runner.can_start(job):
            assert job.entry.start is not None
            runner.starts.setdefault(job.parent_key, []).append(job.entry.start.epoch)
            needed.setdefault(job.parent_key, []).append(job.title)
    for parent, children in needed.items():
        print(f"{parent}: trained again, for its checkpoint ({', '.join(reversed(children))})")
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


def by_seed(names: list[str]) -> list[tuple[list[str], list[int]]]:
    """Runs and their seeds: NAME@1 is one run with one seed, in its place; others are taken together, with all."""
    parts: list[tuple[list[str], list[int]]] = []
    for name, at, seed in (name.partition("@") for name in names):
        if at and not seed.isdecimal():
            raise UserError(f"{name}@{seed}: a number stands behind the @, the seed of this run")
        if seed or not parts or parts[-1][1]:
            parts.append(([], [int(seed)] if seed else []))
        parts[-1][0].append(name)
    return parts or [([], [])]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train and measure the runs of a group of the plan, or of several.")
    parser.add_argument("group")
    parser.add_argument(
        "runs", nargs="*", help="by default all of the group, NAME@1 with seed 1 only; after a + another group"
    )
    parser.add_argument("--seeds", default="", help="such as 0,1; by default the group's")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
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
            for runs, own in by_seed(names):
                jobs += [job for job in jobs_of(plan, group, runs, own or seeds, extra) if job not in jobs]
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
    records = [runner.record(job) or {} for job in jobs]
    return int(any("error" in record or record.get("unmeasured") for record in records))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
