"""Whether compiling and capturing pay back: decided once the data are open, as it depends on how many there are."""

from __future__ import annotations

import torch

from interclr import kernels
from interclr.config import Settings
from interclr.engine.capture import can_capture
from interclr.types import UserError

# A ResNet takes one to two minutes to compile, views and kernels a quarter of one.
STEPS_TO_PAY_BACK = {"compile": 5_000, "graph": 1_000}


def engine_mode(settings: Settings, images: int, device: torch.device) -> tuple[str, str]:
    """``engine.mode`` and why: for ``auto`` what suits the run, else what was asked for if it is possible."""
    engine, wanted = settings.engine, settings.engine.mode
    possible = can_capture(device, engine.precision, engine.accumulate)
    if wanted == "graph" and not possible:
        raise UserError(
            "engine.mode=graph captures a step that never asks the host, on one GPU: it needs "
            "engine.precision=bf16 or fp32, engine.accumulate=1 and one process; use engine.mode=auto"
        )
    if wanted != "auto":
        return wanted, "asked for"
    if device.type != "cuda":
        return "eager", "compiling pays off on a GPU only"
    if not kernels.installed():
        return "eager", "without Triton nothing can be compiled"
    steps = int(settings.schedule.epochs) * (images // int(settings.data.batch))
    mode = "graph" if possible else "compile"
    if steps < STEPS_TO_PAY_BACK[mode]:
        return "eager", f"{steps:,} steps do not earn back the time to prepare more"
    return mode, f"{steps:,} steps"
