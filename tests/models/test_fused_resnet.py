"""The fused ResNet against the plain one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from interpreted import passing_checks

from interclr.models import BackboneConfig, fuse, mlp


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_a_fused_resnet_computes_what_the_plain_one_does() -> None:
    assert passing_checks(Path(__file__).with_name("fused_resnet_checks.py")) >= 10


def test_what_is_not_a_resnet_with_batch_norm_is_left_alone() -> None:
    group = BackboneConfig(backbone="resnet8", stem="small", width=8, norm="group").build()
    other = BackboneConfig(backbone="mobilenet_v3_small").build()
    averaging = BackboneConfig(backbone="resnet8", stem="small", width=8).build()
    next(m for m in averaging.modules() if isinstance(m, torch.nn.BatchNorm2d)).momentum = None
    for module in (group, other, mlp(4, 4, 4), averaging):
        before = [type(child) for child in module.modules()]
        assert not fuse(module)
        assert [type(child) for child in module.modules()] == before


def test_without_a_gpu_a_fused_network_still_trains() -> None:
    plain = BackboneConfig(backbone="resnet8", stem="small", width=8).build()
    fused = BackboneConfig(backbone="resnet8", stem="small", width=8).build()
    fused.load_state_dict(plain.state_dict())
    assert fuse(fused)
    assert list(fused.state_dict()) == list(plain.state_dict())
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        torch.testing.assert_close(fused(images), plain(images))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], value, msg=name)
    fused.eval(), plain.eval()
    torch.testing.assert_close(fused(images), plain(images))
