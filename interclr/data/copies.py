"""Nearly the same picture (resized, compressed again, brighter) by its pixels: no network is asked.

Two pictures are near copies where their tiny versions correlate, each channel less its mean. Of the first 20,000
images of CIFAR-10 nearly every pair above the bound is a copy to the eye, and half of those at 0.92 are not: so the
bound was chosen, and ``interclr data check cifar10 --json FILE`` lists them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from interclr.data.parallel import Progress

SIDE, BLOCK = 16, 4  # of the tiny pictures; of the squares whose means are compared first
SAME_PICTURE = 0.95  # the correlation from which on one is taken for a copy of the other
MOST_COPIES = 10  # of one picture, the closest: frames of a film would be pairs without number
CHUNK_ELEMENTS, PART = 2**24, 4096
MOST_LOOKED_AT = 500  # one pair in so many is looked at by itself; where more are possible, all are together
Pairs = dict[tuple[int, int], float]  # positions of two images, and how alike they are


def tiny(pixels: Tensor) -> Tensor:
    """The whole of (3, h, w) uint8 pixels shrunk to (3, SIDE, SIDE): what a copy of it shares, whatever its size."""
    image = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).cpu().numpy()))
    return torch.from_numpy(np.array(image.resize((SIDE, SIDE), Image.Resampling.BOX))).permute(2, 0, 1)


def near_copies(pictures: Tensor, digests: Sequence[bytes], progress: Progress | None = None) -> Pairs:
    """Pairs of tiny ``pictures`` (M, 3, SIDE, SIDE) that correlate, the closest first; of each its closest copies.

    Of images that are equal, by the ``digests`` of their pixels, the first stands for all.

    What differs in its coarse parts cannot correlate as a whole: the product of two unit vectors is at most that of
    their projections plus that of the lengths of what is left, so most pairs are ruled out by a fifteenth of the work.
    """
    first: dict[bytes, int] = {}
    own = [i for i, digest in enumerate(digests) if first.setdefault(digest, i) == i]
    pictures = pictures[own]
    coarse = torch.cat([_coarse(unit(part)) for part in pictures.split(PART)])
    pairs: Pairs = {}
    for rows in torch.arange(len(pictures)).split(max(1, CHUNK_ELEMENTS // max(1, len(pictures)))):
        possible = coarse[rows] @ coarse.T >= SAME_PICTURE - 1e-5
        possible &= torch.arange(len(pictures)) > rows[:, None]
        many = int(possible.sum()) > possible.numel() // MOST_LOOKED_AT
        values, others = _all_of(pictures, rows) if many else _these_of(pictures, rows, possible)
        for row, near, which in zip(rows.tolist(), values.tolist(), others.tolist(), strict=True):
            pairs |= {(own[row], own[i]): value for value, i in zip(near, which, strict=True) if value >= SAME_PICTURE}
        if progress is not None:
            progress(len(digests) * (int(rows[-1]) + 1) // len(pictures), len(digests))
    return closest_first(pairs)


def likeness(pictures: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The correlation of the pictures ``one`` with those ``other``, pair by pair."""
    parts = zip(one.split(PART), other.split(PART), strict=True)
    return torch.cat([(unit(pictures[a]) * unit(pictures[b])).sum(dim=1) for a, b in parts])


def _these_of(pictures: Tensor, rows: Tensor, possible: Tensor) -> tuple[Tensor, Tensor]:
    """The closest later pictures of ``rows`` and how alike they are, (R, MOST_COPIES) each, of a few ``possible``."""
    one, other = possible.nonzero(as_tuple=True)
    found = likeness(pictures, rows[one], other)
    order = torch.argsort(found, descending=True, stable=True)
    order = order[torch.argsort(one[order], stable=True)]  # by picture, then the closest first
    one, other, found = one[order], other[order], found[order]
    rank = torch.arange(len(one)) - torch.searchsorted(one, one)
    few = rank < MOST_COPIES
    values = torch.full((len(rows), MOST_COPIES), -1.0)
    others = torch.zeros(len(rows), MOST_COPIES, dtype=torch.int64)
    values[one[few], rank[few]], others[one[few], rank[few]] = found[few], other[few]
    return values, others


def _all_of(pictures: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same where many are possible, as of the frames of a film: all of them, by matrix products."""
    own = unit(pictures[rows])
    values = torch.full((len(rows), MOST_COPIES), -1.0)
    others = torch.zeros(len(rows), MOST_COPIES, dtype=torch.int64)
    for columns in torch.arange(len(pictures)).split(PART):
        found = (own @ unit(pictures[columns]).T).masked_fill(columns <= rows[:, None], -1.0)
        values, place = torch.cat([values, found], dim=1).topk(MOST_COPIES)
        others = torch.cat([others, columns.expand(len(rows), -1)], dim=1).gather(1, place)
    return values, others


def unit(pictures: Tensor) -> Tensor:
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
