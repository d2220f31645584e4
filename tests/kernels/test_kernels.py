"""Runs ``kernel_checks.py``: in place where there is a GPU, else by Triton's interpreter.

The interpreter has to be switched on before anything imports Triton, as torch.compile does: hence a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).with_name("kernel_checks.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_compute_what_their_plain_twins_do() -> None:
    interpreted = "0" if torch.cuda.is_available() else "1"
    environment = os.environ | {"TRITON_INTERPRET": interpreted, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(CHECKS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", run.stdout + " 0 passed")[0]) >= 20, run.stdout[-500:]
