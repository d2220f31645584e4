from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or leaves a listing in the home of whoever runs it."""
    monkeypatch.setenv("INTERCLR_CACHE", str(tmp_path_factory.mktemp("cache", numbered=True)))
    monkeypatch.delenv("INTERCLR_DATA", raising=False)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"
