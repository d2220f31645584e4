"""Batched colour operations with one factor per image, equal to torchvision's one-image functions within 1e-5.

Images are (B, 3, H, W) floats in [0, 1]. Shapes never depend on values and nothing waits for the device, so every
function can be compiled or captured in a CUDA graph (which is why numbers are filled in by ``masked_fill``: ``where``
copies a plain number to the device and waits). An image that an operation skips gets its neutral factor.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # torchvision's numbering of the four jitter operations
LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue in grey, ITU-R 601's


def per_image(values: Tensor) -> Tensor:
    """(B,) → (B, 1, 1), to broadcast over the pixels of a plane."""
    return values[:, None, None]


def grey_plane(image: Tensor) -> Tensor:
    """(B, 3, H, W) → (B, H, W)."""
    red, green, blue = image.unbind(1)
    return red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


def blend(image: Tensor, operation: Tensor, factor: Tensor) -> Tensor:
    """Brightness, contrast or saturation, chosen per image; factor 1 leaves an image as it is.

    All three are ``clamp(f·x + (1 − f)·reference)``; reference: black, the grey image's mean or the grey image.
    """
    rest = 1 - factor
    grey = grey_plane(image)
    mean = grey.mean((1, 2)) * rest * (operation == CONTRAST)  # (B,)
    reference = grey.mul_(per_image(rest * (operation == SATURATION))).add_(per_image(mean))  # (B, H, W)
    return torch.addcmul(reference[:, None], image, per_image(factor)[:, None]).clamp_(0, 1)


def rotate_hue(image: Tensor, shift: Tensor, out: Tensor | None = None) -> Tensor:
    """Turn the hue of image ``i`` by ``shift[i]`` of a full circle: HSV's rotation without its six-way select.

    ``out`` may be ``image`` itself.
    """
    red, green, blue = image.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # 0 where the channel is the largest, else 1: as weights of a lerp cheaper on a CPU than a select, and as exact.
    below_red, below_green = (value - red).sign_(), (value - green).sign_()
    hue = (green - blue).lerp_((blue - red).lerp_(red - green, below_green), below_red)
    # Where chroma is 0 the numerator is 0 as well, so any positive divisor gives hue 0 and no NaN.
    hue.div_(chroma.clamp_min(1e-12).mul_(6)).addcmul_(below_red, below_green.add_(1), value=1 / 3)
    hue.add_(per_image(shift))  # (B, H, W) in turns
    planes = []
    targets = (None, None, None) if out is None else out.unbind(1)
    for target, centre in zip(targets, (1 / 2, 1 / 6, -1 / 6), strict=True):
        # A channel is lowest opposite to its own hue: cyan, magenta, yellow.
        distance = hue + centre
        distance.sub_(distance.round()).abs_()  # to there, on the circle, 0 .. 1/2
        share = distance.mul_(-6).add_(2).clamp_(0, 1)
        planes.append(torch.addcmul(value, chroma, share, value=-1, out=target))
    if out is not None:
        return out
    return torch.stack(planes).transpose(0, 1)  # planes outermost in memory: see `views.resample`


def jitter(image: Tensor, factor: Tensor, hue: Tensor | None, order: Tensor, blends: int) -> Tensor:
    """Colour jitter with the operations in a random order per image, without branching on it.

    ``factor`` (B, 3) brightness, contrast, saturation; ``order`` (B, 4) lists each image's operations, first to last,
    with those that the view never uses at the end. Hue is the only operation that is not a blend, so it runs once for
    all images, between ``blends`` slots for what precedes it and ``blends`` slots for what follows it.
    """
    factor = torch.cat((factor, torch.ones_like(factor[:, :1])), 1)  # (B, 4): hue blends with factor 1
    ordered = factor.gather(1, order)
    if hue is None:
        for slot in range(blends):
            image = blend(image, order[:, slot], ordered[:, slot])
        return image
    by_turns = image.device.type == "cpu"
    return (_jitter_by_turns if by_turns else _jitter_by_slots)(image, ordered, hue, order, blends)


def _jitter_by_slots(image: Tensor, ordered: Tensor, hue: Tensor, order: Tensor, blends: int) -> Tensor:
    # Hue's own slot has factor 1, hence is neutral whichever side it is counted on.
    before = (order == HUE).cumsum(1) == 0  # (B, 4)
    for slot in range(blends):
        image = blend(image, order[:, slot], ordered[:, slot].masked_fill(~before[:, slot], 1))
    image = rotate_hue(image, hue)
    for slot in range(1, blends + 1):
        image = blend(image, order[:, slot], ordered[:, slot].masked_fill(before[:, slot], 1))
    return image


def _jitter_by_turns(image: Tensor, ordered: Tensor, hue: Tensor, order: Tensor, blends: int) -> Tensor:
    """The same where shapes may depend on values: images sorted by their hue's turn, so that none is blended in vain.

    Images that nothing is done to stand last, where no slice reaches them. Any blend is a matrix over the channels, and
    for contrast a number to add.
    """
    kinds, factors = order.numpy(), ordered.numpy()  # (B, 4) where NumPy does better, having less to do per call
    turn = (kinds == HUE).argmax(1)  # (B,) blends before the hue
    turn[(factors == 1).all(1) & (hue.numpy() == 0)] = blends + 1
    arrangement = turn.argsort(kind="stable")
    before = np.searchsorted(turn[arrangement], np.arange(blends + 2)).tolist()  # [t]: images with hue before turn t
    working = before[blends + 1]
    kinds, factors = kinds[arrangement].T[:, :, None], factors[arrangement].T[:, :, None]  # (4, B, 1)
    luma = np.array(LUMA, factors.dtype)
    of_mean = torch.from_numpy((1 - factors) * (kinds == CONTRAST) * luma)  # (4, B, 3)
    of_grey = (1 - factors) * (kinds == SATURATION) * luma
    matrix = torch.from_numpy(factors[..., None] * np.eye(3, dtype=luma.dtype) + of_grey[:, :, None])  # (4, B, 3, 3)
    rows = torch.from_numpy(arrangement)
    image = image.index_select(0, rows)
    pixels = image.flatten(2)  # (B, 3, H·W)

    def blend_slot(part: slice, slot: int) -> None:
        here = pixels[part]
        mean = (here.mean(2) * of_mean[slot, part]).sum(1)
        torch.clamp(torch.baddbmm(per_image(mean), matrix[slot, part], here), 0, 1, out=here)

    for slot in range(blends):
        blend_slot(slice(before[slot + 1], working), slot)
    rotate_hue(image[:working], hue[rows[:working]], out=image[:working])
    for slot in range(1, blends + 1):
        blend_slot(slice(0, before[slot]), slot)
    return image.index_select(0, torch.from_numpy(arrangement.argsort()))


def to_grey(image: Tensor, chosen: Tensor) -> Tensor:
    """Grey the images where ``chosen`` (B,) is true."""
    return image.lerp(grey_plane(image)[:, None], per_image(chosen)[:, None].to(image.dtype))


def solarise(image: Tensor, chosen: Tensor) -> Tensor:
    """Invert what is at least half bright, in the images where ``chosen`` (B,) is true."""
    return torch.where(per_image(chosen)[:, None] & (image >= 0.5), 1 - image, image)
