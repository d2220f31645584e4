"""Colour operations against torchvision's, image by image, within 1e-5 (range 0..1, float32)."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torchvision.transforms.v2 import functional as F

from interclr.data.colour import HUE, _jitter_by_slots, _jitter_by_turns, jitter, rotate_hue, solarise, to_grey
from interclr.data.view_parameters import View
from interclr.data.views import apply_view

from .like_torchvision import (
    close,
    draw_parameters,
    random_pixels,
    seeded,
    sizes,
    torchvision_jitter,
    torchvision_view,
)

pytestmark = pytest.mark.usefixtures("one_thread")  # thousands of tiny operations: threads would only wait


def test_jitter_in_every_order() -> None:
    """All 24 orders in one batch, strong factors so that clamping bites: within 1e-5 of the functions in turn."""
    order = torch.tensor(list(permutations(range(4)))).repeat(2, 1)
    image = torch.rand((48, 3, 9, 11), generator=seeded())
    factor = torch.rand((48, 3), generator=seeded(1)) * 2
    hue = torch.rand(48, generator=seeded(2)) - 0.5
    ours = jitter(image, factor, hue, order, 3)
    no_hue = jitter(image, factor, None, torch.stack([row[row != HUE] for row in order]), 3)
    for row in range(48):
        close(ours[row], torchvision_jitter(image[row], factor[row], float(hue[row]), order[row]))
        close(no_hue[row], torchvision_jitter(image[row], factor[row], 0.0, order[row][order[row] != HUE]))


def test_jitter_by_turns_is_jitter_by_slots() -> None:
    """The path that only a CPU takes against the one of other devices, with images that nothing is done to."""
    order = torch.tensor(list(permutations(range(4)))).repeat(2, 1)
    image = torch.rand((48, 3, 9, 11), generator=seeded())
    ordered = torch.rand((48, 4), generator=seeded(1)) * 2
    ordered.masked_fill_(order == HUE, 1)[::5] = 1
    hue = torch.rand(48, generator=seeded(2)) - 0.5
    hue[::5] = 0
    for planes in (image, image.transpose(0, 1).contiguous().transpose(0, 1)):
        kept = planes.clone()
        ours = _jitter_by_turns(planes, ordered, hue, order, 3)
        close(ours, _jitter_by_slots(planes, ordered, hue, order, 3))
        assert torch.equal(ours[::5], image[::5])
        assert torch.equal(planes, kept)


@pytest.mark.parametrize(
    "used", ["brightness", "contrast", "saturation", "brightness contrast", "hue", "saturation hue"]
)
def test_jitter_with_some_operations(used: str) -> None:
    """A view that changes only some of the four runs fewer slots and is still within 1e-5."""
    view = View(jitter=0.7, **{name: 0.5 for name in used.split()})
    pixels = random_pixels(32, 3, 16, 16)
    parameters = draw_parameters(view, sizes(16, 16, 32), seeded())
    assert parameters.blends == len(set(used.split()) - {"hue"})
    assert (parameters.factor is not None) == (parameters.order is not None) == (used != "hue")
    ours = apply_view(pixels, parameters, 16)
    for row in range(32):
        theirs = torchvision_view(pixels[row] / 255, parameters, row, 16, 3)
        if used == "hue":
            assert parameters.hue is not None
            theirs = F.adjust_hue(theirs, float(parameters.hue[row]))
        close(ours[row], theirs)


def test_hue() -> None:
    """Greys, primaries, two equal channels, black and white, at ±0.5, 0 and between: within 1e-5 of ``adjust_hue``."""
    levels = torch.tensor([0.0, 0.25, 0.5, 1.0])
    colours = torch.cartesian_prod(levels, levels, levels).T.reshape(1, 3, 8, 8)
    shift = torch.tensor([-0.5, -1 / 3, -0.1, 0.0, 1e-4, 1 / 6, 0.37, 0.5])
    for image in (colours.expand(8, -1, -1, -1), torch.rand((8, 3, 8, 8), generator=seeded())):
        ours = rotate_hue(image, shift)
        for row in range(8):
            close(ours[row], F.adjust_hue(image[row], float(shift[row])))


def test_grey_and_solarise() -> None:
    """Chosen images equal torchvision's within 1e-5 (0.5 itself is inverted), the others are untouched, exactly."""
    image = torch.rand((6, 3, 8, 8), generator=seeded())
    image[:, :, 0, 0] = 0.5
    chosen = torch.tensor([True, False, True, False, False, True])
    for ours, theirs in (
        (to_grey(image, chosen), F.rgb_to_grayscale(image, 3)),
        (solarise(image, chosen), F.solarize(image, 0.5)),
    ):
        close(ours[chosen], theirs[chosen])
        assert torch.equal(ours[~chosen], image[~chosen])
