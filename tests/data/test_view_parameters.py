"""Parameters of views: distributions against torchvision's own draws.

They are rejected at p < 1e-3 (Kolmogorov-Smirnov, chi-square) with fixed seeds, probabilities beyond 4 standard
deviations.
"""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from scipy import stats
from torch import Tensor
from torchvision.transforms import v2

from interclr.data import view_parameters as module
from interclr.data.view_parameters import UNIFORMS, View, parameters_from_uniforms
from interclr.data.views import Views, centre_crop
from interclr.types import Images, UserError

from .like_torchvision import (
    FULL,
    MEAN,
    STD,
    draw_parameters,
    random_pixels,
    recipe,
    seeded,
    sizes,
)

pytestmark = pytest.mark.usefixtures("one_thread")  # thousands of tiny operations: threads would only wait


@pytest.mark.parametrize(
    "view",
    [
        View(),
        View(jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1, grey=0.2, blur=0.5, solarise=0.2),
        View(jitter=1, saturation=0.3, crop_scale=(0.9, 1.0), crop_ratio=(2, 3)),  # crops that hardly ever fit
        View(jitter=0.5, hue=0.5, blur=1),
    ],
)
def test_parameters_by_numpy_are_those_by_torch(view: View) -> None:
    uniforms = torch.rand((400, UNIFORMS), generator=seeded())
    size = torch.randint(3, 90, (400, 2), generator=seeded())
    ours = parameters_from_uniforms(view, uniforms, size)  # on a CPU by NumPy
    plain = module._parameters(torch, view, uniforms, uniforms.double(), size.double())
    for name, wanted in plain.items():
        found = getattr(ours, name)
        if isinstance(wanted, torch.Tensor):
            assert found.dtype == (torch.int64 if name in module.WHOLE else wanted.dtype), name
            torch.testing.assert_close(found.to(wanted.dtype), wanted, rtol=1e-6, atol=0, msg=name)
        else:
            assert found == wanted, name


@pytest.mark.parametrize(
    ("size", "scale", "ratio"),
    [
        ((32, 32), (0.2, 1.0), (3 / 4, 4 / 3)),
        ((500, 375), (0.08, 1.0), (3 / 4, 4 / 3)),
        ((200, 300), (0.2, 1.0), (3 / 4, 4 / 3)),
        ((64, 300), (0.2, 1.0), (3 / 4, 4 / 3)),  # about a third fall back
        ((300, 64), (0.2, 1.0), (3 / 4, 4 / 3)),
        ((100, 90), (0.6, 1.0), (2.0, 3.0)),  # mostly falls back, to a wide crop
    ],
)
def test_crop_distribution(size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]) -> None:
    """Area, ratio, position and edges of 1,500 windows against torchvision's: two-sample KS, p > 1e-3."""
    count = 1500
    transform = v2.RandomResizedCrop(8, scale, ratio)
    probe = torch.empty(3, *size)
    torch.manual_seed(0)
    drawn = [transform.make_params([probe]) for _ in range(count)]
    theirs = torch.tensor([[row[name] for name in ("top", "left", "height", "width")] for row in drawn]).double()
    view = View(crop_scale=scale, crop_ratio=ratio)
    parameters = draw_parameters(view, sizes(*size, count), seeded(1))
    ours = torch.stack([parameters.top, parameters.left, parameters.height, parameters.width], 1).double()
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= torch.tensor(size)).all()

    def measures(table: Tensor) -> dict[str, Tensor]:
        top, left, height, width = table.T
        return {"area": height * width, "ratio": width / height, "top": top, "left": left, "height": height}

    for (name, mine), other in zip(measures(ours).items(), measures(theirs).values(), strict=True):
        assert stats.ks_2samp(mine.numpy(), other.numpy()).pvalue > 1e-3, name


@pytest.mark.parametrize("size", [(10, 1000), (1000, 10), (1, 40), (40, 1), (1, 1), (31, 1001)])
def test_crop_fallback(size: tuple[int, int]) -> None:
    """Extreme shapes with large crops can only fall back: exactly torchvision's central window."""
    parameters = draw_parameters(View(crop_scale=(0.9, 1.0)), sizes(*size, 50), seeded())
    expected = v2.RandomResizedCrop(8, (0.9, 1.0)).make_params([torch.empty(3, *size)])
    for name, value in expected.items():
        assert (getattr(parameters, name) == value).all(), name


def test_jitter_distribution() -> None:
    """Factors uniform over torchvision's ranges (KS), the 24 orders equally frequent (chi-square): p > 1e-3."""
    view = View(jitter=1, brightness=0.4, contrast=0.8, saturation=1.5, hue=0.1)
    parameters = draw_parameters(view, sizes(8, 8, 6000), seeded(5))
    theirs = v2.ColorJitter(0.4, 0.8, 1.5, 0.1)
    assert parameters.factor is not None
    assert parameters.hue is not None
    assert parameters.order is not None
    drawn = torch.cat((parameters.factor, parameters.hue[:, None]), 1)
    for column, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        low, high = getattr(theirs, name)
        values = drawn[:, column]
        assert values.min() >= low
        assert values.max() <= high
        assert stats.kstest(values.numpy(), stats.uniform(low, high - low).cdf).pvalue > 1e-3, name
    correlation = torch.corrcoef(drawn.T) - torch.eye(4)
    assert correlation.abs().max() < 4 / math.sqrt(6000)
    code = (parameters.order * torch.tensor([64, 16, 4, 1])).sum(1)
    _, counts = code.unique(return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_probabilities() -> None:
    """Each operation is applied as often as asked, within 4 binomial standard deviations; 0 and 1 exactly."""
    count = 4000
    parameters = draw_parameters(FULL, sizes(16, 16, count), seeded(7))
    assert parameters.factor is not None
    assert parameters.hue is not None
    assert parameters.blur_sigma is not None
    jittered = (parameters.factor != 1).any(1)
    assert torch.equal(jittered, parameters.hue != 0)
    blurred = parameters.blur_sigma > 0
    happened = {"flip": parameters.flip, "jitter": jittered, "grey": parameters.grey}
    happened |= {"blur": blurred, "solarise": parameters.solarise}
    for name, chosen in happened.items():
        expected = getattr(FULL, name)
        assert chosen is not None
        deviation = math.sqrt(expected * (1 - expected) / count)
        assert abs(chosen.double().mean().item() - expected) < 4 * deviation, name
    assert stats.kstest(parameters.blur_sigma[blurred].numpy(), stats.uniform(0.1, 1.9).cdf).pvalue > 1e-3
    always = draw_parameters(View(flip=1, grey=1, blur=1, solarise=1), sizes(16, 16, count), seeded())
    assert always.grey is not None
    assert always.solarise is not None
    assert always.blur_sigma is not None
    assert all(chosen.all() for chosen in (always.flip, always.grey, always.solarise, always.blur_sigma > 0))
    never = draw_parameters(View(flip=0, brightness=0.4, hue=0.1), sizes(16, 16, count), seeded())
    assert not never.flip.any()
    assert never.factor is never.hue is never.order is never.grey is never.blur_sigma is never.solarise is None


def test_npid_jitter() -> None:
    """NPIDv2: saturation factor in [0, 2], hue in [−0.5, 0.5], always, and nothing else."""
    (view,) = recipe("npidv2")
    parameters = draw_parameters(view, sizes(16, 16, 2000), seeded())
    assert parameters.factor is not None
    assert parameters.hue is not None
    assert (parameters.factor[:, :2] == 1).all()
    assert parameters.factor[:, 2].min() < 0.01
    assert parameters.factor[:, 2].max() > 1.99
    assert parameters.hue.min() < -0.49
    assert parameters.hue.max() > 0.49


def test_parameters_are_per_image() -> None:
    """The same image repeated gets as many different views, and the two views of an image differ."""
    images = Images(torch.arange(16), random_pixels(1, 3, 24, 24).repeat(16, 1, 1, 1))
    first, second = Views([FULL, FULL], 24, MEAN, STD)(images, seeded()).views
    assert len(torch.cat((first, second)).flatten(1).unique(dim=0)) == 32


def test_seed_decides() -> None:
    images = Images(torch.arange(8), random_pixels(8, 3, 24, 24))
    make = Views(recipe("byol"), 24, MEAN, STD)
    once, again, other = make(images, seeded(1)), make(images, seeded(1)), make(images, seeded(2))
    for a, b, c in zip(once.views, again.views, other.views, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_rows_of_a_global_batch() -> None:
    """Ranks that hold rows of a batch make the views that one process would: within 1e-6, parameters exactly."""
    size = torch.randint(10, 41, (12, 2), generator=seeded())
    images = Images(torch.arange(12), random_pixels(12, 3, 40, 40), size)
    make = Views(recipe("byol"), 24, MEAN, STD)
    whole = make(images, seeded(4))
    for first, count in ((0, 4), (4, 7), (11, 1)):
        rows = slice(first, first + count)
        part = Images(images.index[rows], images.pixels[rows], size[rows])
        generator = seeded(4)
        for mine, expected in zip(make(part, generator, total=12, first=first).views, whole.views, strict=True):
            assert torch.allclose(mine, expected[rows], atol=1e-5, rtol=0)
        spent = seeded(4)
        make(images, spent)
        assert torch.equal(generator.get_state(), spent.get_state())  # ranks stay in step
        drawn = draw_parameters(FULL, size[rows], seeded(4), 12, first)
        assert torch.equal(drawn.top, draw_parameters(FULL, size, seeded(4)).top[rows])
    with pytest.raises(ValueError, match="global batch of 12"):
        make(part, seeded(), total=12, first=12)


def test_operations_do_not_disturb_each_other() -> None:
    """Switching colour and blur off leaves crops and flips as they were."""
    uniforms, size = torch.rand((20, UNIFORMS), generator=seeded()), sizes(32, 48, 20)
    full = parameters_from_uniforms(FULL, uniforms, size)
    plain = parameters_from_uniforms(View(crop_scale=FULL.crop_scale), uniforms, size)
    for name in ("top", "left", "height", "width", "flip"):
        assert torch.equal(getattr(full, name), getattr(plain, name))


def test_extreme_uniforms_stay_inside() -> None:
    """0 and the largest number below 1 give windows within the image."""
    for extreme in (0.0, 1 - 2**-24):
        size = torch.tensor([[1, 1], [2, 3], [4000, 3], [3000, 4000], [32, 32]])
        drawn = parameters_from_uniforms(FULL, torch.full((5, UNIFORMS), extreme), size)
        assert (torch.stack((drawn.top, drawn.left)) >= 0).all()
        assert (torch.stack((drawn.height, drawn.width)) >= 1).all()
        assert (torch.stack((drawn.top + drawn.height, drawn.left + drawn.width), 1) <= size).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop_scale": (1.0, 0.2)}, r"the range must be \(low, high\), but 1.0 > 0.2"),
        ({"crop_ratio": (2, 1)}, r"the range must be \(low, high\)"),
        ({"blur_sigma": (2.0, 0.1)}, r"the range must be \(low, high\)"),
        ({"crop_scale": (0.2, 1.1)}, "less than or equal to 1"),
        ({"crop_scale": (0.0, 1.0)}, "greater than 0"),
        ({"hue": 0.6}, "less than or equal to 0.5"),
        ({"flip": 1.5}, "less than or equal to 1"),
        ({"brightness": -0.1}, "greater than or equal to 0"),
        ({"blur_kernel": 4}, "odd size, not 4"),
        ({"blur_kernel": -1}, "greater than or equal to 1"),
        ({"sharpen": 1}, "Extra inputs are not permitted"),
    ],
)
def test_invalid_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        View(**settings)  # type: ignore[arg-type]


def test_kernel_follows_the_size() -> None:
    assert [View().kernel(size) for size in (8, 32, 64, 96, 224)] == [3, 3, 7, 9, 23]
    assert View(blur_kernel=5).kernel(224) == 5
    with pytest.raises(UserError, match="too wide for views of 8 pixels"):
        Views([View(blur=0.5, blur_kernel=23)], 8, MEAN, STD)
    with pytest.raises(ValueError, match="resize_ratio"):
        centre_crop(Images(torch.arange(1), random_pixels(1, 3, 8, 8)), 8, MEAN, STD, resize_ratio=1.5)
