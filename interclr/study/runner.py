"""Carry a study out: say what will run and for how long, run it, keep every finished cell, go on after a failure."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from interclr.config import dump
from interclr.engine import pretrain
from interclr.engine.dataset import open_training_source
from interclr.engine.interrupt import term_as_interrupt
from interclr.run.files import write_text
from interclr.run.folder import Run
from interclr.screen import Screen, TrainingBar, duration
from interclr.study.figures import draw
from interclr.study.plan import Cell, default_recipe, plan
from interclr.study.schema import Study, open_studies
from interclr.study.tables import gather, markdown, write_study
from interclr.study.worker import CELL, ERROR, INTERRUPTED, record_failure, state_of, train_cell
from interclr.types import UserError

PROBE_STEPS = 12
POLL = 0.05  # seconds
ON_SCREEN = ("knn", "rank_me", "milliseconds_per_step", "seconds_per_epoch", "memory_megabytes")  # table.md has all


def run_study(
    name: str,
    out: str | Path,
    *,
    recipe: str | None = None,
    epochs: int | None = None,
    seeds: Sequence[int] | None = None,
    data: str | None = None,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    devices: Sequence[str] = (),
    probe: bool = True,
    screen: Screen | None = None,
) -> dict[str, dict[str, Any]]:
    """Run a built-in study, ``all`` of them, or a YAML file; returns what ``study.json`` holds, by study.

    Each cell is a run folder ``out/cells/HASH``, named by its settings: a finished one is never trained again, also
    when another study has the same cell; an unfinished one is continued; a failed one is recorded and tried again by
    the next call. ``jobs`` processes run at once, spread over ``devices``. Ctrl-C or TERM stops after the current
    step, writes what there is and raises ``KeyboardInterrupt``; the same call finishes the study.
    """
    screen, out = screen or Screen(), Path(out)
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: at least 1")
    studies = open_studies(name)
    planned = {
        each: plan(study, recipe, epochs, seeds, data, _on_device(overrides, devices))
        for each, study in studies.items()
    }
    work = Work(out / "cells", screen, max(jobs, len(devices)), list(devices))
    for each, study in studies.items():
        work.add(each, study, planned[each])
    work.check_data()
    try:
        work.home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror or error}; choose another --out") from error
    for each, study in studies.items():
        _warn_where_pointless(each, study, planned[each], screen)
    work.introduce(", ".join(study.title for study in studies.values()), probe)
    try:
        work.run()
    except KeyboardInterrupt:
        screen.say("interrupted; what is finished is kept: the same command goes on from here")
        raise
    finally:
        documents: dict[str, dict[str, Any]] = {}
        for each, study in studies.items():
            place = out if len(studies) == 1 else out / each
            documents[each] = gather(each, study, planned[each], work.folder, recipe or default_recipe(study, data))
            write_study(place, documents[each])
            draw(place, study, documents[each])
        if len(studies) > 1:
            write_text(out / "table.md", "\n".join(markdown(document) for document in documents.values()))
    _tell(documents, out, screen)
    if all(state_of(work.folder(cell)) != "finished" for cell in work.cells.values()):
        raise UserError(f"no cell of the study could be trained; the reasons are in {out / 'table.md'}")
    return documents


def _on_device(overrides: Sequence[str], devices: Sequence[str]) -> list[str]:
    """The first device stands for all while planning: cells are the same on each of a kind."""
    if len({device.partition(":")[0] for device in devices}) > 1:
        raise UserError(f"--devices {','.join(devices)}: cells that are compared need devices of one kind")
    return [*overrides, *(f"engine.device={device}" for device in devices[:1])]


def _warn_where_pointless(name: str, study: Study, cells: list[Cell], screen: Screen) -> None:
    method = cells[0].settings.method
    if study.needs_negatives and not hasattr(method, "temperature"):  # what has no negatives needs no temperature
        screen.warn(f"{name}: {method.name} has no negatives and no margin, so its cells compute the same")


def _tell(documents: dict[str, dict[str, Any]], out: Path, screen: Screen) -> None:
    for name, document in documents.items():
        table = document["table"]
        shown = [0, *(1 + table["columns"].index(each) for each in ON_SCREEN if each in table["columns"])]
        shown += range(1 + len(table["columns"]), len(table["header"]))
        header, *rows = (tuple(row[place] for place in shown) for row in (table["header"], *table["rows"]))
        screen.table(f"{document['title']} ({name})", rows, header)
        for note in table["notes"]:
            screen.say(note)
    screen.say(f"tables, figures and raw results are in {out}")


@dataclass
class Work:
    """The cells that are wanted, each once."""

    home: Path
    screen: Screen
    jobs: int
    devices: list[str]
    cells: dict[str, Cell] = field(default_factory=dict)  # by key
    groups: dict[tuple[str, str], list[Cell]] = field(default_factory=dict)  # seeds by study and cell
    own_process: set[str] = field(default_factory=set)
    guess: float | None = None  # seconds a cell takes, from the probe

    def add(self, name: str, study: Study, cells: list[Cell]) -> None:
        for cell in cells:
            self.cells.setdefault(cell.key, cell)
            self.groups.setdefault((name, cell.name), []).append(cell)
        if study.own_process:
            self.own_process |= {cell.key for cell in cells}

    def folder(self, cell: Cell) -> Path:
        return self.home / cell.key

    def pending(self) -> list[Cell]:
        return [cell for cell in self.cells.values() if state_of(self.folder(cell)) != "finished"]

    # What will run, and for how long.

    def introduce(self, title: str, probe: bool) -> None:
        waiting = self.pending()
        if probe and waiting and len(waiting) == len(self.cells):
            self.guess = self._probe(waiting[0])
        rows = []
        for (study, name), cells in self.groups.items():
            states = [state_of(self.folder(cell)) for cell in cells]
            count = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
            seconds = self._estimate(cells[0])
            about = "" if seconds is None else f"about {duration(seconds)} a seed"
            rows.append((study, name, ", ".join(str(cell.seed) for cell in cells), count, about))
        self.screen.table(title, rows, ("study", "cell", "seeds", "state", "time"))
        self.screen.say(
            f"{len(self.cells) - len(waiting)} of {len(self.cells)} runs are finished; "
            f"{len(waiting)} to go, {self.jobs} at a time{self._left(waiting)}"
        )

    def check_data(self) -> None:
        """Open what is still to be trained on, each source once, before anything is made or said: one error is enough.

        Cells are compared, so those that are finished and those still to train have to see the same images.
        """
        waiting = {str(cell.settings.data.source): cell for cell in self.pending()}
        for name, cell in waiting.items():
            source = open_training_source(cell.settings.data)
            others = [other for other in self.cells.values() if str(other.settings.data.source) == name]
            seen = {Run(self.folder(other)).result.get("fingerprint") for other in others} - {None}
            if seen and seen != {source.fingerprint()}:
                raise UserError(
                    f"finished cells in {self.home} were trained on other images than {name} has now: choose another "
                    "--out, or restore the images"
                )

    def _probe(self, cell: Cell) -> float | None:
        """Time the start and some steps of ``cell`` in a folder that is thrown away."""
        place, watch = self.home / f".probe-{os.getpid()}", Stopwatch()
        try:
            pretrain(cell.settings, place, screen=watch, stop_after=PROBE_STEPS)
        except Exception as error:  # whatever it is, the cell itself will say
            self.screen.warn(f"no estimate, the first cell fails: {' '.join(str(error).split())[:200]}")
            return None
        finally:
            shutil.rmtree(place, ignore_errors=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the cells need it
        if len(watch.marks) < min(PROBE_STEPS, watch.total):
            raise KeyboardInterrupt  # a run takes it as a wish to stop and returns
        return watch.estimate()

    def _took(self, cell: Cell) -> float | None:
        seconds = Run(self.folder(cell)).result.get("seconds")
        return None if seconds is None else float(seconds)

    def _estimate(self, cell: Cell) -> float | None:
        """From finished seeds of the same cell, else from all finished cells, else from the probe."""
        same = next((group for group in self.groups.values() if cell in group), [cell])
        for others in (same, list(self.cells.values())):
            finished = [other for other in others if state_of(self.folder(other)) == "finished"]
            times = [seconds for other in finished if (seconds := self._took(other)) is not None]
            if times:
                return mean(times)
        return self.guess

    def _left(self, waiting: list[Cell]) -> str:
        each = [self._estimate(cell) for cell in waiting]
        known = [seconds for seconds in each if seconds is not None]
        if not known:
            return ""
        at_once = max(1, min(self.jobs, len(waiting)))
        return f", about {duration(max(sum(known) / at_once, max(known)))} left"

    # Running.

    def run(self) -> None:
        alone = [cell for cell in self.pending() if cell.key in self.own_process]
        together = [cell for cell in self.pending() if cell.key not in self.own_process]
        with term_as_interrupt():
            if self.jobs == 1:
                self._in_processes(alone, 1)
                self._here(together)
            else:
                self._in_processes(alone, 1)
                self._in_processes(together, self.jobs)

    def _here(self, cells: list[Cell]) -> None:
        for number, cell in enumerate(cells):
            self._prepare(cell, self.devices[0] if self.devices else None)
            self.screen.say(f"[{number + 1}/{len(cells)}] {cell.name}, seed {cell.seed}{self._left(cells[number:])}")
            try:
                if not train_cell(cell.settings, self.folder(cell), CellScreen(self.screen)):
                    raise KeyboardInterrupt
            except Exception as error:  # recorded by train_cell; the rest goes on
                self._failed(cell, error)
            else:
                self._finished(cell)

    def _in_processes(self, cells: list[Cell], jobs: int) -> None:
        """One process a cell: one that is killed, or spoils its GPU, takes no other with it."""
        waiting, running = list(cells), dict[subprocess.Popen[bytes], tuple[Cell, str | None]]()
        free: list[str | None] = [self.devices[i % len(self.devices)] if self.devices else None for i in range(jobs)]
        try:
            while waiting or running:
                while waiting and free:
                    cell, device = waiting.pop(0), free.pop(0)
                    running[self._start(cell, device, jobs)] = (cell, device)
                time.sleep(POLL)
                for process in [process for process in running if process.poll() is not None]:
                    cell, device = running.pop(process)
                    free.append(device)
                    self._ended(cell, process.returncode)
        finally:
            for process in running:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)  # each saves a checkpoint and ends
            for process in running:
                process.wait()

    def _start(self, cell: Cell, device: str | None, jobs: int) -> subprocess.Popen[bytes]:
        self._prepare(cell, device)
        self.screen.say(f"starting {cell.name}, seed {cell.seed}" + (f" on {device}" if device else ""))
        environment = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // jobs))} | os.environ
        command = [sys.executable, "-m", "interclr.study.worker", str(self.folder(cell))]
        with open(self.folder(cell) / "log.txt", "ab") as log:
            # A session of its own: Ctrl-C reaches the study, which asks its processes to stop.
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def _ended(self, cell: Cell, code: int) -> None:
        folder = self.folder(cell)
        if code == 0 and state_of(folder) == "finished":
            self._finished(cell)
        elif code == INTERRUPTED:
            raise KeyboardInterrupt
        else:
            last = (folder / "log.txt").read_text(errors="replace").strip().splitlines()[-1:]
            text = f"the process ended with {code}: {''.join(last)}"
            if not (folder / ERROR).exists():
                record_failure(folder, text, text)
            self._failed(cell, text)

    def _prepare(self, cell: Cell, device: str | None) -> None:
        settings = cell.settings
        if device is not None:
            settings = settings.model_copy(update={"engine": settings.engine.model_copy(update={"device": device})})
        self.folder(cell).mkdir(parents=True, exist_ok=True)
        write_text(self.folder(cell) / CELL, dump(settings))

    def _finished(self, cell: Cell) -> None:
        result = Run(self.folder(cell)).result
        accuracy = f"k-NN {result['knn']:.1f} %, " if "knn" in result else ""
        self.screen.say(
            f"{cell.name}, seed {cell.seed}: {accuracy}RankMe {result['rank_me']:.1f}, {duration(result['seconds'])}"
        )

    def _failed(self, cell: Cell, error: object) -> None:
        self.screen.warn(
            f"{cell.name}, seed {cell.seed} failed, the others go on: {' '.join(str(error).split())[:300]}"
        )


class CellScreen(Screen):
    """Bars and warnings of a cell, without the words of a run that stands alone."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen.console, screen.silent)

    def say(self, text: str) -> None:
        pass

    def table(self, title: str, rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> None:
        pass


class Stopwatch(Screen):
    """A silent screen that notes when each step ended."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.created, self.total = time.monotonic(), 0
        self.marks: list[float] = []

    @contextmanager
    def training(self, total: int, first: int) -> Iterator[TrainingBar]:
        self.total = total
        yield _Marks(self, total, first)

    def estimate(self) -> float | None:
        """Time until the first step's end, and the mean step for the rest."""
        if not self.marks:
            return None
        step = (self.marks[-1] - self.marks[0]) / max(len(self.marks) - 1, 1)
        return self.marks[0] - self.created + step * (self.total - 1)


class _Marks(TrainingBar):
    def advance(self, step: int, epoch: str) -> None:
        assert isinstance(self.screen, Stopwatch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.screen.marks.append(time.monotonic())
