"""Exported weights read back: every tensor, under the names the other library gives them."""

from __future__ import annotations

import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torchvision.models.resnet import resnet18, resnet50

from interclr.export import detectron2_name, export
from interclr.models import Backbone, BackboneConfig
from interclr.types import UserError


def backbone(name: str = "resnet18", **changes: Any) -> Backbone:
    """With statistics that are not the initial ones."""
    torch.manual_seed(0)
    built = BackboneConfig.model_validate({"backbone": name, **changes}).build()
    for tensor in built.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.1, 1)
        else:
            tensor.fill_(7)
    return built


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("name", "constructor"), [("resnet18", resnet18), ("resnet50", resnet50)])
def test_torchvision_reads_it(tmp_path: Path, name: str, constructor: Any) -> None:
    mine = backbone(name)
    exported = export(mine, tmp_path / "weights", "torchvision")
    assert exported.path == tmp_path / "weights.safetensors"
    network = constructor()
    network.fc = torch.nn.Identity()
    network.load_state_dict(load_file(exported.path))  # strict
    assert same(network.state_dict(), mine.network.state_dict())
    assert exported.tensors == len(mine.network.state_dict())


def test_a_plain_state_dict_where_the_path_says_so(tmp_path: Path) -> None:
    mine = backbone()
    exported = export(mine, tmp_path / "deep" / "weights.pth", "torchvision")
    assert same(torch.load(exported.path, weights_only=True), dict(mine.network.state_dict()))
    assert [file.name for file in exported.path.parent.iterdir()] == ["weights.pth"]


def test_safetensors_takes_any_backbone(tmp_path: Path) -> None:
    mine = backbone("mobilenet_v3_small")
    exported = export(mine, tmp_path / "mobile.safetensors", "safetensors")
    assert same(load_file(exported.path), dict(mine.network.state_dict()))
    with pytest.raises(UserError, match="plain ResNets only"):
        export(mine, tmp_path / "mobile", "detectron2")
    with pytest.raises(UserError, match="plain ResNets only"):
        export(mine, tmp_path / "mobile", "timm")


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_timm_reads_it(tmp_path: Path, name: str) -> None:
    timm = pytest.importorskip("timm")
    mine = backbone(name)
    exported = export(mine, tmp_path / "weights", "timm")
    network = timm.create_model(name, num_classes=0)
    network.load_state_dict(load_file(exported.path))
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(network.eval()(images), mine.eval()(images))


def back(name: str) -> str:
    """From Detectron2's names to torchvision's, written without looking at ``detectron2_name``."""
    parts = name.split(".")
    if parts[0] == "stem":
        parts = parts[1:]
    else:
        parts[0] = {"res2": "layer1", "res3": "layer2", "res4": "layer3", "res5": "layer4"}[parts[0]]
    joined = ".".join(parts)
    for number in "123":
        joined = joined.replace(f"conv{number}.norm", f"bn{number}")
    return joined.replace("shortcut.norm", "downsample.1").replace("shortcut", "downsample.0")


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_detectron2_names_map_back(tmp_path: Path, name: str) -> None:
    mine = backbone(name)
    exported = export(mine, tmp_path / "weights", "detectron2")
    assert exported.path.suffix == ".pkl"
    with open(exported.path, "rb") as file:
        content = pickle.load(file, encoding="latin1")  # as Detectron2 does
    assert content.keys() == {"model", "__author__", "matching_heuristics"}
    assert content["matching_heuristics"] is True
    model = content["model"]
    assert all(type(array) is np.ndarray and array.flags.writeable for array in model.values())
    restored = {back(key): torch.from_numpy(array) for key, array in model.items()}
    assert same(restored, dict(mine.network.state_dict()))
    wanted = {"stem.conv1.weight", "stem.conv1.norm.running_mean", "res2.0.conv1.norm.weight", "res5.1.conv2.weight"}
    assert wanted | {"res3.0.shortcut.weight", "res3.0.shortcut.norm.bias"} <= model.keys()


def test_detectron2_names_are_those_of_mocos_converter() -> None:
    for old in backbone("resnet50").network.state_dict():
        new = old if "layer" in old else f"stem.{old}"
        for t in (1, 2, 3, 4):
            new = new.replace(f"layer{t}", f"res{t + 1}")
        for t in (1, 2, 3):
            new = new.replace(f"bn{t}", f"conv{t}.norm")
        new = new.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
        assert detectron2_name(old) == new


def test_the_pickle_names_nothing_that_an_older_numpy_lacks(tmp_path: Path) -> None:
    exported = export(backbone("resnet10", width=8), tmp_path / "weights.pkl", "detectron2")
    strings, named = [], set()
    for operation, argument, _ in pickletools.genops(exported.path.read_bytes()):
        if isinstance(argument, str):
            strings.append(argument)
        if operation.name == "STACK_GLOBAL":
            named.add(".".join(strings[-2:]))
    assert {"numpy.ndarray", "builtins.bytearray"} >= named
    assert "numpy._core" not in " ".join(strings)


@pytest.mark.parametrize("format", ["torchvision", "timm", "safetensors", "detectron2"])
def test_a_small_stem_comes_with_a_note(tmp_path: Path, format: Any) -> None:
    mine = backbone("resnet10", width=8, stem="small")
    exported = export(mine, tmp_path / "weights", format)
    assert "conv1 = Conv2d(3, 8, 3, 1, 1, bias=False) and maxpool = Identity()" in exported.note
    if exported.path.suffix == ".safetensors":
        with safe_open(exported.path, "pt") as file:
            assert file.metadata()["note"] == exported.note
    assert "small images" not in export(backbone(), tmp_path / "usual", format).note


def test_onnx_gives_the_same_features(tmp_path: Path) -> None:
    """By ONNX's own reference, which is slow and comes with what the export needs anyway; batches of any size."""
    pytest.importorskip("onnxscript")
    onnx, reference = pytest.importorskip("onnx"), pytest.importorskip("onnx.reference")
    mine = BackboneConfig(backbone="resnet10", width=8, stem="small").build().eval()
    mine.image_size, mine.mean, mine.std = 16, (0.5, 0.4, 0.3), (0.25, 0.2, 0.1)
    exported = export(mine, tmp_path / "weights", "onnx", image_size=16)
    prepared = "Trained on views of 16 pixels: values from 0 to 1, minus (0.5, 0.4, 0.3), over (0.25, 0.2, 0.1)."
    assert exported.note.endswith(prepared)
    assert export(mine, tmp_path.parent / f"{tmp_path.name}-names", "torchvision").note.endswith(prepared)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.onnx"]  # with its weights inside
    model = onnx.load(str(exported.path))
    onnx.checker.check_model(model)
    assert json.loads(model.metadata_props[0].value)["mean"] == [0.5, 0.4, 0.3]
    for batch in (2, 3):
        images = torch.rand(batch, 3, 16, 16)
        features = reference.ReferenceEvaluator(model).run(["features"], {"images": images.numpy()})[0]
        np.testing.assert_allclose(features, mine(images).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_onnx_without_its_packages_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'interclr\[onnx\]'"):
        export(backbone("resnet10", width=8), tmp_path / "weights", "onnx")


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    mine = backbone("resnet10", width=8)
    with pytest.raises(UserError, match="no export format"):
        export(mine, tmp_path / "weights", "keras")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"end in \.pkl"):
        export(mine, tmp_path / "weights.pth", "detectron2")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is a folder: name the file"):
        export(mine, tmp_path / "folder", "torchvision")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not write"):
        export(mine, tmp_path / "file" / "weights", "torchvision")


@pytest.mark.parametrize("format", ["torchvision", "timm", "detectron2"])
def test_group_norm_is_not_passed_off_as_batch_norm(tmp_path: Path, format: Any) -> None:
    with pytest.raises(UserError, match="GroupNorm under the same names"):
        export(backbone(norm="group"), tmp_path / "weights", format)
    assert not list(tmp_path.iterdir())
    export(backbone(norm="group"), tmp_path / "weights", "safetensors")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "resnet10"}, "1-1-1-1 basic blocks from 64 channels"),
        ({"name": "resnet8", "width": 16}, "1-1-1 basic blocks from 16 channels"),
        ({"width": 32}, "2-2-2-2 basic blocks from 32 channels"),
        ({"name": "resnet18"}, None),
    ],
)
def test_a_shape_that_nobody_else_has_is_said(tmp_path: Path, changes: Any, said: str | None) -> None:
    note = export(backbone(**changes), tmp_path / "weights").note
    assert (said in note) if said else ("No other library" not in note)
