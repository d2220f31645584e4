"""Checkpoints that survive: written beside, synced, renamed; the last few kept; loaded without running code."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from interclr.run.files import load_state, save_state
from interclr.types import UserError

State = dict[str, Any]
PATTERN = re.compile(r"step-(\d{10})\.pt")


def save(folder: Path, step: int, state: State, keep: int) -> Path:
    """Write atomically: a crash at any moment leaves the earlier checkpoints as they were."""
    target = folder / f"step-{step:010d}.pt"
    with contextlib.suppress(OSError):
        for left_over in folder.glob(".step-*.tmp"):  # of a process that was killed while it wrote
            left_over.unlink(missing_ok=True)
    save_state(target, state, "earlier checkpoints are untouched; make room or permission, then continue with --resume")
    with contextlib.suppress(OSError):  # not every file system lets a folder be synced
        _sync_folder(folder)
    # Later ones are what was passed over when resuming: damaged, and not to be kept in place of this one.
    for old in [path for path in find(folder) if path.name <= target.name][:-keep]:
        with contextlib.suppress(OSError):
            old.unlink(missing_ok=True)
    return target


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*.pt") if PATTERN.fullmatch(path.name))


def run_of(path: Path) -> Path | None:
    """The run folder that ``path`` is, or that this checkpoint lies in; None for any other file."""
    if path.is_dir():
        return path
    folder = path.parent.parent
    return folder if PATTERN.fullmatch(path.name) and (folder / "resolved.yaml").exists() else None


def load(path: Path, device: torch.device | str = "cpu") -> State:
    """Tensors and plain values only: a checkpoint never runs code."""
    state = load_state(path, device)
    if not isinstance(state, dict) or not {"format", "step"} <= state.keys():
        raise ValueError("this is not a checkpoint of interclr")
    return state


def backbone_of(state: State) -> State:
    """The weights of the backbone in a checkpoint."""
    prefix = "intra.encoder.backbone."
    return {key.removeprefix(prefix): value for key, value in state["learner"].items() if key.startswith(prefix)}


def reason(error: Exception) -> str:
    """Why a file could not be loaded, in a line, without torch's advice to run what is in it."""
    text = " ".join(str(error).split())
    return "it holds more than tensors and is not loaded" if "weights_only" in text else text[:200]


def load_latest(folder: Path, parts: Collection[str] = ()) -> tuple[State, Path, list[str]] | None:
    """The newest checkpoint that can be read and has all ``parts``, with a line on each newer one that does not."""
    complaints: list[str] = []
    for path in reversed(find(folder)):
        try:
            state = load(path)
            if missing := [part for part in parts if part not in state]:
                raise ValueError(f"it lacks {', '.join(missing)}")
            return state, path, complaints
        except Exception as error:  # a file may be damaged in any way, and torch's errors are as various
            complaints.append(f"{path.name} cannot be read and is passed over: {reason(error)}")
    if complaints:
        raise UserError(f"no readable checkpoint in {folder}: " + "; ".join(complaints))
    return None
