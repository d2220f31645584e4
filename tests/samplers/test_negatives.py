from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from brute_force import STRATEGIES, StandInBank, grid_bank, make_bank, negatives, pool
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from scipy.stats import chisquare
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from interclr import samplers
from interclr.samplers import Hard, Random, SamplerConfig, SemiEasy, SemiHard

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@st.composite
def cluster_shapes(draw: st.DrawFn) -> list[int]:
    """Labels of a bank: anything, all singletons, one cluster, or a giant with a singleton beside it."""
    size = draw(st.integers(1, 40))
    shape = draw(st.sampled_from(["any", "singletons", "one", "giant"]))
    if shape == "singletons":
        return draw(st.permutations(range(size)))
    if shape == "giant" and size > 1:
        lonely = draw(st.integers(0, size - 1))
        return [int(i == lonely) for i in range(size)]
    clusters = 1 if shape == "one" else draw(st.integers(1, size))
    return draw(st.lists(st.integers(0, clusters - 1), min_size=size, max_size=size))


@every_strategy
@settings(max_examples=60, deadline=None)
@given(
    labels=cluster_shapes(),
    count=st.integers(1, 50),
    span=st.integers(0, 2),  # 0: all features are the same
    fraction=st.sampled_from(["0.1", "0.3", "0.5", "1.0", "0.001"]),
    workspace=st.sampled_from([1, 5000, 2**28]),
    seed=st.integers(0, 10**6),
)
def test_select_is_the_brute_force(strategy, labels, count, span, fraction, workspace, seed):
    bank = grid_bank(labels, seed, span=span)
    generator = torch.Generator().manual_seed(seed)
    size = len(labels)
    index = torch.randint(size, (7,), generator=generator)
    query = torch.randint(-2, 3, (7, 3), generator=generator).float()
    priority = torch.randperm(size, generator=generator)
    lots = torch.randint(2**62, (7,), generator=generator)
    sampler = STRATEGIES[strategy](count, float(fraction), workspace=workspace)
    pairs = sampler.select(query, index, bank, priority, lots)

    assert pairs.negative.shape == (7, min(count, size))
    assert pairs.negative.dtype == torch.int64
    for row in range(7):
        label = int(bank.labels[index[row]])
        drawn = pairs.negative[row].tolist()
        assert drawn == negatives(strategy, query[row], label, bank, count, priority, fraction)
        real = [j for j in drawn if j >= 0]
        assert len(set(real)) == len(real)
        assert all(int(bank.labels[j]) != label for j in real)
        members = pool(strategy, query[row], label, bank, fraction)
        assert len(real) == min(count, len(members))
        assert drawn[len(real) :] == [-1] * (len(drawn) - len(real))


@every_strategy
def test_draws_from_real_features_are_in_the_exact_pool(strategy):
    torch.manual_seed(0)
    bank = make_bank(F.normalize(torch.randn(300, 16), dim=1), torch.randint(0, 12, (300,)))
    query, index = F.normalize(torch.randn(20, 16), dim=1), torch.arange(20)
    pairs = STRATEGIES[strategy](10).draw(query, index, bank)
    for row in range(20):
        members = pool(strategy, query[row], int(bank.labels[row]), bank)
        drawn = pairs.negative[row].tolist()
        assert len(set(drawn)) == 10
        assert set(drawn) <= set(members)
        if strategy == "hard":
            assert drawn == members[:10]


@pytest.mark.parametrize(("strategy", "fraction"), [("semi_hard", "0.5"), ("random", "1.0"), ("semi_easy", "0.5")])
def test_every_subset_of_the_pool_is_equally_likely(strategy, fraction):
    labels = [0, 0, 1, 1, 2, 2, 0, 0] if strategy == "random" else [0, 1, 2, 1, 2, 3, 3, 1, 2, 4, 0]
    bank = grid_bank(labels, seed=3)
    query, index = torch.tensor([[1.0, 2.0, -1.0]]), torch.tensor([0])
    members = pool(strategy, query[0], 0, bank, fraction)
    subsets = {frozenset(pair): 0 for pair in combinations(members, 2)}
    assert len(subsets) >= 6
    sampler = STRATEGIES[strategy](2, float(fraction))
    for seed in range(3000):
        pairs = sampler.draw(query, index, bank, torch.Generator().manual_seed(seed))
        subsets[frozenset(pairs.negative[0].tolist())] += 1
    assert chisquare(list(subsets.values())).pvalue > 1e-3


@every_strategy
def test_all_anchors_of_a_batch_share_one_priority(strategy):
    """The documented price: the same anchor twice in a batch draws the same negatives, in another step others."""
    bank = grid_bank([0, 1, 2, 3] * 20)
    query, index = bank.features[[0, 0]], torch.tensor([0, 0])
    sampler = STRATEGIES[strategy](4, 0.5)
    first, second = (sampler.draw(query, index, bank, torch.Generator().manual_seed(seed)).negative for seed in (0, 1))
    assert torch.equal(first[0], first[1])
    assert torch.equal(first, second) == (strategy == "hard")


@every_strategy
def test_draw_never_looks_at_values_on_the_host(strategy):
    """Under fake tensors there are no values: .item(), nonzero and shapes that depend on data raise."""
    with FakeTensorMode(), torch.device("cuda"):  # on a CPU the host is where the values are
        bank = StandInBank(torch.randn(50, 8), torch.zeros(50, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
        pairs = STRATEGIES[strategy](20).draw(torch.randn(6, 8), torch.zeros(6, dtype=torch.int64), bank)
    assert pairs.positive.shape == (6,)
    assert pairs.negative.shape == (6, 20)


@every_strategy
def test_a_bank_in_half_precision_is_ranked_in_float32(strategy):
    torch.manual_seed(0)
    features = F.normalize(torch.randn(300, 16), dim=1).bfloat16()
    wide, narrow = (make_bank(f, torch.arange(300) % 7) for f in (features.float(), features))
    index = torch.arange(20)
    query = F.normalize(torch.randn(20, 16), dim=1)
    sampler = STRATEGIES[strategy](10)
    expected = sampler.draw(query, index, wide, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pairs = sampler.draw(query.requires_grad_(), index, narrow, torch.Generator().manual_seed(0))
    assert torch.equal(pairs.negative, expected.negative)


def test_pool_size_is_exact():
    sizes = [SemiHard(1, 0.1).pool_size(others) for others in (0, 1, 10, 11, 70, 1_281_000)]
    assert sizes == [0, 1, 1, 2, 7, 128_100]
    assert SemiHard(1, 1e-12).pool_size(5) == 1


@every_strategy
def test_refuses_what_cannot_be(strategy):
    with pytest.raises(ValueError, match="negatives"):
        STRATEGIES[strategy](0)
    for fraction in (0.0, -0.1, 1.1, np.nan):
        with pytest.raises(ValueError, match="pool_fraction"):
            STRATEGIES[strategy](1, fraction)


@every_strategy
def test_config_builds_its_sampler(strategy):
    adapter = TypeAdapter(SamplerConfig)
    sampler = adapter.validate_python({"name": strategy, "negatives": 7}).build()
    assert type(sampler) is STRATEGIES[strategy]
    assert (sampler.negatives, sampler.pool_fraction) == (7, 0.1)
    assert adapter.validate_python({"name": strategy}).negatives == "auto"
    with pytest.raises(ValidationError):
        adapter.validate_python({"name": strategy, "negatives": 0})
    with pytest.raises(ValidationError):
        adapter.validate_python({"name": strategy, "negatives": 1, "pool_fractoin": 0.1})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_strategy
def test_gpu_selects_what_the_cpu_selects_without_waiting(strategy):
    labels = torch.randint(0, 50, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    bank = grid_bank(labels, dim=8)
    index = torch.arange(64)
    numbers = torch.randperm(4000), torch.randint(2**62, (64,))
    sampler = STRATEGIES[strategy](500, 0.2)
    expected = sampler.select(bank.features[index], index, bank, *numbers)
    there = StandInBank(bank.features.cuda(), bank.labels.cuda(), bank.counts.cuda())
    query, where, numbers = bank.features[index].cuda(), index.cuda(), tuple(n.cuda() for n in numbers)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pairs = sampler.select(query, where, there, *numbers)
        sampler.draw(query, where, there, torch.Generator("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(pairs.positive.cpu(), expected.positive)
    assert torch.equal(pairs.negative.cpu(), expected.negative)


def test_random_needs_no_similarity():
    bank = grid_bank([0, 1, 0, 1])
    query = torch.full((1, 3), torch.nan)
    assert Random(2).draw(query, torch.tensor([0]), bank).negative.sort().values.tolist() == [[1, 3]]


@settings(max_examples=60, deadline=None)
@given(
    columns=st.sampled_from([1, 7, 300, 2500]),
    clusters=st.integers(1, 5),
    negatives=st.integers(1, 300),
    fraction=st.sampled_from([0.001, 0.1, 0.37, 1.0]),
    levels=st.sampled_from([1, 3, 1_000_000]),  # few levels: many ties
    ordered=st.booleans(),  # the first columns are the best: not the sample that the floor takes them for
    seed=st.integers(0, 10_000),
)
def test_selection_on_a_cpu_is_the_plain_one(columns, clusters, negatives, fraction, levels, ordered, seed):
    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(-levels, levels + 1, (5, columns), generator=generator) / levels
    score[0] = torch.nan
    score = score.sort(1, descending=True).values if ordered else score
    labels = torch.randint(clusters, (columns,), generator=generator)
    own = torch.randint(clusters + 1, (5,), generator=generator)
    chosen = torch.randperm(5 * columns, generator=generator)[:columns]
    sampler = SemiHard(min(negatives, columns), fraction, candidates=columns)
    kept = score.clone()
    index, cosine = sampler._select_on_cpu(score, own, labels, chosen)
    plain = sampler._select_plain(score, own, labels, chosen)
    assert torch.equal(index, plain[0])
    assert torch.equal(cosine.nan_to_num(7), plain[1].nan_to_num(7))
    assert torch.equal(score.nan_to_num(7), kept.nan_to_num(7))


def test_every_strategy_that_can_be_configured_is_shown() -> None:
    found = samplers.every_strategy(3, 0.25)
    assert list(found) == ["hard", "semi-hard", "random", "semi-easy"]
    assert [type(sampler) for sampler in found.values()] == [Hard, SemiHard, Random, SemiEasy]
    assert {sampler.negatives for sampler in found.values()} == {3}
    assert found["semi-hard"].pool_size(100) == found["semi-easy"].pool_size(100) == 25
