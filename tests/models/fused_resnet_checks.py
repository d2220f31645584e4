"""The fused ResNet against the plain one; ``interpreted.py`` says how these checks are run."""

from __future__ import annotations

import copy

import pytest
import small_conv_twin
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from interclr import kernels
from interclr.kernels import small_conv
from interclr.models import BackboneConfig, fuse, split_batch_norm
from interclr.models.fused_norm import FusedBatchNorm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter's products know no bfloat16


class NarrowBottlenecks(ResNet):  # type: ignore[misc]
    """torchvision's own have 256 channels and more, which takes the interpreter a minute."""

    def __init__(self) -> None:
        super().__init__(BasicBlock, [1, 1, 1, 1])
        self.inplanes = 64
        self.layer1 = self._make_layer(Bottleneck, 8, 2)
        self.layer2 = self._make_layer(Bottleneck, 8, 1, stride=2)
        self.layer3, self.layer4, self.fc = nn.Sequential(), nn.Sequential(), nn.Identity()


@pytest.fixture(autouse=True)
def _whole_mantissas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in float32 proper, not in TensorFloat-32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize(
    ("name", "stem", "splits", "views", "small"),
    [
        ("resnet10", "small", 1, 1, False),
        ("resnet10", "small", 2, 2, False),
        ("resnet8", "strided", 1, 2, False),
        ("bottlenecks", "standard", 2, 2, False),
        ("resnet10", "small", 2, 2, True),
        ("bottlenecks", "standard", 1, 2, True),
    ],
)
def test_outputs_gradients_and_buffers_are_those_of_the_plain_network(
    name: str, stem: str, splits: int, views: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``small`` also where BatchNorm is done while a convolution reads."""
    torch.manual_seed(0)
    called = small_conv_twin.use_for_all(monkeypatch) if small else []
    if name == "bottlenecks":
        network: nn.Module = NarrowBottlenecks().double()
    else:
        network = BackboneConfig(backbone=name, stem=stem, width=8).build().double()  # type: ignore[arg-type]
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):  # weights of 1 and biases of 0 would hide mistakes
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    network = network.to(DEVICE, memory_format=torch.channels_last)
    side = 32 if stem == "standard" else 16
    images = torch.randn(8 * splits, 3, side, side, dtype=torch.float64, device=DEVICE)
    images = images.contiguous(memory_format=torch.channels_last)
    plain = split_batch_norm(copy.deepcopy(network), splits, views)
    fused = split_batch_norm(copy.deepcopy(network), splits, views)
    assert fuse(fused)
    fused.float()
    assert kernels.usable(images)
    expected, got = plain(images), fused(images.float())
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-3)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    for (key, wanted), found in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert wanted.grad is not None
        assert found.grad is not None
        distance = (found.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert distance < 0.05, f"{key}: {distance:.4f}"
    for (key, wanted), found in zip(plain.named_buffers(), fused.buffers(), strict=True):
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-3, atol=1e-3, msg=key)
    if small:
        expected_calls = {"convolve normalised", "input_gradient", "weight_gradient"}
        assert expected_calls <= set(called)


on_hopper = pytest.mark.skipif(not small_conv.is_hopper(DEVICE), reason="needs a Hopper GPU")


@pytest.mark.parametrize(("width", "side"), [(8, 16), pytest.param(64, 32, marks=on_hopper)])
def test_in_half_precision_weights_are_cast_and_gradients_cast_back(width: int, side: int) -> None:
    """As near to the exact network as the plain one in half precision is."""
    torch.manual_seed(0)
    network = BackboneConfig(backbone="resnet8" if width == 8 else "resnet18", stem="small", width=width).build()
    network = network.to(DEVICE, memory_format=torch.channels_last)
    exact, plain, fused = (split_batch_norm(copy.deepcopy(network), 1, 2) for _ in range(3))
    exact.double()
    assert fuse(fused)
    images = torch.randn(16, 3, side, side, device=DEVICE).to(HALF).contiguous(memory_format=torch.channels_last)
    with torch.autocast(DEVICE.type, HALF):
        rounded, got = plain(images), fused(images)
    expected = exact(images.double())
    assert (got - expected).norm() < 2 * (rounded - expected).norm()
    weights = torch.randn_like(expected)
    for output in (expected, rounded, got):
        (output.double() * weights).sum().backward()
    distances = []
    for network in (plain, fused):
        errors = [p.grad.double() - q.grad for p, q in zip(network.parameters(), exact.parameters(), strict=True)]  # type: ignore[union-attr, operator]
        distances.append(torch.cat([error.flatten() for error in errors]).norm())
    assert distances[1] < 1.5 * distances[0]
    for wanted, rough, found in zip(exact.parameters(), plain.parameters(), fused.parameters(), strict=True):
        # Rounding alone may move one of a layer's eight numbers by a fifth of their size, and all in a deep network.
        most = (0.5 if wanted.ndim == 1 else 0.2) * wanted.grad.norm()  # type: ignore[union-attr]
        distance, usual = ((p.grad.double() - wanted.grad).norm() for p in (found, rough))  # type: ignore[union-attr, operator]
        assert distance < max(most, 1.5 * usual)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in fused.parameters())


@pytest.mark.parametrize("shape", [(6, 5), (4, 5, 3, 3), (4, 5, 1, 1), (1, 5, 4, 4)])
def test_gradients_of_any_strides(shape: tuple[int, ...]) -> None:
    """A sum's gradient is one number seen many times; another's may come transposed."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5) if len(shape) == 2 else nn.BatchNorm2d(5)
    fused = FusedBatchNorm(copy.deepcopy(norm), splits=1).to(DEVICE)
    norm = norm.to(DEVICE)
    x = torch.randn(shape, device=DEVICE)
    weights = torch.randn(shape[::-1], device=DEVICE).permute(*range(len(shape) - 1, -1, -1))
    for gradient in (torch.ones((), device=DEVICE).expand(shape), weights):
        found = []
        for layer in (norm, fused):
            leaf = x.clone().requires_grad_()
            layer.zero_grad()
            output = layer.fused(leaf)[0] if isinstance(layer, FusedBatchNorm) else layer(leaf)
            (output * 1.0).backward(gradient)
            found.append([leaf.grad, *(p.grad for p in layer.parameters())])
        for wanted, got in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_classifier_is_kept_and_frozen_statistics_stay_frozen() -> None:
    torch.manual_seed(0)
    plain = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3).to(DEVICE)
    fused = copy.deepcopy(plain)
    assert fuse(fused)
    images = torch.randn(4, 3, 32, 32, device=DEVICE)
    torch.testing.assert_close(fused(images), plain(images), rtol=1e-3, atol=1e-3)
    for network in (plain, fused):
        network.layer2[0].bn2.eval()
    torch.testing.assert_close(fused(images), plain(images), rtol=1e-3, atol=1e-3)
