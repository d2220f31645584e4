"""The small run that is evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_session import QUIET, TINY

from interclr.config import load_settings
from interclr.engine import pretrain


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("session") / "run"
    pretrain(load_settings("default", [*TINY, "inter.clusters=8", "inter.sampler.negatives=4"]), folder, screen=QUIET)
    return folder
