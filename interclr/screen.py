"""What a person sees: a live bar on a terminal, a line now and then elsewhere, nothing on other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from interclr import dist
from interclr.types import printable

LINE_EVERY = 10.0  # seconds between lines where there is no terminal


class Screen:
    """Every word a run says goes through here."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self.silent = quiet or not dist.is_main()
        self.said: set[str] = set()

    def say_once(self, text: str) -> None:
        """What is true of several steps of one command, and would be said by each."""
        if text not in self.said:
            self.said.add(text)
            self.say(text)

    def say(self, text: str) -> None:
        if not self.silent:
            self._print(printable(text), markup=False)

    def warn(self, text: str) -> None:
        if not self.silent:
            self._print(f"! {printable(text)}", style="yellow", markup=False)

    def table(self, title: str, rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> None:
        if self.silent:
            return
        table = Table(title=Text(title), title_justify="left", show_edge=False, pad_edge=False)
        for name in header:
            table.add_column(Text(name))
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))  # as it is: a file may be called [/bold].jpg
        self._print(table)

    def _print(self, what: Any, **how: Any) -> None:
        """Where the terminal has gone, with its ssh session, a run still has a checkpoint to write: it falls silent."""
        try:
            self.console.print(what, **how)
        except OSError:
            self.silent = True

    @contextmanager
    def _live(self, progress: Progress, what: str, **task: Any) -> Iterator[TaskID | None]:
        """One task on a live bar; None where there is nothing left to draw it on."""
        shown: TaskID | None = None
        try:
            progress.start()
            shown = progress.add_task(what, **task)
        except OSError:
            self.silent = True
        try:
            yield shown
        finally:
            with suppress(OSError):
                progress.stop()

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A plain bar for anything that takes over two seconds: call with (done, total)."""
        if self.silent:
            yield lambda done, total: None
            return
        if not self.console.is_terminal:
            started = last = time.monotonic()

            def line(done: int, total: int) -> None:
                nonlocal last
                if time.monotonic() - last > LINE_EVERY:
                    last = time.monotonic()
                    self.say(f"{what}: {done}/{total}, {last - started:.0f} s")

            yield line
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        progress = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)
        with self._live(progress, what, total=None) as task:
            yield lambda done, total: None if task is None else progress.update(task, completed=done, total=total)

    @contextmanager
    def training(self, total: int, first: int) -> Iterator[TrainingBar]:
        """The live bar of a run: loss, learning rate, images a second, data wait, time left."""
        if self.silent or not self.console.is_terminal:
            yield TrainingBar(self, total, first)
            return
        columns = (
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        progress = Progress(*columns, console=self.console, expand=True, refresh_per_second=4)
        with self._live(progress, "", total=total, completed=first, epoch="-", figures="") as task:
            yield TrainingBar(self, total, first, None if task is None else progress, task)


def duration(seconds: float) -> str:
    """Two figures a person can plan by."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


class TrainingBar:
    def __init__(self, screen: Screen, total: int, first: int, progress: Progress | None = None, task: Any = None):
        self.screen, self.total, self.first, self.progress, self.task = screen, total, first, progress, task
        self.started = self.last = time.monotonic()

    def advance(self, step: int, epoch: str) -> None:
        if self.progress is not None:
            self.progress.update(self.task, completed=step, epoch=epoch)

    def show(self, epoch: str, record: dict[str, Any]) -> None:
        figures = (
            f"loss {record['loss']:.3f}  lr {record['lr']:.2e}  {record['images_per_second']:,.0f} img/s  "
            f"wait {100 * record['data_wait']:.0f} %"
        )
        if "labels_changed" in record:
            figures += f"  relabelled {100 * record['labels_changed']:.0f} %"
        if self.progress is not None:
            self.progress.update(self.task, figures=figures)
        elif time.monotonic() - self.last > LINE_EVERY:
            self.last = time.monotonic()
            done = record["step"] - self.first
            left = (self.last - self.started) / max(done, 1) * (self.total - record["step"])
            self.screen.say(f"epoch {epoch}  step {record['step']}/{self.total}  {figures}  left {left:.0f} s")
