"""torchvision's own transforms, image by image, and what the tests of views share."""

from __future__ import annotations

from importlib import resources

import torch
import yaml
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from interclr.data.view_parameters import View, ViewParameters, draw_uniforms, parameters_from_uniforms

TOLERANCE = 1e-5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECIPES = ("npidv2", "mocov2", "byol", "simclr", "npidv2-cifar")
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


def draw_parameters(
    view: View, size: Tensor, generator: torch.Generator, total: int | None = None, first: int = 0
) -> ViewParameters:
    """Parameters for the images of ``size`` (B, 2), rows ``first`` to ``first + B`` of a global batch of ``total``."""
    return parameters_from_uniforms(view, draw_uniforms(size, generator, total, first), size)


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
