"""Batched colour operations with one factor per image, equal to torchvision's one-image functions within 1e-5.

Images are (B, 3, H, W) floats in [0, 1]. Shapes never depend on values and nothing waits for the device, so every
function can be compiled or captured in a CUDA graph (which is why numbers are filled in by ``masked_fill``: ``where``
copies a plain number to the device and waits). An image that an operation skips gets its neutral factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # torchvision's numbering of the four jitter operations


def per_image(values: Tensor) -> Tensor:
    """(B,) → (B, 1, 1), to broadcast over the pixels of a plane."""
    return values[:, None, None]


def grey_plane(image: Tensor) -> Tensor:
    """Luma with torchvision's (ITU-R 601) weights: (B, 3, H, W) → (B, H, W)."""
    red, green, blue = image.unbind(1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def blend(image: Tensor, operation: Tensor, factor: Tensor) -> Tensor:
    """Brightness, contrast or saturation, chosen per image; factor 1 leaves an image as it is.

    All three are ``clamp(f·x + (1 − f)·reference)``; reference: black, the grey image's mean or the grey image.
    """
    rest = 1 - factor
    grey = grey_plane(image)
    mean = grey.mean((1, 2)) * rest * (operation == CONTRAST)  # (B,)
    reference = grey.mul_(per_image(rest * (operation == SATURATION))).add_(per_image(mean))  # (B, H, W)
    return torch.addcmul(reference[:, None], image, per_image(factor)[:, None]).clamp_(0, 1)


def rotate_hue(image: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of image ``i`` by ``shift[i]`` of a full circle: HSV's rotation without its six-way select."""
    red, green, blue = image.unbind(1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # Where chroma is 0 the numerator is 0 as well, so any positive divisor gives hue 0 and no NaN.
    sixth = chroma.clamp_min(1e-12).mul_(6).reciprocal_()
    hue = torch.where(
        value == red,
        (green - blue).mul_(sixth),
        torch.where(value == green, (blue - red).mul_(sixth).add_(1 / 3), (red - green).mul_(sixth).add_(2 / 3)),
    ).add_(per_image(shift))  # (B, H, W) in turns
    planes = []
    for centre in (1 / 2, 1 / 6, -1 / 6):  # a channel is lowest opposite to its own hue: cyan, magenta, yellow
        distance = hue + centre
        distance.sub_(distance.round()).abs_()  # to the channel's own hue's opposite, on the circle, 0 .. 1/2
        share = distance.mul_(-6).add_(2).clamp_(0, 1)
        planes.append(torch.addcmul(value, chroma, share, value=-1))
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
    if image.device.type == "cpu":
        return _jitter_by_turns(image, ordered, hue, order, blends)
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

    Images that nothing is done to stand last, where no slice reaches them.
    """
    turn = (order == HUE).long().argmax(1)  # (B,) blends before the hue
    idle = (ordered == 1).all(1) & (hue == 0)
    turn, rows = turn.masked_fill(idle, blends + 1).sort(stable=True)
    before = torch.searchsorted(turn, torch.arange(blends + 2)).tolist()  # [t]: images whose hue comes before turn t
    working = before[blends + 1]
    image = image.transpose(0, 1).index_select(1, rows).transpose(0, 1)  # planes stay outermost
    order, ordered = order[rows], ordered[rows]
    for slot in range(blends):
        part = slice(before[slot + 1], working)
        image[part] = blend(image[part], order[part, slot], ordered[part, slot])
    image[:working] = rotate_hue(image[:working], hue[rows[:working]])
    for slot in range(1, blends + 1):
        part = slice(0, before[slot])
        image[part] = blend(image[part], order[part, slot], ordered[part, slot])
    back = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows)))
    return image.transpose(0, 1).index_select(1, back).transpose(0, 1)


def to_grey(image: Tensor, chosen: Tensor) -> Tensor:
    """Grey the images where ``chosen`` (B,) is true."""
    return torch.where(per_image(chosen)[:, None], grey_plane(image)[:, None], image)


def solarise(image: Tensor, chosen: Tensor) -> Tensor:
    """Invert what is at least half bright, in the images where ``chosen`` (B,) is true."""
    return torch.where(per_image(chosen)[:, None] & (image >= 0.5), 1 - image, image)
