from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from interpreted import passing_checks


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_compute_what_their_plain_twins_do() -> None:
    assert passing_checks(Path(__file__).with_name("kernel_checks.py")) >= 80


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_convolutions_for_small_images() -> None:
    assert passing_checks(Path(__file__).with_name("small_conv_checks.py")) >= 5
