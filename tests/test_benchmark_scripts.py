"""Pages that scripts write are what the records say, and asking a script for help does nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"benchmarks/{script}.py", *words]
    return subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True)


@pytest.mark.parametrize("script", ["speed_table", "embedded_table"])
def test_the_page_is_what_the_records_say(script: str) -> None:
    found = run(script, "--check")
    assert found.returncode == 0, found.stderr or f"run benchmarks/{script}.py"


@pytest.mark.parametrize("script", ["speed_table", "embedded_table", "listing", "evaluate_speed", "report_picture"])
def test_help_and_mistakes_do_nothing(script: str) -> None:
    pages = {path: path.stat().st_mtime_ns for path in (ROOT / "docs").rglob("*")}
    shown, refused = run(script, "--help"), run(script, "--no-such-option")
    assert (shown.returncode, refused.returncode) == (0, 2)
    assert shown.stdout.startswith("usage:")
    assert "Traceback" not in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "docs").rglob("*")} == pages
