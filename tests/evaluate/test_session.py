"""The command from one word to results on disk, and what it says when the word is wrong."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file, save_file

from interclr.config import load_settings
from interclr.data.synthetic import generate
from interclr.engine import pretrain
from interclr.evaluate import PROTOCOLS, Request, evaluate, open_subject
from interclr.run.folder import load
from interclr.screen import Screen
from interclr.types import UserError

QUIET = Screen(quiet=True)
TINY = ["data.source=synthetic:160", "data.batch=32", "model.width=8", "schedule.epochs=1", "engine.device=cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("session") / "run"
    pretrain(load_settings("default", [*TINY, "inter.clusters=8", "inter.sampler.negatives=4"]), folder, screen=QUIET)
    return folder


def measure(names: list[str], subject: str, *overrides: str, **more: object) -> dict[str, dict[str, float]]:
    return evaluate(names, PROTOCOLS, Request(subject, **more), list(overrides), QUIET)  # type: ignore[arg-type]


def class_folder(folder: Path, images: int = 80) -> Path:
    pixels, labels = generate(images, seed=3)
    for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        (folder / f"class{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"class{label}" / f"{number}.png")
    return folder


def test_a_run_is_measured_on_its_own_data(run: Path, tmp_path: Path) -> None:
    figures = measure(["knn"], str(run), "k=5", out=tmp_path)["knn"]
    assert figures["k"] == 5
    result = json.loads((tmp_path / "knn" / "result.json").read_text())
    assert result["figures"] == figures
    assert result["settings"]["temperature"] == 0.1
    predictions = json.loads((tmp_path / "knn" / "predictions.json").read_text())
    assert all(len(values) == 40 for values in predictions.values())
    assert measure(["knn"], str(run), "k=5", out=tmp_path)["knn"] == figures  # from cached features


def test_the_clusters_are_the_runs_own(run: Path, tmp_path: Path) -> None:
    figures = measure(["clusters"], str(run), out=tmp_path)["clusters"]
    kept = load_file(tmp_path / "clusters" / "assignments.safetensors")["labels"]
    assert len(kept) == 160
    assert figures["clusters"] == 8


def test_all_says_what_the_data_do_not_allow(run: Path, tmp_path: Path) -> None:
    figures = evaluate(["knn", "detection"], PROTOCOLS, Request(str(run), out=tmp_path), [], QUIET, whole=True)
    assert list(figures) == ["knn"]
    page = (tmp_path / "all.md").read_text()
    assert "Not run: detection" in page
    assert "boxes" in page
    assert "the paper's own" in page


def test_of_several_one_that_fails_is_an_error_after_the_others(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"detection: .* boxes"):
        measure(["detection", "knn"], str(run), out=tmp_path)
    assert (tmp_path / "knn" / "result.json").exists()
    assert not (tmp_path / "all.json").exists()


def test_a_folder_without_a_test_split_lends_a_fifth_of_every_class(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    figures = [measure(["knn"], str(run), data=str(folder), out=tmp_path / name)["knn"] for name in ("a", "b")]
    assert figures[0] == figures[1]
    predictions = json.loads((tmp_path / "a" / "knn" / "predictions.json").read_text())
    assert all(len(values) == 20 for values in predictions.values())  # 8 of every class, 2 of them tested on


def test_images_without_labels_are_refused_by_name(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "flat"
    folder.mkdir()
    for number, image in enumerate(generate(4, seed=0)[0]):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    with pytest.raises(UserError, match="no label"):
        measure(["knn"], str(run), data=str(folder), out=tmp_path / "out")


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


def test_a_wrong_setting_names_the_key(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^temprature: unknown key; did you mean temperature"):
        measure(["knn"], str(run), "temprature=1", out=tmp_path)
    with pytest.raises(UserError, match="--data"):
        measure(["knn"], "torchvision/resnet18", out=tmp_path)


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


def unreachable(*_: object, **__: object) -> None:
    raise OSError("no network")


def test_another_number_of_channels_is_named(tmp_path: Path) -> None:
    state = open_subject("torchvision/resnet18").backbone.network.state_dict()
    state["conv1.weight"] = state["conv1.weight"][:, :1].clone()
    save_file(state, tmp_path / "grey.safetensors")
    with pytest.raises(UserError, match=r"conv1\.weight"):
        open_subject(str(tmp_path / "grey.safetensors"), backbone="resnet18")


def test_the_clusters_of_a_run_on_a_folder_are_its_own(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    overrides = [*TINY, f"data.source={folder}", "inter.clusters=8", "inter.sampler.negatives=4"]
    pretrain(load_settings("default", overrides), tmp_path / "run", screen=QUIET)
    assert measure(["clusters"], str(tmp_path / "run"))["clusters"]["clusters"] == 8


def test_one_image_of_every_class_is_explained(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images", images=10)
    with pytest.raises(UserError, match="one image of every class"):
        measure(["knn"], str(run), data=str(folder), out=tmp_path / "out")


def test_features_are_made_again_when_the_pixels_change(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    first = measure(["knn"], str(run), "k=3", data=str(folder), out=tmp_path / "out")
    for number, path in enumerate(sorted(folder.rglob("*.png"))):
        Image.new("RGB", (32, 32), (number * 3, 0, 0)).save(path)
    again = measure(["knn"], str(run), "k=3", data=str(folder), out=tmp_path / "out")
    fresh = measure(["knn"], str(run), "k=3", data=str(folder), out=tmp_path / "other")
    assert again == fresh
    assert again != first


def test_images_without_a_label_are_left_out_of_a_partly_labelled_set(run: Path, tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "images")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    lines = [f"{name},{name.split('/')[0] if number % 2 else ''}" for number, name in enumerate(names)]
    (folder / "list.csv").write_text("\n".join(lines))
    measure(["knn"], str(run), "k=3", data=str(folder / "list.csv"), out=tmp_path / "out")
    predictions = json.loads((tmp_path / "out" / "knn" / "predictions.json").read_text())
    assert all(len(values) == 10 for values in predictions.values())  # 4 of every class have labels, 1 is tested on
