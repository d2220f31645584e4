"""``interclr.pretrain``: train, and leave the page that every finished run ends with."""

from __future__ import annotations

from pathlib import Path

from interclr import dist
from interclr.config import Settings
from interclr.engine import pretrain as train
from interclr.engine.build import choose_device
from interclr.report.write import report as write_report
from interclr.run.folder import Run
from interclr.screen import Screen
from interclr.types import UserError


def pretrain(
    settings: Settings | str | Path,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    screen: Screen | None = None,
    stop_after: int | None = None,
    report: bool = True,
) -> Run:
    """Train by ``settings``, or a recipe by its name or file, into folder ``out``: by default a new one in ``runs``.

    ``stop_after`` ends early, resumable, after so many steps. A finished run ends with ``report.html``, unless
    ``report`` is False.
    """
    run = train(settings, out, resume=resume, screen=screen, stop_after=stop_after)
    if report and dist.is_main():
        report_if_finished(run, screen or Screen())
    return run


def report_if_finished(run: Run, screen: Screen) -> None:
    """A page that cannot be written is a warning: the run is what matters, and it is safe."""
    if not run.finished:
        return
    try:
        write_report(run.folder, screen=screen, device=choose_device(run.settings.engine.device))
    except UserError as error:
        screen.warn(f"no report: {error}")
