from __future__ import annotations

import json

import pytest
import torch
import torchvision
from torch import nn

from interclr.models import BackboneConfig, described
from interclr.models.backbones import group_norm
from interclr.types import UserError


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
@pytest.mark.parametrize("stem", ["standard", "small"])
def test_state_dict_has_torchvisions_names_and_shapes(name: str, stem: str) -> None:
    with torch.device("meta"):
        ours = BackboneConfig(backbone=name, stem=stem).build()
        theirs = torchvision.models.get_model(name, weights=None)
    expected = {k: v.shape for k, v in theirs.state_dict().items() if not k.startswith("fc.")}
    found = {k: v.shape for k, v in ours.network.state_dict().items()}
    assert list(found) == list(expected)
    if stem == "small":
        assert found.pop("conv1.weight") == (64, 3, 3, 3)
        del expected["conv1.weight"]
    assert found == expected
    assert ours.features == theirs.fc.in_features


def test_a_narrow_resnet_at_full_width_is_torchvisions() -> None:
    """Same names, and the same function: a narrow network of width 64 would be torchvision's resnet18."""
    from interclr.models.backbones import NARROW, NarrowResNet

    theirs = torchvision.models.resnet18(weights=None).eval()
    ours = NarrowResNet(NARROW["resnet18"], 64, nn.BatchNorm2d).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))


@pytest.mark.parametrize(("stem", "side"), [("standard", 8), ("strided", 16), ("small", 32)])
def test_what_the_stems_leave_of_32_pixels(stem: str, side: int) -> None:
    network = BackboneConfig(backbone="resnet10", width=8, stem=stem).build().network
    x = network.maxpool(network.relu(network.bn1(network.conv1(torch.zeros(2, 3, 32, 32)))))
    assert x.shape == (2, 8, side, side)
    assert network.layer4(network.layer3(network.layer2(network.layer1(x)))).shape == (2, 64, side // 8, side // 8)


@pytest.mark.parametrize(("name", "width"), [("resnet10", 4), ("resnet10", 64), ("resnet18", 16), ("resnet34", 8)])
def test_narrow_widths(name: str, width: int) -> None:
    backbone = BackboneConfig(backbone=name, width=width, stem="strided").build()
    assert backbone.features == 8 * width
    assert backbone(torch.randn(2, 3, 32, 32)).shape == (2, 8 * width)
    convolutions = [m.out_channels for m in backbone.modules() if isinstance(m, nn.Conv2d)]
    assert (min(convolutions), max(convolutions)) == (width, 8 * width)


@pytest.mark.parametrize("width", range(4, 20))
def test_group_norm_at_any_width(width: int) -> None:
    for channels in (width, 2 * width, 4 * width, 8 * width):
        norm = group_norm(channels)
        assert channels % norm.num_groups == 0
        assert 1 <= norm.num_groups <= 8
    assert [group_norm(channels).num_groups for channels in (32, 64, 128, 256)] == [8, 8, 8, 8]


def test_norms() -> None:
    grouped = BackboneConfig(backbone="resnet10", width=8, norm="group").build()
    assert not any(isinstance(m, nn.BatchNorm2d) for m in grouped.modules())
    assert not grouped.state_dict().keys() & {"network.bn1.running_mean"}
    batch = BackboneConfig(backbone="resnet10", width=8).build()
    assert any(isinstance(m, nn.BatchNorm2d) for m in batch.modules())


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "squeezenet1_0", "vit_b_32", "efficientnet_b0", "densenet121"])
def test_other_torchvision_models_lose_their_classifier(name: str) -> None:
    if name == "squeezenet1_0":  # has no linear layer to cut off
        with pytest.raises(UserError, match="squeezenet1_0"):
            BackboneConfig(backbone=name).build()
        return
    with torch.device("meta"):
        backbone = BackboneConfig(backbone=name).build().eval()
        assert backbone(torch.empty(2, 3, 224, 224)).shape == (2, backbone.features)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backbone": "resnet51"}, "model.backbone='resnet51'"),
        ({"backbone": ""}, "model.backbone=''"),
        ({"backbone": "resnet50", "width": 32}, "model.width=32"),
        ({"backbone": "mobilenet_v3_small", "stem": "small"}, "model.stem=small"),
        ({"backbone": "mobilenet_v3_small", "norm": "group"}, "model.norm=group"),
        ({"backbone": "timm/no_such_network"}, "timm/no_such_network"),
    ],
)
def test_what_cannot_be_built_is_named(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        BackboneConfig(**settings).build()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_size_that_a_network_does_not_take_is_named() -> None:
    with torch.device("meta"):
        transformer = BackboneConfig(backbone="vit_b_16").build()
    with pytest.raises(UserError, match=r"vit_b_16 does not take images of 32×32 pixels: Wrong image height"):
        transformer.check_takes(32)
    assert transformer.training
    transformer.check_takes(224)
    BackboneConfig(backbone="resnet10", width=8).build().check_takes(8)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_with_second_classifiers_train_on_their_features_alone(name: str) -> None:
    with torch.device("meta"):
        backbone = BackboneConfig(backbone=name).build().train()
        assert backbone(torch.empty(2, 3, 96, 96)).shape == (2, backbone.features)


def test_a_network_is_rebuilt_from_its_description() -> None:
    config = BackboneConfig(backbone="resnet10", width=8, stem="strided", norm="group")
    backbone = config.build()
    backbone.image_size, backbone.mean = 40, (0.1, 0.2, 0.3)
    again = described(backbone.description())
    assert again is not None
    again.load_state_dict(backbone.state_dict())
    assert (again.config, again.image_size, again.mean, again.std) == (config, 40, (0.1, 0.2, 0.3), None)
    for foreign in ({}, {"interclr": "no JSON"}, {"interclr": "[]"}, {"interclr": '{"model": {"backbone": 3}}'}):
        assert described(foreign) is None
    odd = json.loads(backbone.description()["interclr"]) | {"mean": 5}
    assert described({"interclr": json.dumps(odd)}) is None


def test_weights_follow_the_seed() -> None:
    def build(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in BackboneConfig(backbone="resnet10", width=8).build().parameters()])

    assert torch.equal(build(1), build(1))
    assert not torch.equal(build(1), build(2))
