"""3×3 convolutions of 64 channels over 32×32 places: the first stage of a ResNet for images of CIFAR's size.

They are a quarter of such a network's arithmetic and half of its activations. A general convolution reads every number
nine times from the second-level cache, and with so few channels that is what it waits for. These kernels
(``small_conv.cu``) read it once. Two more passes over an activation go away: the mean and variance that BatchNorm wants
of the result are found before it is written, and BatchNorm and ReLU of the *input* can be done while it is read: a
normalised activation between two such convolutions is never written at all.

bfloat16 with float32 sums, on Hopper only; elsewhere callers take the library's convolution: the same function.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import resources

import torch
import triton
import triton.language as tl
from torch import Tensor

from interclr import kernels
from interclr.kernels import cuda
from interclr.kernels.norm import Moments, Norm, _line, _multiprocessors, _run_on

CHANNELS, SIDE = 64, 32
ARCHITECTURE, CAPABILITY = "sm_90a", (9, 0)
TILES, ITS_TILES = 2, 8  # of an image: of a convolution, of the gradient of a weight
GROUPS = 3  # that share a tile; each gives moments of its own
THREADS = 512
SHARED = {"convolve": 227_448, "weight_gradient": 230_480}  # bytes; as in small_conv.cu
TOGETHER, FEW = 256, 16  # moments at a time, and channels, of a program that puts them together


def fits(x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: object, dilation: object, groups: int) -> bool:
    """Whether this convolution of (B, C, H, W) is one that the kernels are made for."""
    shape = x.shape[1:] == (CHANNELS, SIDE, SIDE) and weight.shape == (CHANNELS, CHANNELS, 3, 3)
    plain = (tuple(stride), padding, dilation, groups) == ((1, 1), (1, 1), (1, 1), 1)
    half = x.dtype == weight.dtype == torch.bfloat16
    return shape and plain and half and _lies_well(x, weight) and kernels.usable(x, weight) and _works(x.device)


def _lies_well(*tensors: Tensor) -> bool:
    """Channels last in memory, and 16 bytes can be copied at a time."""
    return all(t.is_contiguous(memory_format=torch.channels_last) and t.data_ptr() % 16 == 0 for t in tensors)


def is_hopper(device: torch.device) -> bool:
    hopper = device.type == "cuda" and torch.version.hip is None
    return hopper and torch.cuda.get_device_capability(device) == CAPABILITY


@cache
def _works(device: torch.device) -> bool:
    if not is_hopper(device):
        return False
    try:
        _kernel("convolve", False, False, device)
    except Exception as error:
        warnings.warn(f"convolutions of small images are left to cuDNN, which is slower: {error}", stacklevel=2)
        return False
    return True


def convolve(x: Tensor, weight: Tensor, parts: int, lines: Tensor | None = None) -> tuple[Tensor, Moments]:
    """(B, 64, 32, 32) and (64, 64, 3, 3), both with channels last in memory → the same shape, channels last.

    And the moments of the result's parts. With ``lines`` (parts of x, 2, 64), float32, what is convolved
    is relu(scale · x + shift): the part's ``lines[part]`` are scale and shift.
    """
    assert len(x) % parts == 0, f"{len(x)} images are not {parts} equal parts"
    y, tiles = torch.empty_like(x), len(x) * TILES
    groups = tiles * GROUPS
    spreads = x.new_empty(2, groups, CHANNELS, dtype=torch.float32)
    _launch("convolve", _blocks(tiles, x.device), x, weight, y, spreads, lines, tiles=tiles)
    mean, variance = x.new_empty(2, parts, CHANNELS, dtype=torch.float32)
    _combine[(CHANNELS // FEW, parts)](spreads, mean, variance, groups // parts, CHANNELS, TOGETHER, FEW, num_warps=8)
    return y, Moments(mean, variance)


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Of the convolution's input, for the gradient of its result."""
    result = torch.empty_like(gradient)
    tiles = len(gradient) * TILES
    blocks = _blocks(tiles, gradient.device)
    _launch("convolve", blocks, gradient, weight, result, None, None, tiles=tiles, backward=True)
    return result


def weight_gradient(x: Tensor, gradient: Tensor, lines: Tensor | None = None) -> Tensor:
    """(64, 64, 3, 3) float32; ``lines`` as in ``convolve``. Added up in a fixed order."""
    tiles = len(x) * ITS_TILES
    blocks = _blocks(tiles, x.device)
    partial = x.new_empty(blocks, CHANNELS, 3, 3, CHANNELS, dtype=torch.float32)
    _launch("weight_gradient", blocks, x, gradient, partial, lines, tiles=tiles)
    return partial.sum(0).permute(0, 3, 1, 2)


def lines(found: Moments, norm: Norm, views: int, rows: int) -> Tensor:
    """(parts, 2, C): BatchNorm of so many rows as a scale and a shift. As in ``norm.normalise``, its running statistics
    follow the views."""
    parts, channels = found.mean.shape
    result = found.mean.new_empty(parts, 2, channels)
    wide = triton.next_power_of_2(channels)
    _lines[(1,)](result, *found, *norm, rows // parts, channels, wide, parts, views, num_warps=2)
    return result


def _launch(
    name: str, blocks: int, first: Tensor, second: Tensor, *more: Tensor | None, tiles: int, backward: bool = False
) -> None:
    lines = more[-1]
    parts = 1 if lines is None else len(lines)
    assert len(first) % parts == 0, f"{len(first)} images are not {parts} equal parts"
    assert _lies_well(first, second), "channels come last, at addresses that 16 divides"
    _kernel(name, lines is not None, backward, first.device)(blocks, first, second, *more, tiles, len(first) // parts)


@cache
def _kernel(name: str, normed: bool, backward: bool, device: torch.device) -> cuda.Kernel:
    code = machine_code(normed, backward)
    index = device.index if device.index is not None else torch.cuda.current_device()
    return cuda.Kernel(code, name, index, THREADS, SHARED[name])


@cache
def machine_code(normed: bool, backward: bool) -> bytes:
    body = resources.files("interclr.kernels").joinpath("small_conv.cu").read_text()
    macros = [("NORMED", int(normed)), ("BACKWARD", int(backward))]
    macros += [(f"{name.upper()}_SHARED", size) for name, size in SHARED.items()]
    return cuda.compile_for(ARCHITECTURE, _products(backward) + body, macros)


def _blocks(tiles: int, device: torch.device) -> int:
    return min(tiles, _multiprocessors(device))


def _products(backward: bool) -> str:
    """``multiply(sums, a, b, add)``: sums = a·bᵀ, or added to them. The instruction names each register it writes."""
    types = "typedef unsigned int u32;\ntypedef unsigned long long u64;\n"
    in_memory = _multiply(176, "u64 a", ["l"], ["a"], f"{int(backward)}, 0")
    in_registers = _multiply(64, "const u32 (&a)[4]", ["r"] * 4, [f"a[{i}]" for i in range(4)], "1")
    return types + in_memory + in_registers


def _multiply(width: int, left: str, kinds: list[str], names: list[str], transposed: str) -> str:
    """The left side, 64 × 16 numbers, is described by one number or lies in four registers; the right is width × 16."""
    sums, after = width // 2, width // 2 + len(names)
    results = ", ".join(f"%{i}" for i in range(sums))
    changed = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    given = ", ".join(f'"{kind}"({name})' for kind, name in zip(kinds, names, strict=True))
    a = f"%{sums}" if len(names) == 1 else "{" + ", ".join(f"%{i}" for i in range(sums, after)) + "}"
    return f"""
__device__ void multiply(float (&sums)[{sums}], {left}, u64 b, bool add) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{after + 1}, 0; "
               "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 "
               "{{{results}}}, {a}, %{after}, p, 1, 1, {transposed}; }}"
               : {changed} : {given}, "l"(b), "r"((int)add));
}}
"""


@triton.jit
def _combine(spreads, means, variances, groups, channels, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Mean and variance of a part, of those of its groups, in a fixed order; every third has 170 places, others 171."""
    channel = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    part, parts = tl.program_id(1), tl.num_programs(1)
    own = spreads + part * groups * channels
    first = tl.load(own + channel)  # one of the means: the others are near it
    one = tl.zeros((HIGH, WIDE), tl.float32)
    two = tl.zeros((HIGH, WIDE), tl.float32)
    start = part * 0
    while start < groups:
        group = start + tl.arange(0, HIGH)
        at, there = group[:, None] * channels + channel[None, :], (group < groups)[:, None]
        places = tl.where(group % 3 == 2, 170.0, 171.0)[:, None]
        away = tl.where(there, tl.load(own + at, there, other=0.0) - first[None, :], 0.0)
        one += places * away
        two += places * away * away + tl.load(own + parts * groups * channels + at, there, other=0.0)
        start += HIGH
    places = groups // 3 * 512.0
    away = tl.sum(one, axis=0) / places
    tl.store(means + part * channels + channel, first + away)
    tl.store(variances + part * channels + channel, tl.maximum(tl.sum(two, axis=0) / places - away * away, 0.0))


@triton.jit
def _lines(
    lines, means, variances, weight, bias, running_mean, running_var, batches, momentum, eps, rows, channels,
    WIDE: tl.constexpr, PARTS: tl.constexpr, VIEWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDE)
    for part in tl.static_range(PARTS):
        _, _, scale, shift = _line(means, variances, weight, bias, eps, part, channels, column)
        tl.store(lines + 2 * part * channels + column, scale, column < channels)
        tl.store(lines + (2 * part + 1) * channels + column, shift, column < channels)
    _run_on(means, variances, running_mean, running_var, batches, momentum, rows, channels, column, PARTS, VIEWS)
