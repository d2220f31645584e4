"""What only a GPU can show. Skipped without one; run there before an issue is called resolved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import Heard

from interclr.bench.setup import prepare
from interclr.config import Settings, load_settings
from interclr.data.builtin import open_source
from interclr.data.canvas import Canvas
from interclr.data.loader import Order, ResidentLoader
from interclr.data.views import Views
from interclr.engine import pretrain
from interclr.engine.build import build_learner, peak_rate
from interclr.engine.step import Plan, TrainStep
from interclr.models import Encoder
from interclr.run import checkpoint
from interclr.screen import Screen
from interclr.types import Images

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")
METHODS = ["npidv2", "mocov2", "byol", "simclr", "simsiam"]
RECIPES = [f"cifar10-{method}{branch}" for method in METHODS for branch in ("", "-interclr")]
SMALL = ["data.source=synthetic:1024", "data.batch=64", "schedule.epochs=2", "model.width=16"]
QUICK_TO_COMPILE = ["model.backbone=resnet8"]
INTER = ["inter.clusters=32", "inter.sampler.negatives=32", "inter.sampler.candidates=360", "inter.warmup_epochs=0"]


def settings_of(recipe: str, *more: str) -> Settings:
    extra = INTER if recipe.endswith("-interclr") else []
    if any(each.startswith("inter.sampler=") for each in more):  # with settings of its own
        extra = [each for each in extra if not each.startswith("inter.sampler.")]
    return load_settings(recipe, [*SMALL, *extra, "engine.precision=bf16", *more])


def assert_same_learner(*runs: Path) -> None:
    """The last checkpoints of two runs hold the same bits."""
    found = [checkpoint.load_latest(run / "checkpoint") for run in runs]
    whole, parts = (state[0]["learner"] for state in found if state is not None)
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        assert torch.equal(value, parts[key]), key


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        *((recipe, []) for recipe in RECIPES),
        *(
            (f"cifar10-{method}-interclr", ["inter.loss=soft", *view])
            for method in METHODS
            for view in ([], ["inter.target_view={}"])
        ),
    ],
)
def test_a_step_never_waits_for_the_host(recipe: str, more: list[str]) -> None:
    settings = settings_of(recipe, *more)
    device = torch.device("cuda")
    source = open_source("synthetic:1024")
    canvas = Canvas(source.pixels, None, source.labels).to(device)  # type: ignore[attr-defined]
    loader = ResidentLoader(canvas, Order(len(source), 64, 0))
    learner = build_learner(settings, len(source)).to(device)
    optimiser = settings.optimiser.build(learner.intra.encoder, peak_rate(settings))
    views = Views(settings.views, 32, settings.data.mean, settings.data.std)
    plan = Plan(2, 16, 1, 0, peak_rate(settings), 0)
    target = None if settings.branch is None else settings.branch.target_view
    target_view = None if target is None else Views((target,), 32, settings.data.mean, settings.data.std)
    step = TrainStep(learner, views, optimiser, plan, device, "bf16", channels_last=True, target_view=target_view)
    if learner.labels is not None and learner.bank is not None:
        learner.start_clusters(learner.bank.features.clone(), torch.Generator().manual_seed(0))
    batches = list(loader.iterate(0, 16))
    for number in range(4):  # warm up: kernels load, optimiser state appears
        step(batches[number], number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        terms = [step(batches[number], number) for number in range(4, 16)]  # clusters are looked at after step 9
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(value) for named in terms for value in named.values())


@pytest.mark.parametrize("recipe", ["cifar10-mocov2-interclr", "cifar10-byol-interclr", "cifar10-npidv2-interclr"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resume_is_bit_exact(recipe: str, precision: str, tmp_path) -> None:
    settings = settings_of(recipe, f"engine.precision={precision}", "monitor.every_epochs=0")
    quiet = Screen(quiet=True)
    pretrain(settings, tmp_path / "whole", screen=quiet)
    pretrain(settings, tmp_path / "parts", screen=quiet, stop_after=13)
    pretrain(settings, tmp_path / "parts", screen=quiet, resume=True)
    assert_same_learner(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("recipe", "own"),
    [
        ("cifar10-mocov2-interclr", ["model.width=16"]),
        ("cifar10-byol-interclr", ["model.width=16"]),
        ("cifar10-npidv2-interclr", ["model.width=16"]),
        ("cifar10-npidv2-interclr", ["model.width=16", "inter.loss=soft", "inter.target_view={}"]),  # with a slow copy
        ("cifar10-mocov2-interclr", ["model.width=64"]),  # with convolutions of our own, on Hopper
    ],
)
def test_resume_of_a_captured_run_is_bit_exact(recipe: str, own: list[str], tmp_path) -> None:
    """Also across the step at which the inter branch begins, where another graph is captured."""
    more = ["engine.mode=graph", "monitor.every_epochs=0", "inter.warmup_epochs=1", *own]
    settings = settings_of(recipe, *more, *QUICK_TO_COMPILE)
    quiet = Screen(quiet=True)
    pretrain(settings, tmp_path / "whole", screen=quiet)
    pretrain(settings, tmp_path / "parts", screen=quiet, stop_after=11)
    pretrain(settings, tmp_path / "parts", screen=quiet, stop_after=12, resume=True)
    pretrain(settings, tmp_path / "parts", screen=quiet, resume=True)
    assert_same_learner(tmp_path / "whole", tmp_path / "parts")


def test_batches_fetched_beside_the_last_step_are_the_batches() -> None:
    """To the bit, with the host many steps ahead: no view is written over before the graph has taken it."""
    states = []
    for fetches in (False, True):
        torch.manual_seed(0)
        pixels = torch.randint(0, 256, (2048, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        overrides = [*SMALL[1:], *INTER, *QUICK_TO_COMPILE, "engine.mode=graph", "engine.precision=bf16"]
        here = prepare("cifar10-mocov2-interclr", [*overrides, "engine.deterministic=true"], pixels, 2048, CUDA)
        batches = here.loader.iterate(0, 60)
        for number in range(60):
            here.step(here.step.fetch(batches) if fetches else next(batches), number)
        states.append(here.learner.state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


@pytest.mark.parametrize(
    ("recipe", "optimiser"),
    [
        ("cifar10-mocov2-interclr", "sgd"),
        ("cifar10-byol-interclr", "lars"),
        ("cifar10-npidv2-interclr", "adamw"),
        ("cifar10-simclr", "sgd"),
    ],
)
def test_captured_equals_compiled(recipe: str, optimiser: str, tmp_path) -> None:
    """The same kernels, so nearly the same bits: schedules, random numbers and state all reach the graph."""
    states = {}
    for mode in ("compile", "graph"):
        more = ["engine.precision=fp32", "schedule.warmup_epochs=1", "engine.log_every=1", *QUICK_TO_COMPILE]
        settings = settings_of(recipe, f"engine.mode={mode}", f"optimiser={{name: {optimiser}}}", *more)
        run = pretrain(settings, tmp_path / mode, screen=Screen(quiet=True), stop_after=10)
        states[mode] = torch.tensor([line["loss"] for line in run.metrics if "loss" in line])
    assert len(states["graph"]) >= 9
    torch.testing.assert_close(states["graph"], states["compile"], rtol=1e-3, atol=1e-3)


def test_views_in_half_precision_and_compiled_are_the_views() -> None:
    device, settings = torch.device("cuda"), load_settings("mocov2")
    pixels = torch.randint(0, 256, (8, 3, 200, 240), dtype=torch.uint8, device=device)
    size = torch.tensor([[200, 240], [120, 96]] * 4, device=device)
    images = Images(torch.arange(8, device=device), pixels, size)
    made = []
    for product, compiled in ((None, False), (torch.float16, False), (torch.float16, True)):
        views = Views(settings.views, 64, (0, 0, 0), (1, 1, 1), product=product, compiled=compiled)
        made.append(views(images, torch.Generator(device).manual_seed(0)).views)
    for other in made[1:]:
        for view, exact in zip(other, made[0], strict=True):
            difference = (view - exact).abs()
            assert difference.mean() < 5e-4  # an eighth of a grey level
            assert (difference > 0.02).float().mean() < 1e-3  # hue is ill-conditioned where there is little colour


def test_compiled_equals_eager(tmp_path) -> None:
    """The same function up to the rounding of fused kernels: losses of the first steps agree closely in float32."""
    losses = {}
    for mode in ("eager", "compile", "graph"):
        settings = settings_of(
            "cifar10-mocov2-interclr",
            "engine.precision=fp32",
            f"engine.mode={mode}",
            "engine.log_every=1",
            *QUICK_TO_COMPILE,
        )
        run = pretrain(settings, tmp_path / mode, screen=Screen(quiet=True), stop_after=8)
        losses[mode] = [line["loss"] for line in run.metrics if "loss" in line]
    assert len(losses["eager"]) >= 7
    for mode in ("compile", "graph"):
        torch.testing.assert_close(torch.tensor(losses[mode]), torch.tensor(losses["eager"]), rtol=2e-3, atol=2e-3)


CAPTURED: list[tuple[str, list[str]]] = [
    ("cifar10-simsiam-interclr", []),
    ("cifar10-mocov2-interclr", ["inter.sampler={name: hard, negatives: 32}"]),
    ("cifar10-mocov2-interclr", ["inter.sampler={name: random, negatives: 32}"]),
    ("cifar10-mocov2-interclr", ["inter.sampler={name: semi_easy, negatives: 32, candidates: 360}"]),
    ("cifar10-mocov2-interclr", ["inter.sampler.candidates=all"]),
    ("cifar10-mocov2-interclr", ["inter.labels={name: offline}", "inter.head=separate"]),
    ("cifar10-mocov2-interclr", ["inter.bank_dtype=bfloat16", "engine.channels_last=false"]),
    ("cifar10-mocov2-interclr", ["model.stem=standard", "data.image_size=64", "model.norm=group"]),
    (
        "cifar10-mocov2-interclr",
        ["model.stem=standard", "model.backbone=resnet50", "model.width=64", "data.image_size=96"],
    ),
    ("cifar10-byol-interclr", ["data.resident=false", "data.workers=2"]),
    *(
        (f"cifar10-{method}-interclr", ["inter.loss=soft", *view])
        for method in METHODS
        for view in ([], ["inter.target_view={}"])
    ),
]
for _recipe, _more in CAPTURED:
    settings_of(_recipe, *_more)  # a wrong setting is found where there is no GPU as well


@pytest.mark.parametrize(("recipe", "more"), CAPTURED)
def test_whatever_auto_captures_can_be_captured(recipe: str, more: list[str], tmp_path) -> None:
    """And computes what the ordinary step does, up to rounding: losses of the first steps."""
    losses = {}
    for mode in ("eager", "graph"):
        common = ["engine.precision=fp32", f"engine.mode={mode}", "engine.log_every=1", *QUICK_TO_COMPILE]
        screen = Heard()
        settings = settings_of(recipe, *common, *more)
        run = pretrain(settings, tmp_path / mode, screen=screen.screen, stop_after=6)
        assert "cannot be captured" not in screen.text
        losses[mode] = torch.tensor([line["loss"] for line in run.metrics if "loss" in line])
    assert len(losses["graph"]) >= 5
    torch.testing.assert_close(losses["graph"], losses["eager"], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("resident", ["true", "false"])
def test_what_cannot_be_captured_is_launched_in_the_ordinary_way(
    resident: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backbone that asks the host: the run warns and goes on as if it had not been captured at all."""
    plain = Encoder.forward
    monkeypatch.setattr(Encoder, "forward", lambda self, images: (images.sum().item(), plain(self, images))[1])
    heard = Heard()
    where = [f"data.resident={resident}", "data.workers=2"]
    settings = settings_of("cifar10-mocov2", "engine.mode=graph", *QUICK_TO_COMPILE, *where)
    run = pretrain(settings, tmp_path / "run", screen=heard.screen)
    assert "cannot be captured" in heard.text
    assert run.finished
