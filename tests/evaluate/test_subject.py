"""What is evaluated, by one word: runs, checkpoints, other libraries' weights and files."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from tiny_session import measure

from interclr.evaluate import open_subject
from interclr.export import export
from interclr.models import BackboneConfig
from interclr.run.folder import embed, load
from interclr.types import UserError


def test_random_weights_are_always_the_same() -> None:
    one, other = (open_subject("torchvision/resnet18").backbone.state_dict() for _ in range(2))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_checkpoint_and_a_weights_file_are_the_same_network(run: Path, tmp_path: Path) -> None:
    images = torch.randn(2, 3, 32, 32)
    expected = load(run)(images)
    newest = sorted((run / "checkpoint").glob("step-*.pt"))[-1]
    torch.testing.assert_close(open_subject(str(newest)).backbone(images), expected)
    reference = open_subject("torchvision/resnet18").backbone
    state = {f"module.{key}": value for key, value in reference.network.state_dict().items()}
    save_file(state, tmp_path / "weights.safetensors")
    torch.save(state, tmp_path / "weights.pth")
    for name in ("weights.safetensors", "weights.pth"):
        opened = open_subject(str(tmp_path / name), backbone="resnet18")
        torch.testing.assert_close(opened.backbone(images), reference(images))
    with pytest.raises(UserError, match="--backbone"):
        open_subject(str(tmp_path / "weights.pth"), backbone="resnet50")


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("ran-code"),))


def test_weights_never_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.pth").write_bytes(pickle.dumps({"a": Evil()}))
    torch.save({"a": Evil()}, "evil2.pth")
    for name in ("evil.pth", "evil2.pth"):
        with pytest.raises(UserError):
            open_subject(name)
    assert not Path("ran-code").exists()


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("nowhere", "no run or weights file"),
        ("torchvision/resnet18@NONE", "IMAGENET1K_V1"),
        ("torchvision/resnet999", "unknown"),
    ],
)
def test_a_wrong_word_is_explained(subject: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_subject(subject)


def test_weights_of_a_network_that_has_no_name_point_to_what_knows_it(tmp_path: Path) -> None:
    narrow = BackboneConfig(backbone="resnet10", width=8, stem="small").build()
    export(narrow, tmp_path / "b.pth")
    with pytest.raises(UserError, match=r"--backbone.* run folder .*\.safetensors export"):
        open_subject(str(tmp_path / "b.pth"), backbone="resnet10")
    export(narrow, tmp_path / "b.safetensors")
    assert open_subject(str(tmp_path / "b.safetensors")).backbone.features == narrow.features


def test_an_onnx_file_is_not_taken_for_weights(tmp_path: Path) -> None:
    (tmp_path / "exported.onnx").write_bytes(b"\x08\x08")
    with pytest.raises(UserError, match=r"ONNX files are written, not read: .* run folder or its \.safetensors"):
        open_subject(str(tmp_path / "exported.onnx"))


def unreachable(*_: object, **__: object) -> None:
    raise OSError("no network")


def test_torchvisions_weights_load_by_name_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From torchvision's own cache folder, as its download leaves them; without them the error says what is missing."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    weights = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    network = torchvision.models.resnet18()
    (tmp_path / "checkpoints").mkdir()
    torch.save(network.state_dict(), tmp_path / "checkpoints" / Path(weights.url).name)
    opened = open_subject("torchvision/resnet18@IMAGENET1K_V1")
    network.fc = torch.nn.Identity()
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(opened.backbone(images), network.eval()(images))
    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    with pytest.raises(UserError, match="cannot be fetched"):
        open_subject("torchvision/resnet34@IMAGENET1K_V1")


def test_a_damaged_checkpoint_is_one_line(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    path = sorted((copy / "checkpoint").iterdir())[-1]
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"{path.name} cannot be read"):
        measure(["knn"], str(path), data="synthetic:40")
    save_file({"x": torch.zeros(1)}, copy / "backbone.safetensors")
    with pytest.raises(UserError, match=r"not those of the network in its resolved\.yaml"):
        measure(["knn"], str(copy))


def test_weights_that_were_exported_tell_their_network_and_its_images(run: Path, tmp_path: Path) -> None:
    images = torch.randint(256, (4, 3, 50, 40), dtype=torch.uint8)
    backbone = load(run)
    export(backbone, tmp_path / "weights.safetensors", "safetensors")
    expected = open_subject(str(run))
    for path in (tmp_path / "weights.safetensors", run / "backbone.safetensors"):
        subject = open_subject(str(path))
        assert (subject.image_size, subject.mean, subject.std) == (32, expected.mean, expected.std)
        assert torch.equal(embed(subject.backbone, images), embed(backbone, images))
    assert torch.equal(embed(backbone, images), embed(backbone, images, size=32))


def test_weights_beside_the_settings_of_their_run_need_no_name(run: Path, tmp_path: Path) -> None:
    """As runs have left them before their files told."""
    old = shutil.copytree(run, tmp_path / "run")
    save_file(load_file(run / "backbone.safetensors"), old / "backbone.safetensors")
    expected, found = open_subject(str(run)), open_subject(str(old / "backbone.safetensors"))
    assert (found.image_size, found.mean) == (expected.image_size, expected.mean)
    with pytest.raises(UserError, match="is of a resnet8, not of a resnet18: leave --backbone out"):
        open_subject(str(run / "backbone.safetensors"), backbone="resnet18")


def test_a_network_that_cannot_be_built_here_says_why(tmp_path: Path) -> None:
    about = {"interclr": json.dumps({"model": {"backbone": "resnet19"}})}
    save_file({"a": torch.zeros(1)}, tmp_path / "weights.safetensors", about)
    with pytest.raises(UserError, match=r"model\.backbone='resnet19' is unknown"):
        open_subject(str(tmp_path / "weights.safetensors"))


def test_timms_weights_are_given_images_as_they_expect_them(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    make = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained, num_classes: make(name, num_classes=num_classes))
    subject = open_subject("timm/vit_tiny_patch16_384")
    assert (subject.image_size, subject.mean, subject.std) == (384, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    with pytest.raises(UserError, match="does not take images of 64×64"):
        open_subject("timm/vit_tiny_patch16_384", image_size=64)


@pytest.mark.parametrize(
    ("prefix", "others"),
    [
        ("module.encoder_q.", {"module.encoder_k.conv1.weight", "module.queue", "module.encoder_q.fc.0.weight"}),
        ("backbone.", {"head.fc.weight", "neck.0.bias"}),
        ("", {"fc.weight"}),
    ],
)
def test_backbones_inside_published_checkpoints_are_found(tmp_path: Path, prefix: str, others: set[str]) -> None:
    network = BackboneConfig(backbone="resnet18").build()
    state = {prefix + name: value for name, value in network.network.state_dict().items()}
    path = tmp_path / "weights.pth"
    torch.save({"state_dict": state | {name: torch.zeros(3) for name in others}}, path)
    opened = open_subject(str(path), "resnet18").backbone.network.state_dict()
    assert all(torch.equal(opened[name], value) for name, value in network.network.state_dict().items())
