"""Runs a file of checks on Triton kernels: in place where there is a GPU, else by Triton's interpreter.

The interpreter has to be switched on before anything imports Triton, as torch.compile does: hence a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch


def passing_checks(file: Path) -> int:
    """How many of its tests passed; fails with what they said where one did not."""
    interpreted = "0" if torch.cuda.is_available() else "1"
    environment = os.environ | {"TRITON_INTERPRET": interpreted, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-3000:]
    return int(re.findall(r"(\d+) passed", run.stdout + " 0 passed")[0])
