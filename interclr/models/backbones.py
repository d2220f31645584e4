"""Backbones by name: torchvision's, timm's (``timm/NAME``), and narrow ResNets for small images and small machines."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import torch
import torchvision
from pydantic import Field, ValidationError
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from interclr.types import Config, UserError

# Depths torchvision has no name for, or that we also offer at another width. Keys keep torchvision's parameter names.
# Three stages, as the ResNets of the CIFAR experiments of He et al. 2016, leave ``layer4`` empty.
NARROW: dict[str, list[int]] = {
    "resnet8": [1, 1, 1],
    "resnet10": [1, 1, 1, 1],
    "resnet18": [2, 2, 2, 2],
    "resnet34": [3, 4, 6, 3],
}
OURS = ("resnet8", "resnet10")
WITH_SECOND_CLASSIFIERS = ("googlenet", "inception_v3")  # for training, which they would return beside the features
FULL_WIDTH = 64


class NarrowResNet(ResNet):  # type: ignore[misc]
    """A ResNet of basic blocks whose first stage has ``width`` channels; same parameter names as torchvision's."""

    def __init__(self, blocks: list[int], width: int, norm_layer: Any) -> None:
        nn.Module.__init__(self)
        self._norm_layer = norm_layer
        self.inplanes, self.dilation, self.groups, self.base_width = width, 1, 1, FULL_WIDTH
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = norm_layer(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self._make_layer(BasicBlock, width, blocks[0])
        self.layer2 = self._make_layer(BasicBlock, width * 2, blocks[1], stride=2)
        self.layer3 = self._make_layer(BasicBlock, width * 4, blocks[2], stride=2)
        four = len(blocks) == 4
        self.layer4 = self._make_layer(BasicBlock, width * 8, blocks[3], stride=2) if four else nn.Identity()
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(self.inplanes, 1000)


def group_norm(channels: int) -> nn.GroupNorm:
    """Batch-independent normalisation: for tiny batches, and where ranks must compute exactly what one process does."""
    groups = next(g for g in range(max(1, min(8, channels // 4)), 0, -1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


class BackboneConfig(Config):
    """``backbone``: a torchvision ResNet, ``resnet8``, ``resnet10``, other torchvision models or ``timm/NAME``."""

    backbone: str = "resnet50"
    stem: Literal["standard", "strided", "small"] = "standard"
    width: Annotated[int, Field(ge=4)] = FULL_WIDTH
    norm: Literal["batch", "sync", "group"] = "batch"

    def build(self) -> Backbone:
        if self.backbone.startswith("timm/"):
            network, features = _timm(self.backbone.removeprefix("timm/"))
        else:
            network, features = _torchvision(self)
        backbone = Backbone(network, features)
        backbone.config = self
        return backbone


class Backbone(nn.Module):
    """A network that maps images (B, 3, S, S) to ``features`` numbers each."""

    config: BackboneConfig | None = None  # what it was built by, and the images it was trained on, where known
    image_size: int | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None

    def __init__(self, network: nn.Module, features: int) -> None:
        super().__init__()
        self.network = network
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.network(images)
        return output

    def check_takes(self, side: int) -> None:
        """An error where it cannot read images of ``side`` pixels: a vision transformer has one size."""
        if isinstance(self.network, ResNet):
            return
        training = self.training
        try:
            with torch.no_grad():
                self.eval()(torch.zeros(1, 3, side, side, device=next(self.parameters()).device))
        except (AssertionError, RuntimeError, ValueError) as error:
            name = "this backbone" if self.config is None else self.config.backbone
            text = " ".join(str(error).split())[:200]
            raise UserError(f"{name} does not take images of {side}×{side} pixels: {text}") from None
        finally:
            self.train(training)

    def description(self) -> dict[str, str]:
        """What a file of its weights should tell of it, as safetensors keeps it: ``described`` reads that."""
        if self.config is None:
            return {}
        about = {key: getattr(self, key) for key in ("image_size", "mean", "std")}
        return {"interclr": json.dumps({"model": self.config.model_dump(mode="json"), **about})}


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = values
    return float(red), float(green), float(blue)


def described(metadata: dict[str, str]) -> Backbone | None:
    """A backbone without its weights, as ``Backbone.description`` has it; None where there is none."""
    try:
        about = json.loads(metadata["interclr"])
        known = BackboneConfig.model_fields.keys()
        config = BackboneConfig(**{key: value for key, value in about["model"].items() if key in known})
        size = about.get("image_size")
        mean, std = (None if about.get(key) is None else _three(about[key]) for key in ("mean", "std"))
    except (KeyError, TypeError, AttributeError, ValueError, ValidationError):
        return None
    backbone = config.build()  # where that cannot be built here, it says why
    backbone.image_size = size
    backbone.mean, backbone.std = mean, std
    return backbone


def _torchvision(config: BackboneConfig) -> tuple[nn.Module, int]:
    norm = group_norm if config.norm == "group" else nn.BatchNorm2d
    if config.backbone in NARROW and (config.backbone in OURS or config.width != FULL_WIDTH):
        network: Any = NarrowResNet(NARROW[config.backbone], config.width, norm)
        _initialise(network)
    else:
        network = _named(config.backbone, norm)
        if config.width != FULL_WIDTH:
            raise UserError(
                f"model.width={config.width} works with {', '.join(NARROW)} only, not with {config.backbone}"
            )
    if isinstance(network, ResNet):
        _replace_stem(network, config.stem)
        features = network.fc.in_features
        network.fc = nn.Identity()
        return network, features
    if config.stem != "standard":
        raise UserError(f"model.stem={config.stem} works with ResNets only, not with {config.backbone}")
    if config.norm == "group":
        raise UserError(f"model.norm=group works with ResNets only, not with {config.backbone}")
    return network, _cut_classifier(network, config.backbone)


def _named(name: str, norm: Any) -> Any:
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise UserError(f"model.backbone={name!r} is unknown: use {', '.join(OURS)}, a torchvision model or timm/NAME")
    if name in WITH_SECOND_CLASSIFIERS:
        return torchvision.models.get_model(name, weights=None, aux_logits=False, init_weights=True)
    if name.startswith(("resnet", "resnext", "wide_resnet")):
        return torchvision.models.get_model(name, weights=None, norm_layer=norm)
    return torchvision.models.get_model(name, weights=None)


def _cut_classifier(network: nn.Module, name: str) -> int:
    """Replace the last linear layer by the identity and return how many features reach it."""
    for attribute in ("fc", "classifier", "head", "heads"):
        head = getattr(network, attribute, None)
        linear = [module for module in head.modules() if isinstance(module, nn.Linear)] if head is not None else []
        if linear:
            assert head is not None
            parent = next((m for m in head.modules() if any(child is linear[-1] for child in m.children())), None)
            if parent is None:
                setattr(network, attribute, nn.Identity())
            else:
                key = next(key for key, child in parent.named_children() if child is linear[-1])
                setattr(parent, key, nn.Identity())
            return linear[-1].in_features
    raise UserError(f"model.backbone={name!r} has no classifier that can be cut off; use a ResNet or timm/NAME")


def _timm(name: str) -> tuple[nn.Module, int]:
    try:
        import timm
    except ImportError as error:
        raise UserError(f"model.backbone=timm/{name} needs timm: pip install 'interclr[timm]'") from error
    try:
        network = timm.create_model(name, pretrained=False, num_classes=0)
    except RuntimeError as error:
        raise UserError(f"model.backbone=timm/{name}: {error}") from error
    features: Any = network.num_features
    return network, int(features)


def _replace_stem(network: Any, stem: str) -> None:
    """``small``: 3×3 convolution, stride 1, no max-pool (32 px). ``strided``: the same with stride 2 (cheaper)."""
    if stem == "standard":
        return
    network.conv1 = nn.Conv2d(3, network.conv1.out_channels, 3, 1 if stem == "small" else 2, 1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()


def _initialise(network: nn.Module) -> None:
    """Torchvision's ResNet initialisation."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
