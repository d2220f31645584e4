"""Whether compiling and capturing pay back: decided once the data are open, as it depends on how they are read."""

from __future__ import annotations

import torch

from interclr.config import Settings
from interclr.engine.capture import can_capture
from interclr.types import UserError

# A ResNet takes one to two minutes to compile and saves 10 to 30 ms a step.
STEPS_TO_PAY_BACK = 5_000
LAUNCH_BOUND = 64  # pixels: above, a step is long enough for the host to keep up with launching it


def engine_mode(settings: Settings, resident: bool, images: int, device: torch.device) -> tuple[str, str]:
    """``engine.mode`` and why: for ``auto`` what suits the run, else what was asked for if it is possible."""
    engine, wanted = settings.engine, settings.engine.mode
    possible = resident and can_capture(device, engine.precision, engine.accumulate)
    if wanted == "graph" and not possible:
        raise UserError(
            "engine.mode=graph captures a step whose shapes never change, on one GPU: it needs data.resident=true, "
            "engine.precision=bf16 or fp32, engine.accumulate=1 and one process; use engine.mode=auto"
        )
    if wanted != "auto":
        return wanted, "asked for"
    steps = int(settings.schedule.epochs) * (images // int(settings.data.batch))
    if device.type != "cuda" or steps < STEPS_TO_PAY_BACK:
        return "eager", f"{steps:,} steps do not earn back a minute or two of compiling"
    if possible and int(settings.data.image_size) <= LAUNCH_BOUND:
        return "graph", f"{steps:,} steps of small images that lie on the GPU"
    return "compile", f"{steps:,} steps"
