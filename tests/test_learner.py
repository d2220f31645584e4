"""How the branches are put together: λ, margins, warm-up, what a step reads and writes, gradient accumulation."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_learner import (
    IMAGES,
    INTER,
    METHODS,
    SIDE,
    batch,
    images_of,
    learner,
    pairs_of,
    pixels,
    plan,
    random_embeddings,
    seed,
    state,
    train_step,
    unit,
)
from torch import Tensor
from torch.nn import functional as F

from interclr import dist, samplers
from interclr.bank import FIXED_POINT
from interclr.config import settings_from
from interclr.data.view_parameters import View
from interclr.data.views import Views
from interclr.engine.build import build_step
from interclr.learner import Learner
from interclr.types import Batch, Embeddings, Pairs

PER_METHOD = pytest.mark.parametrize("method", list(METHODS))


@contextlib.contextmanager
def no_inter_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any draw of pairs, any clustering and any reading of pairs is an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the inter branch is off and must cost nothing")

    with monkeypatch.context() as patch:
        for sampler in (samplers.Hard, samplers.SemiHard, samplers.Random, samplers.SemiEasy):
            patch.setattr(sampler, "draw", refuse)
            patch.setattr(sampler, "prepare", refuse)
        patch.setattr("interclr.learner.select_positive", refuse)
        patch.setattr("interclr.intra.base.cosines", refuse)
        patch.setattr("interclr.labels.OnlineLabels.update", refuse)
        yield


def gradients(model: Learner, epoch: int = 0) -> tuple[Tensor, dict[str, Tensor | None]]:
    seed(model, 1)
    loss, _, _ = model.loss(batch(), epoch)
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.intra.encoder.named_parameters()}


@PER_METHOD
@pytest.mark.parametrize("weight", [0.0, 0.25, 0.75])
def test_loss_weighs_the_branches(method: str, weight: float) -> None:
    model, data = learner(method, {"intra_weight": weight}), batch()
    seed(model, 1)
    loss, _, terms = model.loss(data, 0)
    seed(model, 1)
    embeddings = model.intra.embed(data)
    intra = model.intra.loss(embeddings, model.bank)
    pairs = pairs_of(model, embeddings)
    inter = model.intra.inter_loss(embeddings, pairs, model.bank)
    assert torch.equal(terms["intra_loss"], intra)
    assert torch.equal(terms["inter_loss"], inter)
    assert loss.item() == pytest.approx(weight * intra.item() + (1 - weight) * inter.item(), rel=1e-6)
    anchors = data.index.repeat(len(embeddings.inter_query))
    assert torch.equal(model.bank.labels[pairs.positive], model.bank.labels[anchors])
    real = pairs.negative >= 0
    assert not (real & (model.bank.labels[pairs.negative] == model.bank.labels[anchors][:, None])).any()


@PER_METHOD
@pytest.mark.parametrize("head", ["shared", "separate"])
def test_weight_one_is_the_plain_method_to_the_bit(method: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if method == "npidv2" and head == "separate":
        pytest.skip("npidv2 has one head")
    extra = {"intra_weight": 1.0, "head": head, "bank_momentum": 0.9, "bank_dtype": "bfloat16", "margin": 0.4}
    plain, weighted = learner(method), learner(method, extra)
    assert (weighted.bank is None) == (method != "npidv2")
    assert weighted.sampler is None
    assert weighted.labels is None
    assert plain.state_dict().keys() == weighted.state_dict().keys()
    with no_inter_work(monkeypatch):
        (first, expected), (second, found) = gradients(plain), gradients(weighted)
        assert torch.equal(first, second)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        data, steps = pixels(), [train_step(model, plan(4)) for model in (plain, weighted)]
        for number in range(4):
            terms = [step(images_of(number, 8, data), number) for step in steps]
            assert terms[0].keys() == terms[1].keys()
            assert all(torch.equal(terms[0][name], terms[1][name]) for name in terms[0])
    for name, value in plain.state_dict().items():
        assert torch.equal(value, weighted.state_dict()[name]), name


@PER_METHOD
@pytest.mark.parametrize("head", ["shared", "separate"])
def test_warm_up_is_the_plain_method_to_the_bit(method: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if head == "separate" and method == "npidv2":
        pytest.skip("npidv2 has one head")
    plain, warming = learner(method), learner(method, {"warmup_epochs": 1, "head": head})
    shared = plain.intra.state_dict()  # a head of its own has drawn other first weights
    warming.intra.load_state_dict(shared, strict=False)
    if plain.bank is not None:
        warming.bank.features.copy_(plain.bank.features)
        warming.bank.rebuild()
    before = state(warming.bank)
    with no_inter_work(monkeypatch):
        (first, expected), (second, found) = gradients(plain), gradients(warming)
        assert torch.equal(first, second)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        data, steps = pixels(), [train_step(model, plan(3, epochs=2)) for model in (plain, warming)]
        for number in range(3):
            terms = [step(images_of(number, 8, data), number) for step in steps]
            assert terms[0].keys() == terms[1].keys()
            assert all(torch.equal(terms[0][name], terms[1][name]) for name in terms[0])
        warming.end_epoch(0, torch.Generator())
    own = warming.intra.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in plain.intra.state_dict().items())
    if plain.bank is None:
        assert all(torch.equal(value, warming.bank.state_dict()[name]) for name, value in before.items())
    else:
        assert torch.equal(plain.bank.features, warming.bank.features)
    terms = steps[1](images_of(3, 8, data), 3)
    assert "inter_loss" in terms
    assert "labels_changed" in terms


@PER_METHOD
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_loss_writes_nothing_and_commit_writes_the_batch_alone(method: str, norm: str) -> None:
    model, data = learner(method, {}, norm), batch()
    before = state(model)
    loss, embeddings, _ = model.loss(data, 0)
    loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())

    model.commit(embeddings, epoch=0)
    model.maintain(step=0, epoch=0)
    changed = {name for name, value in state(model).items() if not torch.equal(value, before[name])}
    queue = {"intra.queue", "intra.queue_position"} if method == "mocov2" else set()
    bank = {"bank.features", "bank.sums", "bank.centroids"}
    assert changed - {"bank.labels", "bank.counts"} == bank | queue

    omega = 0.5 if method == "npidv2" else 1.0
    expected = before["bank.features"].double().numpy()
    for image, row in zip(data.index.tolist(), embeddings.feature.double().numpy(), strict=True):
        mixed = (1 - omega) * expected[image] + omega * row
        expected[image] = mixed / np.linalg.norm(mixed)
    np.testing.assert_allclose(model.bank.features.numpy(), expected, atol=1e-6)
    centroids = before["bank.centroids"].double().numpy()
    for image in data.index.tolist():
        nearest = int(np.argmin(((centroids - expected[image]) ** 2).sum(1)))
        assert model.bank.labels[image] == nearest
    elsewhere = torch.tensor([i for i in range(IMAGES) if i not in data.index.tolist()])
    assert torch.equal(model.bank.labels[elsewhere], before["bank.labels"][elsewhere])


def test_plain_methods_without_a_bank_commit_without_one() -> None:
    model = learner("simclr")
    _, embeddings, _ = model.loss(batch(), 0)
    assert model.commit(embeddings, 0) == {}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("method", "sampler"),
    [
        *(("simclr", {"name": name}) for name in ("hard", "random", "semi_hard", "semi_easy")),
        ("simclr", {"name": "semi_hard", "candidates": 60}),
        ("mocov2", {"name": "semi_hard"}),
        ("byol", {"name": "semi_hard"}),
    ],
)
def test_a_rank_draws_the_pairs_one_process_would_for_its_rows(
    method: str, sampler: dict[str, Any], world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = learner(method, {"sampler": {"negatives": 4} | sampler})
    whole = random_embeddings(model.intra.directions, 8, model.intra.dim)

    def drawn(embeddings: Embeddings) -> Pairs:
        seed(model, 5)
        return pairs_of(model, embeddings)

    expected = drawn(whole)
    assert len(expected.positive.unique()) > 1
    assert (expected.negative.numel() > 0) == model.intra.uses_negatives
    monkeypatch.setattr(dist, "world", lambda: world)
    for rank in range(world):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        mine = dist.slice_of_rank(8)
        parts = (part[:, mine] for part in (whole.query, whole.target, whole.inter_query))
        found = drawn(Embeddings(whole.index[mine], *parts, whole.feature[mine]))
        rows = torch.arange(len(expected.positive)).view(-1, 8)[:, mine].flatten()  # of every direction
        assert torch.equal(found.positive, expected.positive[rows])
        assert torch.equal(found.negative, expected.negative[rows])


def cosine_after_margin(cosine: float, margin: float, kind: str) -> float:
    return cosine - margin if kind == "cosine" else float(np.cos(np.arccos(cosine) + margin))


@pytest.mark.parametrize("kinds", [("cosine", "arc"), ("arc", "cosine")])
@pytest.mark.parametrize("method", ["mocov2", "npidv2", "simclr"])
def test_each_branch_has_its_own_margin_of_its_own_kind(method: str, kinds: tuple[str, str]) -> None:
    intra_margin, inter_margin = 0.15, 0.25  # both keep θ + m inside [0, π] here
    model = learner(
        method, {"margin": inter_margin, "margin_kind": kinds[1]}, margin=intra_margin, margin_kind=kinds[0]
    )
    _, embeddings, _ = model.loss(batch(), 0)
    pairs, bank = pairs_of(model, embeddings), model.bank.features.double().numpy()
    temperature = model.intra.temperature
    losses = []
    for i, anchor in enumerate(embeddings.inter_query.detach().flatten(0, 1).double().numpy()):
        positive = cosine_after_margin(anchor @ bank[pairs.positive[i]], inter_margin, kinds[1])
        positive = np.exp(positive / temperature)
        negatives = [np.exp(anchor @ bank[n] / temperature) for n in pairs.negative[i].tolist() if n >= 0]
        assert negatives
        losses.append(-np.log(positive / (positive + sum(negatives))))
    inter = model.intra.inter_loss(embeddings, pairs, model.bank)
    assert inter.item() == pytest.approx(float(np.mean(losses)), rel=1e-4)

    if method == "mocov2":
        queue, losses = model.intra.queue.double().numpy(), []
        query, key = (t.detach()[0].double().numpy() for t in (embeddings.query, embeddings.target))
        for q, k in zip(query, key, strict=True):
            positive = np.exp(cosine_after_margin(q @ k, intra_margin, kinds[0]) / temperature)
            losses.append(-np.log(positive / (positive + np.exp(queue @ q / temperature).sum())))
        assert model.intra.loss(embeddings, None).item() == pytest.approx(float(np.mean(losses)), rel=1e-4)
    else:
        with_margin, plain = learner(method, margin=0.15, margin_kind=kinds[0]), learner(method)
        assert gradients(with_margin)[0] > gradients(plain)[0]  # a positive margin is stricter


@pytest.mark.parametrize("method", ["byol", "simsiam"])
def test_methods_without_negatives_take_margin_nce_where_it_is_asked_for(method: str) -> None:
    model, own = learner(method, {"loss": "margin_nce"}), learner(method, {})
    torch.manual_seed(1)
    _, embeddings, terms = model.loss(batch(), 0)
    pairs = pairs_of(model, embeddings)
    anchors = embeddings.inter_query.detach().flatten(0, 1).double().numpy()
    bank, labels, losses = model.bank.features.double().numpy(), model.bank.labels, []
    assert pairs.negative.shape[1] > 0
    for i, anchor in enumerate(anchors):
        present = pairs.negative[i][pairs.negative[i] >= 0]
        assert (labels[present] != labels[embeddings.index[i % len(embeddings.index)]]).all()
        positive = np.exp((anchor @ bank[pairs.positive[i]] + 0.5) / 0.2)
        losses.append(-np.log(positive / (positive + np.exp(bank[present] @ anchor / 0.2).sum())))
    inter = model.intra.inter_loss(embeddings, pairs, model.bank)
    assert inter.item() == pytest.approx(float(np.mean(losses)), rel=1e-4)
    torch.manual_seed(1)
    _, _, others = own.loss(batch(), 0)
    assert others["intra_loss"] == terms["intra_loss"]  # only the other branch has changed
    assert not own.intra.uses_negatives


@PER_METHOD
def test_a_soft_inter_loss_draws_nothing_and_compares_divisions_over_the_clusters(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(*_: Any) -> None:
        raise AssertionError("pairs were drawn")

    model = learner(method, {"loss": "soft", "soft_temperature": 0.3, "soft_target_temperature": 0.2})
    assert not model.intra.uses_negatives
    for half in ("_prepare_draw", "_complete_draw"):
        monkeypatch.setattr(model, half, drawn)
    torch.manual_seed(1)
    loss, embeddings, terms = model.loss(batch(), 0)
    weight = model.inter.intra_weight
    assert loss.item() == pytest.approx((weight * terms["intra_loss"] + (1 - weight) * terms["inter_loss"]).item())
    bank = model.bank
    target = bank.features[embeddings.index][None] if method == "npidv2" else embeddings.target
    centres = F.normalize(bank.centroids, dim=1).double()
    losses = []
    for one, other in zip(embeddings.inter_query.flatten(0, 1), target.flatten(0, 1), strict=True):
        found, expected = ((each.detach().double() @ centres.T) for each in (one, other))
        losses.append(-((expected / 0.2).softmax(0) * (found / 0.3).log_softmax(0)).sum().item())
    assert terms["inter_loss"].item() == pytest.approx(float(np.mean(losses)), rel=1e-4)
    loss.backward()
    model.commit(embeddings, 0)
    model.maintain(0, 0)
    model.end_epoch(0, torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    _, _, others = learner(method, {}).loss(batch(), 0)
    assert others["intra_loss"] == terms["intra_loss"]  # only the other branch has changed


SOFT_TARGETS: dict[str, Any] = {"loss": "soft", "target_view": {}}


@PER_METHOD
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_soft_targets_can_be_of_a_view_of_their_own(method: str, norm: str) -> None:
    with_own, without = learner(method, SOFT_TARGETS, norm), learner(method, {"loss": "soft"}, norm)
    extra = torch.randn(8, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(9))
    plain = batch()
    more = replace(plain, views=(*plain.views, extra))
    (loss, found, terms), (_, expected, others) = (
        model.loss(each, 0) for model, each in ((with_own, more), (without, plain))
    )
    for name in (
        "index",
        "query",
        "target",
        "inter_query",
        "feature",
    ):  # the bank, the queue and the method do not see it
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(terms["intra_loss"], others["intra_loss"])
    kept, other = with_own.state_dict(), without.state_dict()  # the former with its slow copy
    assert all(torch.equal(kept[name], other[name]) for name in other)  # nor do running statistics
    assert all(module.training for module in with_own.modules())
    encoder = copy.deepcopy(with_own.slow or with_own.intra.bank_encoder()).eval()
    with torch.no_grad():
        target = encoder(extra).inter_projection.double()
    centres, losses = F.normalize(with_own.bank.centroids, dim=1).double(), []
    for direction in found.inter_query.detach().double():
        for one, aim in zip(direction, target, strict=True):
            losses.append(-((aim @ centres.T / 0.05).softmax(0) * (one @ centres.T / 0.1).log_softmax(0)).sum().item())
    assert terms["inter_loss"].item() == pytest.approx(float(np.mean(losses)), rel=1e-4)
    loss.backward()  # in training mode again, with nothing changed in place that it needs


@PER_METHOD
@pytest.mark.parametrize("inter", [SOFT_TARGETS, {"loss": "soft"}, {}])
def test_a_slow_copy_sees_the_targets_view_of_methods_that_keep_none(method: str, inter: dict[str, Any]) -> None:
    """Seen by the encoder itself, queries and targets would run after each other."""
    model = learner(method, inter)
    kept, alone = model.slow, model.intra.bank_encoder() is model.intra.encoder
    assert (kept is not None) == (inter is SOFT_TARGETS and alone)
    assert alone == (method in ("npidv2", "simclr", "simsiam"))
    assert alone != settings_from({"method": METHODS[method]}).method.keeps_slow_encoder  # what settings are checked by
    assert kept is None or not any(parameter.requires_grad for parameter in kept.parameters())


def test_the_slow_copy_is_the_encoder_when_the_branch_begins_and_follows_it_from_then_on() -> None:
    model = learner("npidv2", SOFT_TARGETS | {"warmup_epochs": 1, "target_momentum": 0.9}, norm="batch")
    step = train_step(model, plan(2, epochs=2))
    step.target_view = Views([View()], SIDE, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    assert model.slow is not None
    at_first = copy.deepcopy(model.slow.state_dict())
    for number in range(2):
        step(images_of(number, 8, pixels()), number)
    assert all(torch.equal(at_first[name], value) for name, value in model.slow.state_dict().items())
    model.start_clusters(unit(IMAGES, model.bank.dim), torch.Generator().manual_seed(0))
    fast = model.intra.encoder.state_dict()
    assert all(torch.equal(value, fast[name]) for name, value in model.slow.state_dict().items())
    assert any(not torch.equal(at_first[name], value) for name, value in fast.items())
    expected = copy.deepcopy(fast)
    for number in range(2, 4):
        step(images_of(number, 8, pixels()), number)
        for name, value in model.intra.encoder.state_dict().items():
            if value.is_floating_point():  # weights, and running statistics, which it is measured by
                expected[name] = 0.9 * expected[name] + 0.1 * value
    for name, value in model.slow.state_dict().items():
        torch.testing.assert_close(value, expected[name]) if value.is_floating_point() else None
    assert "slow.projector.0.weight" in model.state_dict()  # a checkpoint has it


def test_a_forward_that_fails_leaves_the_encoder_of_soft_targets_as_it_was() -> None:
    model = learner("byol", SOFT_TARGETS)
    wrong = torch.zeros(8, 5, SIDE, SIDE)  # five channels
    with pytest.raises(RuntimeError):
        model.loss(replace(batch(), views=(*batch().views, wrong)), 0)
    assert all(module.training for module in model.modules())


def test_the_view_of_soft_targets_is_made_while_the_branch_is_there_and_changes_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[bool, list[tuple[Tensor, ...]]] = {True: [], False: []}
    for own in seen:
        model = learner("byol", {"loss": "soft", "warmup_epochs": 1} | ({"target_view": {}} if own else {}))
        step, loss = train_step(model, plan(2, epochs=2)), model.loss
        step.target_view = Views([View()], SIDE, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)) if own else None

        def watched(batch: Batch, epoch: int, own: bool = own, loss: Any = loss) -> Any:
            seen[own].append(batch.views)
            return loss(batch, epoch)

        monkeypatch.setattr(model, "loss", watched)
        for number in range(4):
            step(images_of(number, 8, pixels()), number)
    assert [len(views) for views in seen[True]] == [2, 2, 3, 3]
    assert [len(views) for views in seen[False]] == [2, 2, 2, 2]
    first = next(iter(zip(seen[True], seen[False], strict=True)))
    assert all(torch.equal(one, other) for one, other in zip(*first, strict=True))
    third = seen[True][2]  # by then the weights differ by nothing: views depend on images and seeds alone
    assert all(torch.equal(one, other) for one, other in zip(third[:2], seen[False][2], strict=True))
    assert not any(torch.equal(third[2], other) for other in third[:2])


@pytest.mark.parametrize("view", [None, {"grey": 1.0}])
def test_a_step_is_built_with_the_view_of_soft_targets_that_is_asked_for(view: dict[str, Any] | None) -> None:
    tree = {
        "data": {"image_size": SIDE, "batch": 8},
        "schedule": {"epochs": 2},
        "engine": {"mode": "eager", "precision": "fp32"},
        "method": METHODS["byol"],
        "model": {"backbone": "resnet10", "width": 8, "stem": "strided"},
        "inter": INTER | {"loss": "soft", "target_view": view},
    }
    built = build_step(settings_from(tree), IMAGES, torch.device("cpu")).target_view
    assert (None if built is None else built.views) == (None if view is None else (View(grey=1.0),))


@pytest.mark.parametrize("before", ["soft", "margin_nce"])
@PER_METHOD
def test_a_learner_of_a_method_that_was_in_another_is_as_one_of_a_new_method(method: str, before: str) -> None:
    used, fresh = learner(method, {"loss": before}), learner(method, {})
    again = Learner(used.intra, used.bank, used.labels, used.sampler, fresh.inter)
    again.generator = torch.Generator()
    found, expected = (gradients(model)[0] for model in (again, fresh))
    assert again.intra.uses_negatives == type(fresh.intra).uses_negatives
    assert found == expected


@PER_METHOD
def test_accumulated_gradient_is_the_mean_of_the_micro_batches(method: str) -> None:
    schedule, data = plan(4, accumulate=2), pixels()
    model = learner(method, {})
    recorded: list[list[Tensor]] = []
    calls = {"commit": 0, "after_optimiser": 0}
    count(model, "commit", calls)
    count(model.intra, "after_optimiser", calls)
    optimiser = torch.optim.SGD(model.intra.encoder.parameters(), lr=0.1)
    optimiser.step = lambda *_, **__: recorded.append([p.grad.clone() for p in model.intra.encoder.parameters()])  # type: ignore[method-assign]
    step = train_step(model, schedule, optimiser)
    terms = [step(images_of(number, 8, data), number) for number in range(2)]
    assert calls == {"commit": 2, "after_optimiser": 1}
    assert len(recorded) == 1

    # The same by hand: the second micro-batch sees the bank and queue that the first has written.
    other = learner(method, {})
    views, separate = train_step(other, schedule), []
    for number in range(2):
        other.intra.generator.manual_seed(schedule.seed_of(number, 2))
        other.generator.manual_seed(schedule.seed_of(number, 4))
        views.view_generator.manual_seed(schedule.seed_of(number, 1))
        loss, embeddings, _ = other.loss(views.views(images_of(number, 8, data), views.view_generator), 0)
        assert torch.equal(loss.detach(), terms[number]["loss"])
        other.zero_grad()
        loss.backward()
        separate.append([p.grad.clone() for p in other.intra.encoder.parameters()])
        other.commit(embeddings, 0)
        other.maintain(number, 0)
    for found, first, second in zip(recorded[0], *separate, strict=True):
        torch.testing.assert_close(found, (first + second) / 2, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(value, other.bank.state_dict()[name]) for name, value in model.bank.state_dict().items())


def count(owner: Any, name: str, calls: dict[str, int]) -> None:
    original = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        calls[name] += 1
        return original(*arguments)

    object.__setattr__(owner, name, counted)


def test_each_part_of_the_state_is_kept_once() -> None:
    for method in METHODS:
        names = list(learner(method, {}).state_dict())
        tops = {".".join(name.split(".")[:2]) for name in names}
        extra = {
            "mocov2": {"intra.key_encoder", "intra.queue", "intra.queue_position"},
            "byol": {"intra.target_encoder"},
        }
        bank = {f"bank.{name}" for name in ("features", "labels", "centroids", "counts", "sums", "repair_due")}
        assert tops == {"intra.encoder"} | bank | extra.get(method, set())


@PER_METHOD
def test_state_resumes_to_the_bit(method: str) -> None:
    data, whole = pixels(), learner(method, {})
    step = train_step(whole, plan(6))
    for number in range(3):
        step(images_of(number, 8, data), number)
    half, optimiser = state_of(whole), copy.deepcopy(step.optimiser.state_dict())
    expected = [step(images_of(number, 8, data), number)["loss"] for number in range(3, 6)]
    again = learner(method, {}, seed=5)
    resumed = train_step(again, plan(6))
    again.load_state_dict(half)
    resumed.optimiser.load_state_dict(optimiser)
    found = [resumed(images_of(number, 8, data), number)["loss"] for number in range(3, 6)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def state_of(model: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_start_clusters_fills_the_bank() -> None:
    model = learner("mocov2", {})
    features = unit(IMAGES, 16, seed=21)
    model.start_clusters(features, torch.Generator().manual_seed(2))
    torch.testing.assert_close(model.bank.features, features)
    assert int(model.bank.counts.min()) > 0


@PER_METHOD
def test_views_taken_together_are_the_views_one_by_one(method: str) -> None:
    """``join_views`` changes how a batch goes through the encoders, not what comes out, nor any state."""
    schedule, data = plan(4), pixels()
    models = [learner(method, {}) for _ in range(2)]
    models[1].intra.join_views()
    assert models[1].intra.together == (models[1].intra.encoded_views > 1)
    steps = [train_step(model, schedule) for model in models]
    for number in range(4):
        terms = [step(images_of(number, 8, data), number) for step in steps]
        assert float(terms[0]["loss"]) == pytest.approx(float(terms[1]["loss"]), rel=1e-4)
    for name, value in models[0].state_dict().items():
        unit_of = FIXED_POINT if name == "bank.sums" else 1
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=1e-3, atol=1e-4 * unit_of, msg=name)
