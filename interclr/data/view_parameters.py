"""What is random about a view: settings, one table of uniform numbers, and the parameters that follow from it.

All randomness of a view is a table of uniform numbers, one row per image of the *global* batch, so that views do not
depend on how many ranks share it. Shapes never depend on values and nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from interclr.types import Config

ATTEMPTS = 10  # torchvision's RandomResizedCrop tries this often before it falls back to a central crop
# Columns of the table of uniforms: the same for every view, so switching one operation off leaves the others alone.
AREA = slice(0, ATTEMPTS)
RATIO = slice(ATTEMPTS, 2 * ATTEMPTS)
TOP, LEFT, FLIP, JITTER, GREY, BLUR, SIGMA, SOLARISE = range(2 * ATTEMPTS, 2 * ATTEMPTS + 8)
FACTOR = slice(2 * ATTEMPTS + 8, 2 * ATTEMPTS + 12)
ORDER = slice(2 * ATTEMPTS + 12, 2 * ATTEMPTS + 16)
UNIFORMS = 2 * ATTEMPTS + 16

WHOLE = ("top", "left", "height", "width")  # parameters that are whole numbers


def _increasing(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the range must be (low, high), but {bounds[0]} > {bounds[1]}")
    return bounds


def _odd(kernel: int | None) -> int | None:
    if kernel is not None and kernel % 2 == 0:
        raise ValueError(f"a blur kernel needs a middle pixel, so an odd size, not {kernel}")
    return kernel


Probability = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Fractions = Annotated[tuple[Fraction, Fraction], AfterValidator(_increasing)]


class View(Config):
    """One kind of random view, in the order applied: crop and flip, jitter, grey, blur, solarise."""

    crop_scale: Fractions = (0.2, 1.0)  # of the image's area
    crop_ratio: Annotated[tuple[Positive, Positive], AfterValidator(_increasing)] = (3 / 4, 4 / 3)  # width / height
    flip: Probability = 0.5
    jitter: Probability = 0.0  # of the four below, together
    brightness: Strength = 0.0  # x: factor uniform in [max(0, 1 − x), 1 + x]
    contrast: Strength = 0.0
    saturation: Strength = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0  # x: uniform in [−x, x] of the colour circle
    grey: Probability = 0.0
    blur: Probability = 0.0
    blur_sigma: Annotated[tuple[Positive, Positive], AfterValidator(_increasing)] = (0.1, 2.0)  # in output pixels
    blur_kernel: Annotated[int | None, Field(ge=1), AfterValidator(_odd)] = None  # None: about 10 % of the output size
    solarise: Probability = 0.0

    def kernel(self, output_size: int) -> int:
        """Width of the blur kernel; SimCLR's rule, 23 at 224 pixels."""
        return self.blur_kernel or max(3, 2 * round((0.1 * output_size - 1) / 2) + 1)


@dataclass(frozen=True, slots=True)
class ViewParameters:
    """Everything random about one view of B images. ``None``: the view never does this, and no time is spent on it."""

    top: Tensor  # (B,) int64
    left: Tensor  # (B,) int64
    height: Tensor  # (B,) int64
    width: Tensor  # (B,) int64
    flip: Tensor  # (B,) bool
    factor: Tensor | None = None  # (B, 3) brightness, contrast, saturation; 1 where not applied
    hue: Tensor | None = None  # (B,) shift; 0 where not applied
    order: Tensor | None = None  # (B, 4) int64 jitter operations, first to last; those never used stand last
    blends: int = 0  # how many of brightness, contrast, saturation the view ever changes
    grey: Tensor | None = None  # (B,) bool
    blur_sigma: Tensor | None = None  # (B,) 0 where not blurred
    solarise: Tensor | None = None  # (B,) bool


def parameters_from_uniforms(view: View, uniforms: Tensor, size: Tensor) -> ViewParameters:
    """Turn (B, ``UNIFORMS``) numbers in [0, 1) and (B, 2) heights and widths into the parameters of a view. Pure."""
    if uniforms.device.type == "cpu" and not torch.compiler.is_compiling():
        return _parameters_by_numpy(view, uniforms.numpy(), size.numpy())
    # In double precision, so that rounding to whole pixels agrees between devices.
    found = _parameters(torch, view, uniforms, uniforms.double(), size.double())
    return ViewParameters(**{name: value.long() if name in WHOLE else value for name, value in found.items()})


def _parameters_by_numpy(view: View, uniforms: Any, size: Any) -> ViewParameters:
    """The same on a CPU: there are sixty small operations, and NumPy has less to do per call."""
    found = _parameters(np, view, uniforms, uniforms.astype(np.float64), size.astype(np.float64))
    whole = found | {name: found[name].astype(np.int64) for name in WHOLE}
    arrays = {name: torch.from_numpy(value) for name, value in whole.items() if isinstance(value, np.ndarray)}
    return ViewParameters(**(whole | arrays))


def _parameters(arrays: Any, view: View, uniforms: Any, wide: Any, size: Any) -> dict[str, Any]:
    """``ViewParameters`` by name; ``arrays`` is NumPy or torch, what is given and comes back are its arrays."""
    top, left, height, width = _crop(arrays, view, wide, size)
    applied = uniforms[:, JITTER] < view.jitter
    strengths = (view.brightness, view.contrast, view.saturation)
    blends = sum(strength > 0 for strength in strengths) if view.jitter > 0 else 0
    coloured = view.jitter > 0 and view.hue > 0
    factor = hue = order = None
    if blends:
        ranges = [(max(0.0, 1 - strength), 1 + strength) for strength in strengths]
        columns = uniforms[:, FACTOR].T[:3]
        drawn = [low + (high - low) * column for column, (low, high) in zip(columns, ranges, strict=True)]
        factor = arrays.stack(drawn, 1) * applied[:, None] + ~applied[:, None]  # 1 where not applied
        used = [strength > 0 for strength in (*strengths, view.hue)]
        keys = [key if use else key + 1 for key, use in zip(uniforms[:, ORDER].T, used, strict=True)]
        order = arrays.stack(keys, 1).argsort(1)
    if coloured:
        hue = view.hue * (2 * uniforms[:, FACTOR][:, 3] - 1) * applied
    sigma = None
    if view.blur > 0:
        low, high = view.blur_sigma
        sigma = (low + (high - low) * uniforms[:, SIGMA]) * (uniforms[:, BLUR] < view.blur)
    return {
        "top": top,
        "left": left,
        "height": height,
        "width": width,
        "flip": uniforms[:, FLIP] < view.flip,
        "factor": factor,
        "hue": hue,
        "order": order,
        "blends": blends,
        "grey": uniforms[:, GREY] < view.grey if view.grey > 0 else None,
        "blur_sigma": sigma,
        "solarise": uniforms[:, SOLARISE] < view.solarise if view.solarise > 0 else None,
    }


def _crop(arrays: Any, view: View, uniforms: Any, size: Any) -> tuple[Any, Any, Any, Any]:
    """RandomResizedCrop's window, all attempts at once: top, left, height, width, each (B,)."""
    full = size.T  # (2, B), like all that follows: heights, then widths
    (small, large), (narrow, broad) = view.crop_scale, view.crop_ratio
    area = (small + (large - small) * uniforms[:, AREA]) * full.prod(0)[:, None]  # (B, attempts)
    ratio = narrow * arrays.exp(math.log(broad / narrow) * uniforms[:, RATIO])  # uniform in its logarithm
    tried = arrays.sqrt(arrays.stack((area / ratio, area * ratio))).round()  # (2, B, attempts)
    fits = ((tried > 0) & (tried <= full[:, :, None])).all(0)
    found = fits.any(1)

    # No attempt fits: the largest central crop whose ratio is within bounds.
    fallback = arrays.minimum(full, arrays.stack((full[1] / narrow, full[0] * broad)).round())
    height, width = extent = arrays.where(found, _first_fitting(tried, fits), fallback)
    room = full - extent
    drawn = arrays.minimum(arrays.floor(uniforms[:, TOP : LEFT + 1].T * (room + 1)), room)
    top, left = arrays.where(found, drawn, arrays.floor(room / 2))
    return top, left, height, width


def _first_fitting(tried: Any, fits: Any) -> Any:
    """(2, B): the first of each image's attempts that fits; any where none does."""
    if isinstance(tried, np.ndarray):
        return tried[:, np.arange(len(fits)), fits.argmax(1)]
    first = fits.to(torch.uint8).argmax(1, keepdim=True)  # the first of equal maxima
    return tried.gather(2, first.expand(2, -1, -1))[:, :, 0]


def draw_uniforms(size: Tensor, generator: torch.Generator, total: int | None = None, first: int = 0) -> Tensor:
    """The (B, ``UNIFORMS``) random numbers of one view."""
    rows = len(size)
    total = rows if total is None else total
    if first < 0 or first + rows > total:
        raise ValueError(f"rows {first} to {first + rows} do not lie within a global batch of {total}")
    return torch.rand((total, UNIFORMS), generator=generator, device=size.device)[first : first + rows]
