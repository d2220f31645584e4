"""What a GPU draws and how fast it is clocked while something runs: at its power limit it is the watts that decide."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import torch

FIELDS = {
    "watts": "power.draw",
    "watts_limit": "power.limit",
    "megahertz": "clocks.sm",
    "megahertz_limit": "clocks.max.sm",
}
EVERY_MS = 200


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, float]]:
    """Yields what will hold the medians afterwards; nothing on a CPU, or where there is no nvidia-smi."""
    found: dict[str, float] = {}
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        yield found
        return
    command = [program, f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader,nounits"]
    command += ["-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}", "-lms", str(EVERY_MS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield found
        finally:
            process.terminate()
            lines, _ = process.communicate()
    found.update(medians(lines))


def medians(lines: str) -> dict[str, float]:
    """Of lines of numbers, a column for each field; lines cut off or without numbers are left out."""
    rows = []
    for line in lines.splitlines():
        try:
            row = [float(cell) for cell in line.split(",")]
        except ValueError:
            continue
        if len(row) == len(FIELDS):
            rows.append(row)
    if not rows:
        return {}
    return dict(zip(FIELDS, (statistics.median(column) for column in zip(*rows, strict=True)), strict=True))
