"""Batched views against torchvision, image by image with the same parameters: within 1e-5 (range 0..1, float32)."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from interclr.data import views as module
from interclr.data.view_parameters import UNIFORMS, View, parameters_from_uniforms
from interclr.data.views import Views, apply_view, blur_matrix, centre_crop, image_sizes, resample, resize_weights
from interclr.types import Images

from .like_torchvision import (
    FULL,
    MEAN,
    RECIPES,
    STD,
    TOLERANCE,
    close,
    draw_parameters,
    random_pixels,
    recipe,
    seeded,
    sizes,
    torchvision_view,
)

pytestmark = pytest.mark.usefixtures("one_thread")  # thousands of tiny operations: threads would only wait


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
    assert len(kinds) == (1 if name.startswith("npidv2") else 2)
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


def test_centre_crop_of_an_image_does_not_depend_on_its_neighbours() -> None:
    pixels = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    pixels[0, :, :32, :32] = random_pixels(1, 3, 32, 32)[0]
    pixels[1] = random_pixels(1, 3, 64, 64)[0]
    beside = centre_crop(Images(torch.arange(2), pixels, torch.tensor([[32, 32], [64, 64]])), 32, MEAN, STD)
    alone = centre_crop(Images(torch.arange(1), pixels[:1, :, :32, :32].contiguous()), 32, MEAN, STD)
    close(beside[:1], alone)


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
