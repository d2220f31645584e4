"""Small-cluster repair over generated cluster shapes."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from interclr.bank import MemoryBank
from interclr.labels import minimum_size, repair


def make(size: int, clusters: int, used: int, skew: float, distinct: int, seed: int) -> MemoryBank:
    """``used`` of ``clusters`` ids in use, in sizes from even (skew 0) to one giant cluster, ``distinct`` features."""
    generator = torch.Generator().manual_seed(seed)
    bank = MemoryBank(size, 6, clusters)
    features = normalize(torch.randn(distinct, 6, generator=generator), dim=1)
    bank.fill(features[torch.randint(distinct, (size,), generator=generator)])
    ids = torch.randperm(clusters, generator=generator)[:used]
    weight = torch.arange(1, used + 1) ** -skew
    bank.assign(ids[torch.multinomial(weight, size, replacement=True, generator=generator)])
    return bank


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, float, int, int]:
    size = draw(st.integers(1, 150))
    clusters = draw(st.one_of(st.just(1), st.just(size), st.integers(1, size)))
    used = draw(st.one_of(st.just(1), st.just(clusters), st.integers(1, clusters)))
    skew = draw(st.sampled_from([0.0, 1.0, 2.0, 8.0]))
    distinct = draw(st.one_of(st.just(1), st.just(size), st.integers(1, size)))
    return size, clusters, used, skew, distinct, draw(st.integers(0, 99))


@settings(max_examples=150, deadline=None)
@given(shape=shapes(), min_cluster=st.one_of(st.none(), st.integers(0, 40)))
@example(shape=(150, 1, 1, 0.0, 150, 0), min_cluster=None)
@example(shape=(150, 150, 1, 0.0, 1, 0), min_cluster=20)
@example(shape=(150, 149, 149, 0.0, 150, 0), min_cluster=None)
@example(shape=(150, 30, 30, 8.0, 1, 0), min_cluster=40)
@example(shape=(150, 75, 1, 0.0, 2, 0), min_cluster=None)
def test_invariants(shape: tuple[int, int, int, float, int, int], min_cluster: int | None) -> None:
    bank = make(*shape)
    again = make(*shape)
    counts, labels, features = bank.counts.clone(), bank.labels.clone(), bank.features.clone()
    least = minimum_size(bank.size, bank.clusters, min_cluster)
    repaired = repair(bank, min_cluster)

    assert repaired == int((counts < least).sum())
    assert int(bank.counts.sum()) == bank.size
    assert int(bank.counts.min()) >= least >= 1
    assert torch.equal(bank.features, features)
    if repaired == 0:
        assert torch.equal(bank.labels, labels)
    # Members of a kept cluster stay, or leave for an emptied id when their cluster is cut.
    was_small = counts < least
    moved = (bank.labels != labels) & ~was_small[labels]
    assert was_small[bank.labels[moved]].all()
    state = {name: value.clone() for name, value in bank.state_dict().items()}
    bank.rebuild()
    assert all(torch.equal(value, state[name]) for name, value in bank.state_dict().items())
    assert repair(bank, min_cluster) == 0  # done is done
    repair(again, min_cluster)
    assert torch.equal(again.labels, bank.labels)  # deterministic


def test_cuts_a_cluster_where_two_means_would() -> None:
    bank = MemoryBank(60, 4, 3)
    poles = torch.tensor([[1.0, 0, 0, 0]] * 15 + [[0, 1.0, 0, 0]] * 25 + [[0, 0, 0, -1.0]] * 20)
    bank.fill(poles + 0.05 * torch.randn(60, 4, generator=torch.Generator().manual_seed(0)))
    bank.assign(torch.tensor([0] * 40 + [2] * 20))  # cluster 0 holds two poles, 1 is empty
    assert repair(bank) == 1
    assert bank.counts.tolist() in ([15, 25, 20], [25, 15, 20])
    assert len(set(bank.labels[:15].tolist())) == len(set(bank.labels[15:40].tolist())) == 1


def test_members_of_a_small_cluster_go_to_the_nearest_that_stays() -> None:
    bank = MemoryBank(41, 3, 2)
    bank.fill(torch.cat([torch.eye(3)[:1].expand(40, 3), torch.eye(3)[1:2]]))
    bank.assign(torch.tensor([0] * 40 + [1]))
    assert repair(bank, 5) == 1
    assert bank.counts.min() >= 5


def test_many_members_are_split_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["interclr.labels.repair"], "MEMBERS", 50)
    bank = make(500, 40, 3, 1.0, 500, 0)
    repair(bank)
    assert int(bank.counts.min()) >= minimum_size(500, 40)


def test_nothing_to_do_without_clusters() -> None:
    assert repair(MemoryBank(10, 4, 0)) == 0
