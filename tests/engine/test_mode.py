from __future__ import annotations

import pytest
import torch

from interclr.config import Settings, load_settings
from interclr.engine.mode import engine_mode
from interclr.types import UserError

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def cifar(*overrides: str) -> Settings:
    given = ["schedule.epochs=200", "data.batch=256", "data.image_size=32", "engine.precision=bf16", *overrides]
    return load_settings("cifar10-mocov2-interclr", given)


@pytest.mark.parametrize(
    ("overrides", "images", "device", "mode"),
    [
        ([], 50_000, GPU, "graph"),
        (["data.image_size=224"], 50_000, GPU, "graph"),
        ([], 50_000, CPU, "eager"),
        (["schedule.epochs=5"], 50_000, GPU, "eager"),  # would not pay back
        (["schedule.epochs=6"], 50_000, GPU, "graph"),
        (["engine.accumulate=2"], 50_000, GPU, "compile"),
        (["engine.accumulate=2", "schedule.epochs=20"], 50_000, GPU, "eager"),  # compiling takes longer than capturing
        (["engine.precision=fp16"], 50_000, GPU, "compile"),
        (["engine.mode=eager"], 50_000, GPU, "eager"),
        (["engine.mode=graph", "schedule.epochs=1"], 1_000, GPU, "graph"),
    ],
)
def test_the_mode_suits_the_run(overrides: list[str], images: int, device: torch.device, mode: str) -> None:
    chosen, why = engine_mode(cifar(*overrides), images, device)
    assert chosen == mode
    assert why


def test_a_cpu_is_told_why_nothing_is_compiled() -> None:
    assert engine_mode(cifar(), 50_000, CPU) == ("eager", "compiling pays off on a GPU only")


@pytest.mark.parametrize(
    ("overrides", "device"), [([], CPU), (["engine.accumulate=2"], GPU), (["engine.precision=fp16"], GPU)]
)
def test_a_graph_that_cannot_be_is_refused(overrides: list[str], device: torch.device) -> None:
    with pytest.raises(UserError, match=r"engine.mode=graph .* use engine.mode=auto"):
        engine_mode(cifar("engine.mode=graph", *overrides), 50_000, device)
