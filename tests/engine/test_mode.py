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
    ("overrides", "resident", "images", "device", "mode"),
    [
        ([], True, 50_000, GPU, "graph"),
        ([], False, 50_000, GPU, "compile"),  # shapes may change from batch to batch
        ([], True, 50_000, CPU, "eager"),
        (["schedule.epochs=2"], True, 50_000, GPU, "eager"),  # would not pay back
        (["data.image_size=224"], True, 50_000, GPU, "compile"),  # launching is not the work there
        (["engine.accumulate=2"], True, 50_000, GPU, "compile"),
        (["engine.precision=fp16"], True, 50_000, GPU, "compile"),
        (["engine.mode=eager"], True, 50_000, GPU, "eager"),
        (["engine.mode=graph", "schedule.epochs=1"], True, 1_000, GPU, "graph"),
    ],
)
def test_the_mode_suits_the_run(
    overrides: list[str], resident: bool, images: int, device: torch.device, mode: str
) -> None:
    chosen, why = engine_mode(cifar(*overrides), resident, images, device)
    assert chosen == mode
    assert why


@pytest.mark.parametrize(
    ("overrides", "resident", "device"),
    [
        ([], False, GPU),
        ([], True, CPU),
        (["engine.accumulate=2"], True, GPU),
        (["engine.precision=fp16"], True, GPU),
    ],
)
def test_a_graph_that_cannot_be_is_refused(overrides: list[str], resident: bool, device: torch.device) -> None:
    with pytest.raises(UserError, match=r"engine.mode=graph .* use engine.mode=auto"):
        engine_mode(cifar("engine.mode=graph", *overrides), resident, 50_000, device)
