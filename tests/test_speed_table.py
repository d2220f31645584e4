from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_table_is_what_the_reports_say() -> None:
    command = [sys.executable, "benchmarks/speed_table.py", "--check"]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0, "run benchmarks/speed_table.py"
