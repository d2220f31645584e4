"""Nearly the same picture (resized, compressed again, brighter) by its pixels: no network is asked.

Two pictures are near copies where their tiny versions correlate, each channel less its mean. Of the first 20,000
images of CIFAR-10 nearly every pair above the bound is a copy to the eye (some hundred images), and half of those at
0.92 are not.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from interclr.data.parallel import Progress

SIDE, BLOCK = 16, 4  # of the tiny pictures; of the squares whose means are compared first
SAME_PICTURE = 0.95  # the correlation from which on one is taken for a copy of the other
MOST_COPIES = 10  # of one picture, the closest: frames of a film would be pairs without number
CHUNK_ELEMENTS = 2**24
Pairs = dict[tuple[int, int], float]  # positions of two images, and how alike they are


def tiny(pixels: Tensor) -> Tensor:
    """The whole of (3, h, w) uint8 pixels shrunk to (3, SIDE, SIDE): what a copy of it shares, whatever its size."""
    image = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).cpu().numpy()))
    return torch.from_numpy(np.array(image.resize((SIDE, SIDE), Image.Resampling.BOX))).permute(2, 0, 1)


def near_copies(pictures: Tensor, progress: Progress | None = None) -> Pairs:
    """Pairs of tiny ``pictures`` (M, 3, SIDE, SIDE) that correlate, the closest first; of each its closest copies.

    What differs in their coarse parts cannot correlate as a whole: the product of two unit vectors is at most that of
    their projections plus that of the lengths of what is left, so most pairs are ruled out by a fifteenth of the work.
    """
    coarse = torch.cat([_coarse(_unit(part)) for part in pictures.split(4096)])
    pairs: Pairs = {}
    done = 0
    for rows in torch.arange(len(pictures)).split(max(1, CHUNK_ELEMENTS // max(1, len(pictures)))):
        one, other = (coarse[rows] @ coarse.T >= SAME_PICTURE - 1e-5).nonzero(as_tuple=True)
        one = rows[one]
        later = other > one
        _keep(pairs, pictures, one[later], other[later])
        done += len(rows)
        if progress is not None:
            progress(done, len(pictures))
    return closest_first(pairs)


def _keep(pairs: Pairs, pictures: Tensor, one: Tensor, other: Tensor) -> None:
    """Those of the pairs, in the order of ``one``, that are near copies: the closest few of each picture."""
    likeness = torch.cat(
        [
            (_unit(pictures[a]) * _unit(pictures[b])).sum(dim=1)
            for a, b in zip(one.split(4096), other.split(4096), strict=True)
        ]
    )
    near = likeness >= SAME_PICTURE
    one, other, likeness = one[near], other[near], likeness[near]
    order = torch.argsort(likeness, descending=True, stable=True)
    order = order[torch.argsort(one[order], stable=True)]  # by picture, then the closest first
    one, other, likeness = one[order], other[order], likeness[order]
    rank = torch.arange(len(one)) - torch.searchsorted(one, one)
    few = rank < MOST_COPIES
    pairs.update(zip(zip(one[few].tolist(), other[few].tolist(), strict=True), likeness[few].tolist(), strict=True))


def _unit(pictures: Tensor) -> Tensor:
    """Unit vectors (M, 3 · SIDE²), zero for a picture of one colour: it has nothing to correlate."""
    channels = pictures.float().flatten(2)
    return F.normalize((channels - channels.mean(dim=2, keepdim=True)).flatten(1), dim=1)


def _coarse(unit: Tensor) -> Tensor:
    """The projections on pictures that are constant on squares, and last the length of what is left."""
    blocks = F.avg_pool2d(unit.view(-1, 3, SIDE, SIDE), BLOCK).flatten(1) * BLOCK
    rest = (unit.square().sum(dim=1) - blocks.square().sum(dim=1)).clamp_min(0).sqrt()
    return torch.cat([blocks, rest[:, None]], dim=1)


def closest_first(pairs: Pairs) -> Pairs:
    return dict(sorted(pairs.items(), key=lambda item: (-item[1], item[0])))
