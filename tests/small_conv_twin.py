"""Plain twins of ``interclr/kernels/small_conv.py``, for any number of channels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from interclr.kernels import small_conv
from interclr.kernels.norm import Moments


def normalised(x: Tensor, lines: Tensor | None) -> Tensor:
    if lines is None:
        return x
    scale, shift = lines.repeat_interleave(len(x) // len(lines), 0).unbind(1)
    return F.relu(x.float() * scale[:, :, None, None] + shift[:, :, None, None]).to(x.dtype)


def convolve(x: Tensor, weight: Tensor, parts: int, lines: Tensor | None = None) -> tuple[Tensor, Moments]:
    y = F.conv2d(normalised(x, lines), weight, padding=1).contiguous(memory_format=torch.channels_last)
    rows = y.float().unflatten(0, (parts, -1)).transpose(1, 2).flatten(2)  # (parts, C, images and places)
    return y, Moments(rows.mean(2), rows.var(2, unbiased=False))


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    return conv2d_input(gradient.shape, weight, gradient, padding=1).contiguous(memory_format=torch.channels_last)


def weight_gradient(x: Tensor, gradient: Tensor, lines: Tensor | None = None) -> Tensor:
    channels = x.shape[1]
    return conv2d_weight(normalised(x, lines), (channels, channels, 3, 3), gradient, padding=1).float()


def use_for_all(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let every 3×3 convolution of as many channels go this way. The names of what was called are added to the list."""
    called: list[str] = []

    def fits(x: Tensor, weight: Tensor, stride: tuple[int, ...], *_: object) -> bool:
        return weight.shape == (x.shape[1], x.shape[1], 3, 3) and tuple(stride) == (1, 1)

    monkeypatch.setattr(small_conv, "fits", fits)
    for twin in (convolve, input_gradient, weight_gradient):

        def noted(*arguments: object, twin: object = twin) -> object:
            called.append(twin.__name__ + (" normalised" if len(arguments) == 4 else ""))  # type: ignore[attr-defined]
            return twin(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(small_conv, twin.__name__, noted)
    return called
