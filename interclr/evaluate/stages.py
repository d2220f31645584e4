"""What a frozen ResNet computes on its way: every stage's map, pooled to about 9,000 numbers, from one forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interclr.models import Backbone

STEM = "stem"
RESNET = {STEM: "maxpool", "layer1": "layer1", "layer2": "layer2", "layer3": "layer3", "layer4": "layer4"}
LARGEST = 65504.0  # of float16


def grid_of(channels: int, dims: int) -> int:
    """Side g of a grid with C·g·g about ``dims``: 12, 6, 4, 3, 2 for ResNet-50 and 9,000 (Goyal et al. 2019)."""
    return max(1, round(math.sqrt(dims / channels)))


def stage_modules(network: nn.Module) -> dict[str, nn.Module]:
    """Stem and stages of torchvision's and timm's ResNets, by name; none for other networks.

    A stage without parameters (``layer4`` of the three-stage ResNets) is left out: it repeats the one before.
    """
    found = {stage: getattr(network, attribute, None) for stage, attribute in RESNET.items()}
    if not all(isinstance(module, nn.Module) for module in found.values()):
        return {}
    modules = {stage: module for stage, module in found.items() if module is not None}
    return {s: m for s, m in modules.items() if s == STEM or next(m.parameters(), None) is not None}


class Stages(nn.Module):
    """Maps images to the pooled features of all stages side by side, (B, ΣD); ``parts`` says which columns are whose.

    A network that is no ResNet has one stage, ``final``: its output. ``final`` may be asked for beside the others too.
    Values are rounded to float16, as the cache keeps them, so that results do not depend on whether it is used.
    """

    def __init__(self, backbone: Backbone, image_size: int, dims: int, final: bool, device: torch.device) -> None:
        super().__init__()
        self.backbone, self.dims = backbone.to(device), dims
        self.modules_of = stage_modules(backbone.network)
        self.final = final or not self.modules_of
        self._seen: dict[str, Tensor] = {}
        self.parts: dict[str, slice] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self(torch.zeros(2, 3, image_size, image_size, device=device))  # once, to learn the sizes

    def _keep(self, stage: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            # Pooled at once: a later in-place operation may change the map, and maps are large.
            grid, (height, width) = grid_of(output.shape[1], self.dims), output.shape[2:]
            pooled = F.adaptive_avg_pool2d(output.float(), (min(grid, height), min(grid, width)))
            self.shapes[stage] = tuple(pooled.shape[1:])
            self._seen[stage] = pooled.flatten(1)

        return hook

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        was_training = self.backbone.training
        hooks = [module.register_forward_hook(self._keep(stage)) for stage, module in self.modules_of.items()]
        if was_training:
            self.backbone.eval()
        try:
            output = self.backbone(images)
        finally:
            for hook in hooks:
                hook.remove()
            if was_training:
                self.backbone.train()
        if self.final:
            self._seen["final"] = output.float()
            self.shapes["final"] = tuple(output.shape[1:])
        features, self._seen = self._seen, {}
        if not self.parts:
            starts = 0
            for stage, columns in features.items():
                self.parts[stage] = slice(starts, starts := starts + columns.shape[1])
        return torch.cat(list(features.values()), 1).clamp(-LARGEST, LARGEST).half()

    @property
    def width(self) -> int:
        return max(int(part.stop) for part in self.parts.values())
