"""The script that times lightly, as far as it goes without lightly itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "lightly_cifar10.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)


def test_help_works_without_lightly() -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr
    assert "--method {moco,byol}" in done.stdout


@pytest.mark.parametrize("more", [[], ["--root", "x", "--method", "byol"], ["--root", "x", "--precision", "fp32"]])
def test_only_the_same_work_is_compared(tmp_path: Path, more: list[str]) -> None:
    places = ["--out", str(tmp_path / "theirs.json"), "--ours", str(tmp_path / "ours.json")]
    done = run("--precision", "bf16", *places, *more)
    assert done.returncode == 2
    assert "nothing else can be compared" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("lightly") is not None, reason="lightly is installed")
def test_missing_lightly_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "speed.json"))
    assert done.returncode == 2
    assert done.stderr == "lightly is missing; run: pip install 'interclr[peers]'\n"
    assert not list(tmp_path.iterdir())
