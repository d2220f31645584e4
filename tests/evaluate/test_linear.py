from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from tiny_runs import Heard
from torch import Tensor, nn

from interclr.data.source import ArraySource
from interclr.evaluate.base import Context, LabelledData, Subject
from interclr.evaluate.heads import Heads, Measured, best_rate
from interclr.evaluate.linear import PRESETS, Linear, held_out
from interclr.evaluate.probe import Probe
from interclr.evaluate.stages import Stages, grid_of
from interclr.models import Backbone, BackboneConfig
from interclr.run.files import save_tensors
from interclr.screen import Screen
from interclr.types import UserError

CPU = torch.device("cpu")
SIZE = 16


def source(count: int, seed: int, classes: int = 4, noise: float = 60) -> ArraySource:
    """Each class has a colour pattern of its own under a lot of noise."""
    patterns = torch.randint(60, 196, (classes, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(9)).float()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    pixels = patterns[labels] * 0.3 + 90 + noise * torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return ArraySource(pixels.clamp(0, 255).byte(), labels, name="patterns")


def data(train: int = 240, test: int = 120, **options: float) -> LabelledData:
    return LabelledData(source(train, 0, **options), source(test, 1, **options), "patterns")  # type: ignore[arg-type]


def subject(backbone: str = "resnet10", **options: int) -> Subject:
    torch.manual_seed(0)
    built = BackboneConfig(backbone=backbone, stem="small", width=options.pop("width", 8)).build()
    return Subject(built, "tiny", SIZE, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def context(out: Path, device: torch.device = CPU) -> Context:
    out.mkdir(parents=True, exist_ok=True)
    return Context(out, device, Screen(quiet=True))


def test_resnet50_at_224_pools_to_goyals_sizes() -> None:
    stages = Stages(BackboneConfig(backbone="resnet50").build(), 224, 9000, False, CPU)
    widths = {stage: part.stop - part.start for stage, part in stages.parts.items()}
    assert widths == {"stem": 9216, "layer1": 9216, "layer2": 8192, "layer3": 9216, "layer4": 8192}
    assert [grid_of(c, 9000) for c in (64, 256, 512, 1024, 2048)] == [12, 6, 4, 3, 2]
    assert stages.shapes["stem"] == (64, 12, 12)


def test_stages_are_the_pooled_maps_of_one_forward() -> None:
    backbone = BackboneConfig(backbone="resnet10", stem="small", width=8).build().eval()
    stages = Stages(backbone, SIZE, 500, True, CPU)
    calls: list[int] = []
    backbone.network.conv1.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    images = torch.randn(3, 3, SIZE, SIZE)
    features = stages(images)
    assert len(calls) == 1
    assert list(stages.parts) == ["stem", "layer1", "layer2", "layer3", "layer4", "final"]
    net = backbone.network
    with torch.no_grad():
        maps = [net.relu(net.bn1(net.conv1(images)))]  # type: ignore[operator, union-attr]
        for name in ("layer1", "layer2", "layer3", "layer4"):
            maps.append(getattr(net, name)(maps[-1]))
        for stage, value in zip(stages.parts, maps, strict=False):
            side = min(grid_of(value.shape[1], 500), value.shape[2])
            expected = nn.functional.adaptive_avg_pool2d(value, side).flatten(1)
            torch.testing.assert_close(features[:, stages.parts[stage]].float(), expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(features[:, stages.parts["final"]].float(), backbone(images), rtol=1e-3, atol=1e-3)


def test_a_stage_that_is_missing_and_a_network_without_stages() -> None:
    three = Stages(BackboneConfig(backbone="resnet8", stem="small", width=8).build(), SIZE, 500, False, CPU)
    assert list(three.parts) == ["stem", "layer1", "layer2", "layer3"]
    plain = Stages(Backbone(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 7)), 7), SIZE, 500, False, CPU)
    assert plain.parts == {"final": slice(0, 7)}


@pytest.mark.parametrize("batch_norm", [False, True])
def test_heads_are_sgd_of_torch(batch_norm: bool) -> None:
    """Against nn.Linear, cross-entropy, autograd and torch.optim.SGD, for every stage and rate."""
    generator = torch.Generator().manual_seed(0)
    parts, rates = [slice(0, 5), slice(5, 12)], torch.tensor([[0.1, 0.01], [0.2, 0.05]])
    heads = Heads(parts, rates, 3, batch_norm, 0.01, CPU)
    batches = [(torch.randn(16, 12, generator=generator), torch.arange(16) % 3) for _ in range(6)]
    seen_mean, seen_variance = torch.zeros(12), torch.zeros(12)
    linears = [[nn.Linear(part.stop - part.start, 3) for _ in range(2)] for part in parts]
    optimisers = []
    for row, row_rates in zip(linears, rates.tolist(), strict=True):
        for module, rate in zip(row, row_rates, strict=True):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
            groups = [{"params": [module.weight], "weight_decay": 0.01}, {"params": [module.bias]}]
            optimisers.append(torch.optim.SGD(groups, rate, 0.9))
    for number, (features, label) in enumerate(batches):
        losses = heads.step(features, label, number, 1.0)
        if batch_norm:  # the statistics of all batches so far
            seen_mean += features.mean(0)
            seen_variance += features.var(0)
            mean, variance = seen_mean / (number + 1), seen_variance / (number + 1)
            features = (features - mean) / (variance + 1e-5).sqrt()
        for s, part in enumerate(parts):
            for r, module in enumerate(linears[s]):
                loss = nn.functional.cross_entropy(module(features[:, part]), label)
                assert losses[s, r].item() == pytest.approx(loss.item(), abs=1e-5)
                loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    for s, part in enumerate(parts):
        for r, module in enumerate(linears[s]):
            torch.testing.assert_close(
                heads.weight[part, 3 * r : 3 * r + 3].T, module.weight.data, atol=1e-5, rtol=1e-4
            )
            torch.testing.assert_close(heads.bias[s, 0, 3 * r : 3 * r + 3], module.bias.data, atol=1e-5, rtol=1e-4)
    picked = heads.pick(torch.tensor([1, 0]))
    whole, part_of = heads.measure(batches), picked.measure(batches)
    assert torch.equal(part_of.top1[:, 0], whole.top1[[0, 1], [1, 0]])


def test_within_a_point_of_logistic_regression(tmp_path: Path) -> None:
    """On the same frozen features, standardised in the same way, with the same penalty."""
    subjected, images = subject(width=16), data(2000, 2000, noise=75)
    decay = 0.05  # strong enough that both reach the one optimum
    settings = Linear(learning_rates=(0.03,), epochs=60, weight_decay=decay, dims=300, batch=250)
    figures = settings.run(subjected, images, context(tmp_path))
    stages = Stages(subjected.backbone, SIZE, 300, False, CPU)
    probe = Probe(settings.plan(images), subjected, images, context(tmp_path), stages, settings)
    assert probe.cache is not None
    train, test = probe.cache.float(), torch.cat([f for f, _ in probe.shown(images.test)]).float()
    mean, spread = train.mean(0), train.var(0).add(1e-5).sqrt()
    assert images.train.labels is not None
    assert images.test.labels is not None
    for stage, part in stages.parts.items():
        oracle = LogisticRegression(C=1 / (decay * len(train)), max_iter=500)
        oracle.fit(((train - mean) / spread)[:, part].numpy(), images.train.labels.numpy())
        expected = 100 * oracle.score(((test - mean) / spread)[:, part].numpy(), images.test.labels.numpy())
        assert figures[f"{stage}_top1"] == pytest.approx(expected, abs=1.0), stage
    assert 40 < figures["top1"] < 99  # neither chance nor trivial


def test_result_files_and_determinism(tmp_path: Path) -> None:
    settings = Linear(epochs=6, dims=200, final=True)
    first, second = (settings.run(subject(), data(), context(tmp_path / name)) for name in ("a", "b"))
    assert first == second
    assert (tmp_path / "a" / "predictions.safetensors").read_bytes() == (
        tmp_path / "b" / "predictions.safetensors"
    ).read_bytes()
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["selected_on"] == "held-out training images"
    assert result["figures"] == first
    assert set(result["stages"]) == {"stem", "layer1", "layer2", "layer3", "layer4", "final"}
    best = max(result["stages"], key=lambda stage: result["stages"][stage]["held_out_top1"])
    assert result["best_stage"] == best
    assert first["top1"] == result["stages"][best]["top1"]
    kept = load_file(tmp_path / "a" / "predictions.safetensors")
    assert 100 * (kept["ranked"][:, 0] == kept["label"]).double().mean().item() == pytest.approx(first["top1"])
    for ending in ("png", "svg"):
        assert (tmp_path / "a" / f"linear.{ending}").stat().st_size > 1000
    assert first["top1"] > 28  # chance is 25


def test_cache_changes_nothing(tmp_path: Path) -> None:
    cached = Linear(epochs=4, dims=200, learning_rates=(0.01, 0.03))
    first = cached.run(subject(), data(), context(tmp_path / "cached"))
    second = cached.model_copy(update={"cache_gb": 0.0}).run(subject(), data(), context(tmp_path / "live"))
    assert json.loads((tmp_path / "cached" / "result.json").read_text())["cached"]
    live = json.loads((tmp_path / "live" / "result.json").read_text())
    assert not live["cached"]
    assert first == pytest.approx(second, abs=1.0)  # a batch of other neighbours rounds its convolutions differently
    losses = json.loads((tmp_path / "cached" / "result.json").read_text())["training_loss"]
    for stage, curve in losses.items():
        np.testing.assert_allclose(curve, live["training_loss"][stage], rtol=1e-2, atol=1e-3)


def test_each_image_passes_the_backbone_once(tmp_path: Path) -> None:
    seen: list[int] = []
    one = subject()

    def count(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen.append(len(inputs[0]))

    one.backbone.register_forward_hook(count)
    Linear(epochs=5, dims=200).run(one, data(), context(tmp_path))
    assert sum(seen) == 2 + 240 + 120  # two black images to learn the sizes, then every image once


def test_a_stopped_run_with_augmentation_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Linear(epochs=4, dims=100, augment=True, learning_rates=(0.01, 0.03), batch=60)
    whole = settings.run(subject(), data(), context(tmp_path / "whole"))
    steps: list[int] = []
    original = Heads.step

    def failing(self: Heads, features: Tensor, label: Tensor, number: int, factor: float) -> Tensor:
        steps.append(number)
        if len(steps) == 21:  # in the second pass: the search is 4 × 3 steps
            raise KeyboardInterrupt
        return original(self, features, label, number, factor)

    monkeypatch.setattr(Heads, "step", failing)
    with pytest.raises(KeyboardInterrupt):
        settings.run(subject(), data(), context(tmp_path / "parts"))
    steps.clear()
    assert settings.run(subject(), data(), context(tmp_path / "parts")) == whole
    assert steps == list(range(8, 16))  # two of four epochs were done
    assert not list((tmp_path / "parts").glob("state-*"))


def test_another_setting_does_not_go_on_from_a_foreign_state(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(1)}
    (tmp_path / "x").mkdir()
    save_tensors(tmp_path / "x" / "state-final.safetensors", state, {"key": "another", "epoch": "3"})
    settings = Linear(epochs=2, dims=100, augment=True, learning_rates=(0.03,))
    first = settings.run(subject(), data(), context(tmp_path / "x"))
    assert first == settings.run(subject(), data(), context(tmp_path / "y"))


@pytest.mark.parametrize("damage", [b"", b"damaged", b"\xff" * 9])
def test_a_damaged_state_is_said_and_counts_as_none(tmp_path: Path, damage: bytes) -> None:
    settings = Linear(epochs=1, dims=50, augment=True, learning_rates=(0.03,))
    heard = Heard()
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "state-final.safetensors").write_bytes(damage)
    first = settings.run(subject(), data(), replace(context(tmp_path / "x"), screen=heard.screen))
    assert "state-final.safetensors cannot be read" in heard.text
    assert first == settings.run(subject(), data(), context(tmp_path / "y"))


def test_presets_follow_the_paper() -> None:
    imagenet, places = PRESETS["imagenet"], PRESETS["places205"]
    assert (imagenet.epochs, imagenet.batch, imagenet.weight_decay, imagenet.learning_rates) == (
        100,
        256,
        1e-4,
        (0.01,),
    )
    factors = [imagenet.factor(epoch * 10, 10) for epoch in (0, 29, 30, 59, 60, 89, 90, 99)]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert places.epochs == 14
    assert [round(places.factor(step, 100), 6) for step in (349, 350, 700, 1050)] == [1, 0.1, 0.01, 0.001]
    assert (imagenet.batch_norm, places.batch_norm) == (True, True)
    named = replace(data(), name="imagenet")
    assert Linear().plan(named) == imagenet
    assert Linear().plan(replace(data(), name="imagenette2-160")) == PRESETS["small"]
    assert Linear().plan(data()) == PRESETS["small"]
    assert Linear(preset="imagenet", epochs=10).plan(data()).drops == (3, 6, 9)


def test_held_out_is_a_tenth_of_every_class() -> None:
    train = source(200, 0)
    held, kept = held_out(train, 0)
    assert train.labels is not None
    assert train.labels[held].bincount().tolist() == [5, 5, 5, 5]
    assert sorted([*held.tolist(), *kept.tolist()]) == list(range(200))
    assert torch.equal(held, held_out(train, 0)[0])
    assert not torch.equal(held, held_out(train, 1)[0])


def test_one_image_of_each_class(tmp_path: Path) -> None:
    figures = Linear(epochs=3, dims=100).run(subject(), data(4, 40), context(tmp_path))
    assert 0 <= figures["top1"] <= 100
    assert not any("top5" in name for name in figures)  # of four classes it says nothing
    assert "middle" in json.loads((tmp_path / "result.json").read_text())["selected_on"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "24 of 24 training images of bad have no label"),
        (torch.tensor([0] * 23 + [-1]), "1 of 24 training images"),
        (torch.zeros(24), "3 classes of the test split have no training image"),
    ],
)
def test_bad_labels(labels: Tensor | None, message: str, tmp_path: Path) -> None:
    train = ArraySource(source(24, 0).pixels, labels, name="bad")
    with pytest.raises(UserError, match=message):
        Linear().run(subject(), LabelledData(train, source(24, 1), "bad"), context(tmp_path))


def test_one_class_and_diverged_heads(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one class"):
        Linear().run(subject(), data(24, 24, classes=1), context(tmp_path))
    with pytest.raises(UserError, match="diverged"):
        Linear(epochs=30, dims=100, learning_rates=(1e37,)).run(subject(), data(), context(tmp_path))


def test_best_rate_breaks_ties_by_loss_and_leaves_out_what_diverged() -> None:
    top1 = torch.tensor([[50.0, 60.0, 60.0], [90.0, 10.0, 20.0]])
    loss = torch.tensor([[1.0, 0.9, 0.8], [torch.nan, 1.0, 1.0]])
    empty = torch.empty(0)
    assert best_rate(Measured(top1, top1, loss, empty, empty)).tolist() == [2, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_agrees_with_cpu(tmp_path: Path) -> None:
    settings = Linear(epochs=4, dims=200)
    on_cpu = settings.run(subject(), data(), context(tmp_path / "cpu"))
    on_gpu = settings.run(subject(), data(), context(tmp_path / "gpu", torch.device("cuda")))
    assert on_gpu["top1"] == pytest.approx(on_cpu["top1"], abs=3.0)
