from __future__ import annotations

from typing import Any

import pytest
import yaml

from interclr.config import Settings, dump, load_settings, settings_from
from interclr.engine.build import build_learner
from interclr.engine.dataset import Facts
from interclr.engine.settle import settle
from interclr.types import UserError

SIZES = [2, 3, 10, 200, 5_000, 50_000, 1_281_167, 10_000_000]


# What the machine and the open data tell: ``pretrain`` fills it in.
LEFT = ["data.resident", "data.workers", "engine.device", "engine.mode", "monitor.k"]


def autos(tree: Any, path: str = "") -> list[str]:
    if isinstance(tree, dict):
        return [found for key, value in tree.items() for found in autos(value, f"{path}.{key}")]
    return [path[1:]] if tree == "auto" else []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("side", [16, 32, 100, 500])
@pytest.mark.parametrize("images", SIZES)
def test_everything_is_chosen_and_sensible(images: int, side: int, device: str) -> None:
    settings, chosen = settle(load_settings("folder"), Facts(images, side, device))
    tree = settings.model_dump(mode="json")
    assert autos(tree) == LEFT
    assert settings_from(yaml.safe_load(dump(settings))) == settings
    assert len({key for key, _, _ in chosen}) == len(chosen)
    assert all(why for _, _, why in chosen)

    data, inter = settings.data, settings.inter
    assert inter is not None
    assert 32 <= data.image_size <= (96 if device == "cpu" else 224)
    assert data.image_size <= max(side, 32)
    assert data.max_side >= 2 * data.image_size
    assert 2 <= data.batch <= min(images, 256)
    assert images < 8 or data.batch <= images / 4
    assert 2 <= inter.clusters <= max(2, images / 2)
    assert 1 <= inter.sampler.negatives <= 16_384
    assert inter.sampler.negatives <= max(1, images)
    assert data.batch <= settings.method.queue <= max(2, images / 2, data.batch)
    steps = images // data.batch
    assert 2 <= settings.schedule.epochs <= 800
    if device == "cpu":
        assert settings.schedule.epochs * steps <= max(2 * steps, 3_000)
    else:
        assert settings.schedule.epochs >= 200
    assert 1 <= settings.checkpoint.every_epochs <= settings.schedule.epochs
    assert settings.engine.precision == ("fp32" if device == "cpu" else "bf16")


@pytest.mark.parametrize("images", SIZES)
def test_more_images_never_mean_fewer_clusters_or_negatives(images: int) -> None:
    def of(n: int) -> tuple[int, int]:
        inter = settle(load_settings("folder"), Facts(n, 32, "cpu"))[0].inter
        return int(inter.clusters), int(inter.sampler.negatives)

    small, large = of(images), of(3 * images)
    assert small[0] <= large[0]
    assert small[1] <= large[1]


def test_imagenet_gets_the_papers_numbers() -> None:
    settings, _ = settle(load_settings("folder"), Facts(1_281_167, 400, "cuda"))
    assert settings.inter is not None
    assert settings.inter.clusters == 10_000
    assert settings.inter.sampler.negatives == 16_384
    assert settings.method.queue == 65_536
    assert (settings.data.batch, settings.data.image_size, settings.schedule.epochs) == (256, 224, 200)
    assert settings.model.backbone == "resnet50"


def test_explicit_values_are_not_touched() -> None:
    given = [
        "data.image_size=40",
        "data.max_side=50",
        "data.batch=6",
        "model.backbone=resnet18",
        "model.width=12",
        "model.stem=small",
        "schedule.epochs=3",
        "method.queue=7",
        "inter.warmup_epochs=1",
        "inter.clusters=5",
        "inter.sampler.negatives=9",
        "inter.sampler.candidates=20",
        "engine.precision=bf16",
        "engine.mode=compile",
        "checkpoint.every_epochs=2",
        "monitor.every_epochs=0",
        "monitor.k=11",
    ]
    before = load_settings("folder", given)
    after, chosen = settle(before, Facts(1_000, 32, "cpu"))
    assert after == before
    assert chosen == []


@pytest.mark.parametrize("recipe", ["default", "mocov2", "byol-interclr", "cifar10-npidv2", "cifar10-simsiam"])
def test_recipes_settle_for_their_own_data(recipe: str) -> None:
    settings, _ = settle(load_settings(recipe), Facts(1_281_167, 224, "cuda"))
    assert set(autos(settings.model_dump(mode="json"))) <= set(LEFT)


@pytest.mark.parametrize("backbone", ["mobilenet_v3_small", "timm/vit_tiny_patch16_224"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_network_without_other_stems_keeps_its_own(backbone: str, device: str) -> None:
    settings, _ = settle(load_settings("folder", [f"model.backbone={backbone}"]), Facts(500, 32, device))
    assert settings.model.stem == "standard"
    assert settings.model.width == 64


@pytest.mark.parametrize("backbone", ["resnet50", "resnet18"])
def test_a_network_that_is_asked_for_is_the_one_other_libraries_have(backbone: str) -> None:
    settings, _ = settle(load_settings("folder", [f"model.backbone={backbone}"]), Facts(500, 32, "cpu"))
    assert settings.model.width == 64
    assert settle(load_settings("folder"), Facts(500, 32, "cpu"))[0].model.width == 32


def test_impossible_wishes_are_named() -> None:
    with pytest.raises(UserError, match=r"^data\.batch: 64 .* at most 50"):
        settle(load_settings("folder", ["data.batch=64"]), Facts(50, 32, "cpu"))
    with pytest.raises(UserError, match=r"^inter\.clusters: 51 .* at most 50"):
        settle(load_settings("folder", ["inter.clusters=51"]), Facts(50, 32, "cpu"))


def test_of_a_loss_without_pairs_no_sampler_is_announced() -> None:
    told = {
        soft: settle(load_settings("folder", soft), Facts(50_000, 32, "cuda"))[1] for soft in ((), ("inter.loss=soft",))
    }
    drawn = [choice for choice in told[()] if choice[0].startswith("inter.sampler.")]
    assert len(drawn) == 2
    assert told[("inter.loss=soft",)] == [choice for choice in told[()] if choice not in drawn]


@pytest.mark.parametrize("method", ["npidv2", "mocov2", "byol", "simclr", "simsiam"])
def test_a_sampler_is_announced_where_negatives_are_drawn(method: str) -> None:
    for loss in ("own", "margin_nce", "soft"):
        settings, told = settle(load_settings(f"{method}-interclr", [f"inter.loss={loss}"]), Facts(50_000, 32, "cuda"))
        drawn = build_learner(settings, 50_000).intra.uses_negatives
        assert drawn == (loss == "margin_nce" or (loss == "own" and method not in ("byol", "simsiam")))
        assert any(key.startswith("inter.sampler.") for key, *_ in told) == drawn


def test_settling_twice_changes_nothing() -> None:
    facts = Facts(777, 60, "cpu")
    once, _ = settle(Settings(), facts)
    assert settle(once, facts) == (once, [])


@pytest.mark.parametrize(("epochs", "begins"), [(200, 100), (100, 50), (3, 1), (1, 0)])
def test_the_inter_branch_begins_at_half_of_the_epochs(epochs: int, begins: int) -> None:
    wishes = [f"schedule.epochs={epochs}", "inter.warmup_epochs=auto"]
    settings, chosen = settle(load_settings("cifar10-mocov2-interclr", wishes), Facts(50_000, 32, "cuda"))
    assert settings.inter is not None
    assert settings.inter.warmup_epochs == begins
    assert "inter.warmup_epochs" in [key for key, _, _ in chosen]


def test_a_branch_that_would_never_begin_is_refused() -> None:
    wishes = ["schedule.epochs=20", "inter.warmup_epochs=20"]
    with pytest.raises(UserError, match=r"after 20 epochs of 20 .* never begin; .* inter\.warmup_epochs=auto for"):
        settle(load_settings("cifar10-mocov2-interclr", wishes), Facts(50_000, 32, "cuda"))
    plain = [*wishes, "inter.intra_weight=1"]  # it is switched off: nothing to begin
    assert settle(load_settings("cifar10-mocov2-interclr", plain), Facts(50_000, 32, "cuda"))[0].inter is not None
