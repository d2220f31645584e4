"""One cell in a process of its own: ``python -m interclr.study.worker FOLDER`` trains ``FOLDER/cell.yaml``."""

from __future__ import annotations

import gc
import json
import resource
import sys
import traceback
from pathlib import Path

import torch

from interclr.config import Settings, load_settings
from interclr.engine import pretrain
from interclr.run import checkpoint
from interclr.run.files import write_text
from interclr.run.folder import Run
from interclr.screen import Screen
from interclr.types import UserError

CELL, ERROR, PROCESS = "cell.yaml", "error.json", "process.json"
INTERRUPTED = 130


def train_cell(settings: Settings, folder: Path, screen: Screen) -> bool:
    """Start or continue the run in ``folder``; False where it was interrupted. A failure is recorded and raised."""
    (folder / ERROR).unlink(missing_ok=True)
    if torch.cuda.is_available():
        gc.collect()  # what an earlier cell of this process still holds is not this one's
        torch.cuda.reset_peak_memory_stats()
    try:
        resume = bool(checkpoint.find(folder / "checkpoint"))
        return pretrain(settings, folder, resume=resume, screen=screen).finished
    except Exception as error:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        record_failure(folder, text, traceback.format_exc())
        raise


def record_failure(folder: Path, error: str, details: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / ERROR, json.dumps({"error": error, "details": details}, indent=1) + "\n")


def state_of(folder: Path) -> str:
    """finished, failed, started or new."""
    if (folder / "result.json").exists() and Run(folder).finished:
        return "finished"
    if (folder / ERROR).exists():
        return "failed"
    return "started" if checkpoint.find(folder / "checkpoint") else "new"


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        finished = train_cell(load_settings(str(folder / CELL)), folder, Screen())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # Only a process that trained the whole cell knows what the cell needed.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    write_text(folder / PROCESS, json.dumps({"peak_resident_bytes": peak}) + "\n")
    raise SystemExit(0 if finished else INTERRUPTED)


if __name__ == "__main__":
    main()
