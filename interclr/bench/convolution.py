"""Our convolutions for small images beside the library's: by themselves, and in a whole CIFAR-10 step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from interclr import kernels
from interclr.bench.setup import prepare, stepper
from interclr.bench.timing import captured, in_turns, ratios, spread
from interclr.screen import Screen

CALLS = 20  # in one graph, so that launching is not measured
Work = Callable[[], object]


def measure_convolutions(
    overrides: Sequence[str], pixels: Tensor, device: torch.device, screen: Screen, images: int = 1_024
) -> dict[str, Any]:
    """Microseconds of each, and the step's milliseconds, in turns; ratios are ours ÷ the library's."""
    if not kernels.installed():
        return {"skipped": "Triton is not installed"}
    from interclr.kernels import small_conv

    if not small_conv.is_hopper(device):
        return {"skipped": "these kernels are for Hopper GPUs"}
    torch.backends.cudnn.benchmark = True
    rows = []
    for name, (ours, library) in _convolutions(images, device).items():
        screen.say(f"convolutions: {name}")
        times = in_turns({"ours": _often(ours, device), "library": _often(library, device)}, 8, 5, device)
        microseconds = {side: spread([1e3 * value / CALLS for value in values]) for side, values in times.items()}
        rows.append({"name": name, "microseconds": microseconds, "ratio": ratios(times["ours"], times["library"])})
    screen.say("a whole step with ours and with the library's")
    steps = {"ours": _step(overrides, pixels, device)}
    with mock.patch.object(small_conv, "fits", return_value=False):
        steps["library"] = _step(overrides, pixels, device)
    times = in_turns(steps, 6, 60, device)
    step = {"milliseconds": {side: spread(values) for side, values in times.items()}}
    return {"images": images, "rows": rows, "step": step | {"ratio": ratios(times["ours"], times["library"])}}


def _often(work: Work, device: torch.device) -> Work:
    return captured(lambda: [work() for _ in range(CALLS)], [], device)


def _convolutions(images: int, device: torch.device) -> dict[str, tuple[Work, Work]]:
    from interclr.kernels import small_conv

    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return values.contiguous(memory_format=torch.channels_last)

    side, channels = small_conv.SIDE, small_conv.CHANNELS
    x, gradient = F.relu(random(images, channels, side, side)), random(images, channels, side, side)
    weight = random(channels, channels, 3, 3) / 24
    lines = torch.rand(8, 2, channels, generator=generator, device=device)

    def backward(*wanted: bool) -> object:
        one = [1, 1]
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, None, one, one, one, False, [0, 0], 1, [*wanted, False]
        )

    def convolve() -> object:
        return F.conv2d(x, weight, None, 1, 1)

    return {
        "forward, with moments": (lambda: small_conv.convolve(x, weight, 8), convolve),
        "forward, normalising its input": (lambda: small_conv.convolve(x, weight, 8, lines), convolve),
        "gradient of the input": (
            lambda: small_conv.input_gradient(gradient, weight),
            lambda: backward(True, False),
        ),
        "gradient of the weight": (lambda: small_conv.weight_gradient(x, gradient), lambda: backward(False, True)),
        "the same, normalising": (
            lambda: small_conv.weight_gradient(x, gradient, lines),
            lambda: backward(False, True),
        ),
    }


def _step(overrides: Sequence[str], pixels: Tensor, device: torch.device) -> Work:
    """A captured step that has been made a few times."""
    work = stepper(prepare("cifar10-mocov2", overrides, pixels, len(pixels), device))
    for _ in range(8):
        work()
    return work
