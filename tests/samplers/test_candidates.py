"""Ranking a sample of the bank (``candidates``) against its definition, spelled out in plain Python.

Features are multiples of 1/128 below 1 in three dimensions: exact in bfloat16, and their products in float32, whatever
the shape of a matrix product. So everything is compared to the bit.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from brute_force import StandInBank, make_bank
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from torch.nn import functional as F

from interclr.config import load_settings
from interclr.engine.dataset import Facts
from interclr.engine.settle import settle
from interclr.losses import cosines
from interclr.samplers import SemiEasy, SemiHard
from interclr.types import Pairs, UserError

ANCHORS = 5
both = pytest.mark.parametrize("kind", [SemiHard, SemiEasy])
Kind = type[SemiHard] | type[SemiEasy]


def product(a: Tensor, b: Tensor) -> float:
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def definition(
    kind: Kind, query: Tensor, label: int, bank: StandInBank, count: int, sample: int, priority: Tensor, fraction: str
) -> tuple[list[int], list[float]]:
    """One anchor's negatives and cosines. Of equals the preferred one is in the pool; in a whole bank, the first."""
    labels = bank.labels.tolist()
    others = [j for j in priority.tolist()[:sample] if labels[j] != label]
    cosine = {j: product(query, bank.features[j]) for j in others}
    best = sorted(others if sample < len(labels) else sorted(others), key=lambda j: cosine[j], reverse=kind is SemiHard)
    pool = set(best[: math.ceil(Fraction(fraction) * len(others))])
    drawn = [j for j in others if j in pool][:count]
    absent = min(count, len(labels)) - len(drawn)
    return drawn + [-1] * absent, [cosine[j] for j in drawn] + [-math.inf] * absent


def exact_numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-127, 128, shape, generator=generator) / 128


def some_bank(size: int, shape: str, distinct: int, dtype: torch.dtype, seed: int) -> StandInBank:
    """``shape`` of the clusters: alike, each half as large as the one before, one with nearly everything, or alone."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(size, generator=generator)
    labels = {
        "alike": (uniform * 4).long(),
        "halving": (-uniform.log2()).clamp_max(9).long(),
        "giant": ((uniform - 0.9).clamp_min(0) * 30).ceil().long(),
        "alone": torch.randperm(size, generator=generator),
    }[shape]
    features = exact_numbers((distinct, 3), generator)[torch.randint(distinct, (size,), generator=generator)]
    return make_bank(features.to(dtype), labels)


def random_numbers(size: int, seed: int, anchors: int = ANCHORS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, the anchors' images, priority and lots."""
    generator = torch.Generator().manual_seed(seed + 1)
    index = torch.randint(size, (anchors,), generator=generator)
    lots = torch.randint(2**62, (anchors,), generator=generator)
    return exact_numbers((anchors, 3), generator), index, torch.randperm(size, generator=generator), lots


def check_rows(
    kind: Kind,
    pairs: Pairs,
    query: Tensor,
    index: Tensor,
    bank: StandInBank,
    sampler: SemiHard | SemiEasy,
    order: Tensor,
) -> None:
    """Every row is the definition's, has no image twice and none of the anchor's own cluster."""
    assert sampler.candidates is not None
    for row, own in enumerate(bank.labels[index].tolist()):
        drawn, cosine = definition(
            kind, query[row], own, bank, sampler.negatives, sampler.candidates, order, str(sampler.pool_fraction)
        )
        assert pairs.negative[row].tolist() == drawn
        if sampler.candidates < len(bank.labels):
            assert pairs.cosine is not None
            assert pairs.cosine[row].tolist() == cosine
        real = [j for j in pairs.negative[row].tolist() if j >= 0]
        assert len(set(real)) == len(real)
        assert own not in bank.labels[real].tolist()


banks = st.builds(
    some_bank,
    size=st.integers(2, 90),
    shape=st.sampled_from(["alike", "halving", "giant", "alone"]),
    distinct=st.sampled_from([1, 3, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
fractions = st.sampled_from(["0.1", "0.3", "0.5", "1.0", "0.001"])


@settings(max_examples=250, deadline=None)
@given(
    kind=st.sampled_from([SemiHard, SemiEasy]),
    bank=banks,
    fraction=fractions,
    workspace=st.sampled_from([1, 5_000, 2**28]),
    plain=st.booleans(),  # the way of a GPU without Triton
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_select_is_the_definition(
    kind: Kind, bank: StandInBank, fraction: str, workspace: int, plain: bool, seed: int, data: st.DataObject
) -> None:
    size = len(bank.labels)
    count = data.draw(st.integers(1, size + 5), label="negatives")
    sample = data.draw(st.integers(count, max(size, count) + 5), label="candidates")
    query, index, priority, lots = random_numbers(size, seed)
    sampler = kind(count, float(fraction), workspace, candidates=sample)
    if plain:
        sampler._select_on_cpu = sampler._select_plain  # type: ignore[method-assign]
    pairs = sampler.select(query, index, bank, priority, lots)
    assert pairs.negative.shape == (ANCHORS, min(count, size))
    assert pairs.negative.dtype == torch.int64
    check_rows(kind, pairs, query, index, bank, sampler, priority)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([SemiHard, SemiEasy]),
    shape=st.sampled_from(["alike", "halving", "giant", "alone"]),
    distinct=st.sampled_from([1, 3, 10**4]),
    order=st.sampled_from(["random", "best first", "best last", "own cluster first"]),
    fraction=st.sampled_from(["0.1", "0.01", "0.6"]),
    count=st.sampled_from([5, 150, 900]),
    seed=st.integers(0, 10**6),
)
def test_select_is_the_definition_where_a_cpu_guesses_a_floor(
    kind: Kind, shape: str, distinct: int, order: str, fraction: str, count: int, seed: int
) -> None:
    """From 2,048 candidates the first 512 are taken for a sample; here they may be anything but that."""
    size = 2_900
    bank = some_bank(size, shape, distinct, torch.float32, seed)
    query, index, priority, lots = random_numbers(size, seed, 3)
    near = (bank.features @ query[0])[priority]
    if order == "own cluster first":
        priority = priority[(bank.labels[priority] != bank.labels[index[0]]).long().argsort(stable=True)]
    elif order != "random":
        priority = priority[near.argsort(stable=True, descending=(order == "best first") == (kind is SemiHard))]
    sampler = kind(count, float(fraction), candidates=2_048 + seed % 500)
    pairs = sampler.select(query, index, bank, priority, lots)
    check_rows(kind, pairs, query, index, bank, sampler, priority)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from([SemiHard, SemiEasy]), bank=banks, fraction=fractions, seed=st.integers(0, 10**6))
def test_as_many_candidates_as_images_is_the_exact_sampler(
    kind: Kind, bank: StandInBank, fraction: str, seed: int
) -> None:
    size = len(bank.labels)
    numbers = random_numbers(size, seed)
    count = 1 + seed % size
    exact = kind(count, float(fraction)).select(numbers[0], numbers[1], bank, *numbers[2:])
    for sample in (size, size + 1, 10 * size):
        pairs = kind(count, float(fraction), candidates=sample).select(numbers[0], numbers[1], bank, *numbers[2:])
        assert torch.equal(pairs.positive, exact.positive)
        assert torch.equal(pairs.negative, exact.negative)
        assert pairs.cosine is None
        assert exact.cosine is None


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_features(kind: Kind, dtype: torch.dtype) -> None:
    """Unit vectors of 32 numbers, under autocast: ranked by, and returned with, their float32 products."""
    generator = torch.Generator().manual_seed(0)
    features = F.normalize(torch.randn(500, 32, generator=generator), dim=1).to(dtype)
    bank = make_bank(features, torch.randint(9, (500,), generator=generator))
    query, index = F.normalize(torch.randn(6, 32, generator=generator), dim=1), torch.arange(6)
    priority, lots = torch.randperm(500, generator=generator), torch.zeros(6, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pairs = kind(20, 0.1, candidates=240).select(query.requires_grad_(), index, bank, priority, lots)
    assert pairs.cosine is not None
    assert not pairs.cosine.requires_grad
    for row in range(6):
        drawn, _ = definition(kind, query[row], int(bank.labels[row]), bank, 20, 240, priority, "0.1")
        assert pairs.negative[row].tolist() == drawn
    every = query.detach().double() @ features.double().T
    torch.testing.assert_close(pairs.cosine.double(), every.gather(1, pairs.negative), rtol=0, atol=1e-6)


@both
@pytest.mark.parametrize("sample", [150, 2_200])
def test_an_anchors_draw_does_not_depend_on_the_others(kind: Kind, sample: int) -> None:
    """Nor on chunks: alone, in another order or among others, it is the same."""
    bank = some_bank(2_500, "halving", 10**4, torch.float32, 0)
    query, index, priority, lots = random_numbers(2_500, 1, 12)
    sampler = kind(10, 0.1, candidates=sample)
    whole = sampler.select(query, index, bank, priority, lots)
    assert whole.cosine is not None
    for rows in ([3], [11, 0, 3], list(range(11, -1, -1)), [7] * 4):
        part = sampler.select(query[rows], index[rows], bank, priority, lots[rows])
        assert part.cosine is not None
        assert torch.equal(part.positive, whole.positive[rows])
        assert torch.equal(part.negative, whole.negative[rows])
        assert torch.equal(part.cosine, whole.cosine[rows])
    for workspace in (1, 32 * sample * 5, 32 * sample * 12):
        chunked = kind(10, 0.1, workspace, candidates=sample).select(query, index, bank, priority, lots)
        assert chunked.cosine is not None
        assert torch.equal(chunked.negative, whole.negative)
        assert torch.equal(chunked.cosine, whole.cosine)


@both
def test_pools_too_small_for_the_draw_are_used_up(kind: Kind) -> None:
    """Nearly all candidates are of the anchor's own cluster: a few others, some anchors have none."""
    bank = some_bank(400, "giant", 10**4, torch.float32, 2)
    query, index, priority, lots = random_numbers(400, 3)
    own = torch.full_like(index, int((bank.labels == 0).nonzero()[0, 0]))
    few, none = priority, priority[(bank.labels[priority] != 0).long().argsort(stable=True)]
    sampler = kind(40, 0.3, candidates=200)
    real = [(sampler.select(query, own, bank, order, lots).negative >= 0).sum(1) for order in (few, none)]
    others = int((bank.labels[few[:200]] != 0).sum())
    assert 0 < math.ceil(Fraction("0.3") * others) < 40
    assert real[0].tolist() == [math.ceil(Fraction("0.3") * others)] * ANCHORS
    assert real[1].tolist() == [0] * ANCHORS
    cosine = sampler.select(query, own, bank, none, lots).cosine
    assert cosine is not None
    assert torch.isneginf(cosine).all()


@both
def test_members_of_the_exact_pool_are_drawn_equally_often(kind: Kind) -> None:
    """Well inside its border; and what is well outside is never drawn."""
    bank = some_bank(400, "alike", 10**4, torch.float32, 5)
    query, index, _, _ = random_numbers(400, 6, 1)
    sampler = kind(6, 0.25, candidates=160)
    counts = torch.zeros(400, dtype=torch.int64)
    for seed in range(3_000):
        pairs = sampler.draw(query, index, bank, torch.Generator().manual_seed(seed))
        counts[pairs.negative[0]] += 1
    others = [j for j in range(400) if bank.labels[j] != bank.labels[index[0]]]
    ranked = sorted(others, key=lambda j: product(query[0], bank.features[j]), reverse=kind is SemiHard)
    border = math.ceil(len(others) / 4)
    inside = counts[ranked[: int(0.6 * border)]]
    assert len(inside) > 30
    assert int(inside.min()) > 100
    assert chisquare(inside.numpy()).pvalue > 1e-4
    assert int(counts[ranked[2 * border :]].sum()) == 0
    assert int(counts.sum()) == 3_000 * 6


@both
def test_fewer_candidates_than_negatives_is_an_error(kind: Kind) -> None:
    for candidates in (7, 0, -1):
        with pytest.raises(ValueError, match=f"candidates must be at least negatives=8, not {candidates}"):
            kind(8, candidates=candidates)
    kind(8, candidates=8)


def test_fewer_candidates_than_negatives_is_the_users_to_mend() -> None:
    with pytest.raises(UserError):
        SemiHard(8, candidates=7)


@pytest.mark.parametrize(
    ("images", "negatives", "fraction", "expected"),
    [
        (3_999, "16", "0.1", "all"),
        (4_000, "16", "0.1", 168),
        (10_000, "476", "0.1", 4_998),
        (10_000, "477", "0.1", "all"),  # 5,009 are more than half
        (43_007, "2048", "0.1", "all"),
        (43_008, "2048", "0.1", 21_504),
        (43_008, "2048", "0.05", "all"),
        (50_000, "auto", "0.1", 5_376),  # K = 512
        (1_281_167, "16384", "0.1", 172_032),
    ],
)
@pytest.mark.parametrize("name", ["semi_hard", "semi_easy"])
def test_auto_candidates(name: str, images: int, negatives: str, fraction: str, expected: int | str) -> None:
    wanted = [f"name={name}", f"negatives={negatives}", f"pool_fraction={fraction}"]
    given = load_settings("folder", [f"inter.sampler.{override}" for override in wanted])
    settled, chosen = settle(given, Facts(images, 32, "cpu"))
    assert settled.inter is not None
    sampler = settled.inter.sampler
    assert sampler.candidates == expected
    assert ("inter.sampler.candidates", str(expected)) in [choice[:2] for choice in chosen]
    if isinstance(expected, int):
        assert expected == math.ceil(Fraction("1.05") * int(sampler.negatives) / Fraction(fraction))
    assert sampler.build().candidates == (expected if isinstance(expected, int) else None)


@pytest.mark.parametrize("wanted", ["all", "30000"])
def test_candidates_that_were_given_are_kept(wanted: str) -> None:
    settled, chosen = settle(load_settings("folder", [f"inter.sampler.candidates={wanted}"]), Facts(50_000, 32, "cpu"))
    assert settled.inter is not None
    assert str(settled.inter.sampler.candidates) == wanted
    assert "inter.sampler.candidates" not in [key for key, _, _ in chosen]


@both
def test_pairs_of_one_query_serve_another(kind: Kind) -> None:
    """Cosines are handed on only where that is asked for: they are those of the draw's query, not of the loss's."""
    bank = some_bank(400, "alike", 10**4, torch.float32, 5)
    query, index, _, _ = random_numbers(400, 6, 1)
    other = torch.nn.functional.normalize(query.roll(1, 0) + 0.1, dim=1)
    sampler = kind(6, 0.25, candidates=160)
    pairs = sampler.draw(query, index, bank, torch.Generator().manual_seed(0))
    _, negative = cosines(other, bank.features, pairs)
    expected = (bank.features[pairs.negative] * other[:, None]).sum(2)
    torch.testing.assert_close(negative, expected)
    handed = sampler.draw(query, index, bank, torch.Generator().manual_seed(0), hand_on_cosines=True)
    assert torch.equal(handed.negative, pairs.negative)
    torch.testing.assert_close(handed.cosine, (bank.features[pairs.negative] * query[:, None]).sum(2))
