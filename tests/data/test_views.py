"""Batched views against torchvision, image by image with the same parameters; distributions against its own draws.

Tolerances: pixels within 1e-5 of torchvision's float transforms (range 0..1, float32); distributions are rejected at
p < 1e-3 (Kolmogorov-Smirnov, chi-square) with fixed seeds, probabilities beyond 4 standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import resources
from itertools import permutations

import pytest
import torch
import yaml
from pydantic import ValidationError
from scipy import stats
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from interclr.data import views as module
from interclr.data.colour import HUE, _jitter_by_slots, _jitter_by_turns, jitter, rotate_hue, solarise, to_grey
from interclr.data.views import (
    UNIFORMS,
    View,
    ViewParameters,
    Views,
    apply_view,
    blur_matrix,
    centre_crop,
    draw_parameters,
    image_sizes,
    parameters_from_uniforms,
    resample,
    resize_weights,
)
from interclr.types import Images, UserError

TOLERANCE = 1e-5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECIPES = ("npidv2", "mocov2", "byol", "simclr", "cifar", "plain")
FULL = View(
    jitter=0.8,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.1,
    grey=0.2,
    blur=0.5,
    solarise=0.3,
    crop_scale=(0.08, 1),
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(seed))


def recipe(name: str) -> list[View]:
    text = resources.files("interclr").joinpath(f"recipes/views/{name}.yaml").read_text()
    return [View.model_validate(view) for view in yaml.safe_load(text)["views"]]


def sizes(height: int, width: int, count: int) -> Tensor:
    return torch.tensor([[height, width]]).expand(count, 2)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max().item()
    assert error <= TOLERANCE, f"differs from torchvision by {error:.2e}"


def torchvision_jitter(image: Tensor, factor: Tensor, hue: float, order: Tensor) -> Tensor:
    steps = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    values = [*factor.tolist(), hue]
    for step in order.tolist():
        image = steps[step](image, values[step])
    return image


def torchvision_view(image: Tensor, parameters: ViewParameters, row: int, size: int, kernel: int) -> Tensor:
    """One image (3, height, width) in float through torchvision's own functions."""
    window = [int(getattr(parameters, name)[row]) for name in ("top", "left", "height", "width")]
    image = F.resized_crop(image, *window, [size, size], antialias=True)
    if parameters.flip[row]:
        image = F.horizontal_flip(image)
    if parameters.factor is not None and parameters.order is not None:
        hue = 0.0 if parameters.hue is None else float(parameters.hue[row])
        image = torchvision_jitter(image, parameters.factor[row], hue, parameters.order[row])
    if parameters.grey is not None and parameters.grey[row]:
        image = F.rgb_to_grayscale(image, 3)
    if parameters.blur_sigma is not None and parameters.blur_sigma[row] > 0:
        image = F.gaussian_blur(image, [kernel, kernel], [float(parameters.blur_sigma[row])] * 2)
    if parameters.solarise is not None and parameters.solarise[row]:
        image = F.solarize(image, 0.5)
    return image


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Pixels


@pytest.mark.parametrize(
    ("canvas", "output"),
    [((32, 32), 32), ((40, 40), 96), ((97, 61), 32), ((50, 180), 64), ((300, 260), 224), ((7, 5), 16)],
)
def test_crop_resize_flip(canvas: tuple[int, int], output: int) -> None:
    """Enlarging and shrinking, flipped and not, bytes and floats: within 1e-5 of ``resized_crop``."""
    pixels = random_pixels(12, 3, *canvas)
    parameters = draw_parameters(View(crop_scale=(0.05, 1)), sizes(*canvas, 12), seeded(1))
    assert 0 < parameters.flip.sum() < 12
    ours = apply_view(pixels, parameters, output)
    close(apply_view(pixels / 255, parameters, output), ours)
    for row in range(12):
        close(ours[row], torchvision_view(pixels[row] / 255, parameters, row, output, 3))


def test_padding_does_not_leak() -> None:
    """Images of different sizes on one canvas: within 1e-5 of the image alone; padding has exactly no effect."""
    size = torch.tensor([[20, 50], [64, 48], [33, 33], [64, 90], [1, 90], [12, 1]]).repeat(4, 1)
    pixels = random_pixels(24, 3, 64, 90)
    rows, columns = torch.arange(64)[:, None], torch.arange(90)
    inside = (rows < size[:, 0, None, None]) & (columns < size[:, 1, None, None])
    black, white = pixels * inside[:, None], torch.where(inside[:, None], pixels, 255)
    parameters = draw_parameters(View(), size, seeded())
    ours = apply_view(black, parameters, 40)
    assert torch.equal(ours, apply_view(white, parameters, 40))
    for row in range(24):
        alone = pixels[row, :, : size[row, 0], : size[row, 1]] / 255
        close(ours[row], torchvision_view(alone, parameters, row, 40, 3))
    everywhere = Images(torch.arange(24), black, size), Images(torch.arange(24), white, size)
    assert torch.equal(*(centre_crop(images, 40, MEAN, STD) for images in everywhere))


def test_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large canvases are resampled a few images at a time: within 1e-6, whatever the number."""
    pixels = random_pixels(7, 3, 30, 40)
    parameters = draw_parameters(FULL, sizes(30, 40, 7), seeded())
    whole = apply_view(pixels, parameters, 24)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * 3 * 30 * 40)
    assert torch.allclose(whole, apply_view(pixels, parameters, 24), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32, torch.float64])
def test_enlarging_is_resampling_by_matrices(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short cut that a CPU takes where no image shrinks against the matrices, on a padded canvas, down to 1 × 1."""
    pixels = random_pixels(9, 3, 20, 28)
    pixels = pixels if kind == torch.uint8 else pixels.to(kind) / 255
    size = torch.tensor([[20, 28], [1, 1], [20, 3], [2, 28], [7, 9]] + [[20, 28]] * 4)
    view = View(crop_scale=(0.05, 1))
    parameters = draw_parameters(view, size, seeded())
    short = apply_view(pixels, parameters, 28)
    centre = None if kind != torch.uint8 else centre_crop(Images(torch.arange(9), pixels, size), 28, MEAN, STD)
    monkeypatch.setattr(module, "_enlarge", by_matrices)
    close(short, apply_view(pixels, parameters, 28))
    if centre is not None:
        theirs = centre_crop(Images(torch.arange(9), pixels, size), 28, MEAN, STD)
        assert torch.allclose(centre, theirs, atol=TOLERANCE / min(STD), rtol=0)


def by_matrices(
    pixels: Tensor, window: tuple[Tensor, ...], scale: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]
) -> Tensor:
    top, left, height, width = (value[:, None].to(pixels.dtype) for value in window)
    down = resize_weights(pixels.shape[2], top, height, scale[0][:, None].to(pixels.dtype), output[0].to(pixels.dtype))
    across = resize_weights(
        pixels.shape[3], left, width, scale[1][:, None].to(pixels.dtype), output[1].to(pixels.dtype)
    )
    return resample(pixels, down, across)


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


@pytest.mark.parametrize(("size", "kernel"), [(32, 3), (32, 23), (224, 23), (12, 23), (5, 1)])
def test_blur(size: int, kernel: int) -> None:
    """Within 1e-5 of ``gaussian_blur``, also where the kernel reaches over both borders; σ = 0 changes nothing."""
    image = torch.rand((4, 3, size, size), generator=seeded())
    sigma = torch.tensor([0.0, 0.1, 0.9, 2.0])
    matrix = blur_matrix(sigma, size, kernel)
    assert torch.equal(matrix[0], torch.eye(size))
    ours = resample(image, matrix, matrix)
    assert torch.equal(ours[0], image[0])
    for row in range(1, 4):
        close(ours[row], F.gaussian_blur(image[row], [kernel, kernel], [float(sigma[row])] * 2))


@pytest.mark.parametrize("name", RECIPES)
def test_whole_pipeline(name: str) -> None:
    """Every recipe, 32 images with padding, normalised: within 1e-5 of torchvision before dividing by std.

    Solarise is discontinuous at 0.5, so pixels that torchvision has within 1e-5 of it are left out.
    """
    kinds = recipe(name)
    assert len(kinds) == (1 if name == "npidv2" else 2)
    size = torch.tensor([[40, 56], [48, 30]]).repeat(16, 1)
    images = Images(torch.arange(32), random_pixels(32, 3, 48, 56), size, torch.arange(32) % 5)
    batch = Views(kinds, 36, MEAN, STD)(images, seeded(3))
    assert torch.equal(batch.index, images.index)
    assert batch.label is images.label
    assert len(batch.views) == len(kinds)
    generator = seeded(3)
    for view, ours in zip(kinds, batch.views, strict=True):
        assert ours.is_contiguous()
        parameters = draw_parameters(view, size, generator)
        for row in range(32):
            alone = images.pixels[row, :, : size[row, 0], : size[row, 1]] / 255
            theirs = torchvision_view(alone, parameters, row, 36, view.kernel(36))
            restored = ours[row] * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
            edge = (theirs - 0.5).abs() < TOLERANCE if parameters.solarise is not None else torch.zeros(())
            close(torch.where(edge.bool(), theirs, restored), theirs)


def test_double_precision() -> None:
    """In float64 the resampling agrees with torchvision's float64 within 1e-12."""
    pixels = torch.rand((6, 3, 50, 70), generator=seeded(), dtype=torch.float64)
    parameters = draw_parameters(View(blur=1), sizes(50, 70, 6), seeded())
    ours = apply_view(pixels, parameters, 32, 5)
    for row in range(6):
        theirs = torchvision_view(pixels[row], parameters, row, 32, 5)
        assert (ours[row] - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_depends_on_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data ("meta") go through: no shape depends on a value and no value is read back by the host."""
    pixels = torch.empty((6, 3, 40, 50), dtype=torch.uint8, device="meta")
    size = torch.empty((6, 2), dtype=torch.int64, device="meta")
    for view in recipe(name):
        parameters = parameters_from_uniforms(view, torch.empty((6, UNIFORMS), device="meta"), size)
        assert apply_view(pixels, parameters, 32, 5).shape == (6, 3, 32, 32)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # knows no "meta"
    index = torch.empty(6, dtype=torch.int64, device="meta")
    assert centre_crop(Images(index, pixels, size), 32, MEAN, STD).shape == (6, 3, 32, 32)


def test_output_dtype() -> None:
    images = Images(torch.arange(4), random_pixels(4, 3, 16, 16))
    (low,) = Views([View()], 16, MEAN, STD, torch.bfloat16)(images, seeded()).views
    (high,) = Views([View()], 16, MEAN, STD)(images, seeded()).views
    with torch.autocast("cpu", torch.bfloat16):
        (inside,) = Views([View()], 16, MEAN, STD)(images, seeded()).views
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, high.bfloat16())
    assert torch.equal(inside, high)


# Evaluation


@pytest.mark.parametrize("canvas", [(300, 256), (256, 256), (100, 333), (90, 40), (257, 400)])
@pytest.mark.parametrize("output", [64, 224])
def test_centre_crop(canvas: tuple[int, int], output: int) -> None:
    """Within 1e-5 of torchvision's Resize and CenterCrop (before dividing by std); odd margins included."""
    images = Images(torch.arange(2), random_pixels(2, 3, *canvas))
    ours = centre_crop(images, output, (0, 0, 0), (1, 1, 1))
    for row in range(2):
        theirs = F.resize(images.pixels[row] / 255, [round(output / 0.875)], antialias=True)
        close(ours[row], F.center_crop(theirs, [output]))


def test_centre_crop_leaves_small_images_alone() -> None:
    """An image that fills an S × S canvas is only normalised (within 1e-6), also beside smaller ones."""
    pixels = random_pixels(3, 3, 32, 32)
    expected = F.normalize(pixels / 255, MEAN, STD)
    assert torch.allclose(centre_crop(Images(torch.arange(3), pixels), 32, MEAN, STD), expected, atol=1e-6, rtol=0)
    size = torch.tensor([[32, 32], [20, 32], [32, 32]])
    mixed = centre_crop(Images(torch.arange(3), pixels, size), 32, (0, 0, 0), (1, 1, 1))
    assert torch.allclose(mixed[0::2], pixels[0::2] / 255, atol=1e-6, rtol=0)
    close(mixed[1], F.center_crop(F.resize(pixels[1, :, :20] / 255, [37], antialias=True), [32]))


# Parameters


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


# Settings


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


def test_sizes_default_to_the_canvas() -> None:
    assert image_sizes(Images(torch.arange(2), random_pixels(2, 3, 5, 9))).tolist() == [[5, 9], [5, 9]]


def test_products_in_half_precision_are_off_by_a_fraction_of_a_grey_level() -> None:
    view = View(blur=0.5, jitter=0.0)
    pixels = torch.randint(0, 256, (6, 3, 60, 50), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = Images(torch.arange(6), pixels)
    made = [
        Views([view], 32, (0, 0, 0), (1, 1, 1), product=product)(images, torch.Generator().manual_seed(1)).views[0]
        for product in (None, torch.float16)
    ]
    difference = (made[0] - made[1]).abs()
    assert 0 < difference.max() < 1 / 255
    assert difference.mean() < 1 / 255 / 8


def test_canvases_of_many_sizes_need_few_programs() -> None:
    """A streamed set changes its canvas from batch to batch: compiled views must not start anew each time."""
    torch._dynamo.reset()
    programs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal programs
        programs += 1
        return graph.forward

    views = Views([View(jitter=0.0)], 16, (0, 0, 0), (1, 1, 1), product=torch.float16)
    make = torch.compile(views._maker(views.views[0]), backend=count)
    for side in range(40, 100, 6):
        pixels = torch.zeros(3, 3, side, side + 4, dtype=torch.uint8)
        make(pixels, torch.full((3, 2), side), torch.rand(3, UNIFORMS))
    assert programs <= 3
