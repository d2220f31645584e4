"""``pretrain``: open the data, settle the settings, train, measure, leave a run folder that can always be continued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from interclr import dist
from interclr.config import Settings, load_settings
from interclr.data.builtin import data_root, images_of_a_run, in_full
from interclr.data.canvas import Canvas
from interclr.data.source import Source
from interclr.data.stream_plan import default_workers
from interclr.engine.build import build_backbone, choose_device, set_determinism
from interclr.engine.dataset import Facts, TrainingData, median_side, open_training_source, prepare
from interclr.engine.metrics import check_loggers
from interclr.engine.mode import engine_mode
from interclr.engine.settle import settle
from interclr.engine.training import Training
from interclr.knn import auto_k
from interclr.run.folder import Run, left_as_found, new_folder, prepare_folder, sole_writer
from interclr.screen import Screen
from interclr.types import UserError


def pretrain(
    settings: Settings | str | Path,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    screen: Screen | None = None,
    stop_after: int | None = None,
) -> Run:
    """Train by ``settings``, or a recipe by its name or file, into folder ``out``: by default a new one in ``runs``.

    ``stop_after`` ends early, resumable, after so many steps. The caller's random numbers are left as they were.
    """
    name = settings.method.name if isinstance(settings, Settings) else str(settings)
    if isinstance(settings, str | Path):
        settings = load_settings(str(settings))
    if not isinstance(settings, Settings):
        raise UserError(
            f"pretrain takes a recipe's name or file, or interclr.load_settings(…), not {type(settings).__name__}"
        )
    folder = new_folder(name) if out is None else Path(out)
    device = choose_device(settings.engine.device)
    dist.start(device)
    screen = screen or Screen()
    with _as_before(device), left_as_found(folder) if dist.is_main() else nullcontext():
        prepare_folder(folder, resume)
        with sole_writer(folder) if dist.is_main() else nullcontext():
            prepare_folder(folder, resume)  # another run may have ended there while this one waited
            return _train(settings, folder, resume, screen, stop_after, device)


@contextmanager
def _as_before(device: torch.device) -> Iterator[None]:
    """Random numbers and cuDNN's choices of this process are as they were when a training began."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            cudnn.deterministic, cudnn.benchmark = before


def _train(
    settings: Settings, folder: Path, resume: bool, screen: Screen, stop_after: int | None, device: torch.device
) -> Run:
    set_determinism(settings.engine.deterministic)
    check_loggers(settings.engine.loggers)
    with images_of_a_run() if resume else nullcontext():
        source = open_training_source(settings.data)
    facts = Facts(len(source) - settings.data.hold_out, median_side(source), device.type)
    settings, chosen = settle(settings, facts)
    build_backbone(settings)  # what it refuses is said before all images are read
    if settings.data.max_side != "auto" and hasattr(source, "max_side"):
        source = open_training_source(settings.data)
    _introduce(screen, settings, facts, source, chosen, device)
    data = prepare(source, settings.data, device, screen)
    settings = _as_carried_out(settings, data, device, screen)
    return Training(settings, folder, data, device, screen, resume).run(stop_after)


def _as_carried_out(settings: Settings, data: TrainingData, device: torch.device, screen: Screen) -> Settings:
    """What only the open data and the machine could tell, so that ``resolved.yaml`` leaves nothing to guess."""
    resident = isinstance(data.images, Canvas)
    workers = default_workers() if settings.data.workers == "auto" else settings.data.workers
    # Absolute, so that the run can be continued and looked at from another working directory.
    source = in_full(settings.data.source)
    root = settings.data.root.absolute() if settings.data.root is not None else data_root().absolute()
    where = {"source": source, "root": root, "resident": resident, "workers": workers}
    known = len(data.source) if data.bank_rows is None else len(data.bank_rows)
    k = auto_k(known) if settings.monitor.k == "auto" else settings.monitor.k  # as evaluate has it of the same images
    mode, why = engine_mode(settings, len(data.source), device)
    if settings.engine.mode == "auto":
        screen.say(f"engine.mode={mode}: {why}")
    return settings.model_copy(
        update={
            "data": settings.data.model_copy(update=where),
            "engine": settings.engine.model_copy(update={"device": device.type, "mode": mode}),
            "monitor": settings.monitor.model_copy(update={"k": k}),
        }
    )


def _introduce(
    screen: Screen, settings: Settings, facts: Facts, source: Source, chosen: list[tuple[str, str, str]], device: Any
) -> None:
    branch = "" if settings.branch is None else " with InterCLR"
    screen.say(f"{settings.method.name}{branch} on {source.name}: {facts.images:,} images, device {device}")
    if source.not_read:
        kinds = ", ".join(f"{many:,} .{kind}" for kind, many in sorted(source.not_read.items()))
        screen.warn(f"pictures that are not read, beside these: {kinds}; convert them to JPEG first")
    batch, world = settings.data.batch, dist.world()
    parts = f" ({world} processes of {batch // world})" if isinstance(batch, int) and world > 1 else ""
    shown = {"batch": f"{batch}{parts}", "queue": getattr(settings.method, "queue", None)}
    said = ", ".join(f"{what} {value}" for what, value in shown.items() if value is not None)
    screen.say(f"{settings.schedule.epochs} epochs, {said}")
    if chosen:
        screen.table("chosen for this data and machine", chosen, ("setting", "value", "because"))
