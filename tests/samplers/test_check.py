from __future__ import annotations

import warnings

import pytest
import torch
from brute_force import STRATEGIES, grid_bank, make_bank

from interclr.bank import MemoryBank
from interclr.labels import OnlineLabels
from interclr.samplers import Hard, SemiHard
from interclr.types import UserError


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clusters", [1, 4])  # k = 1, or the other clusters have emptied
def test_one_cluster_with_everything_is_an_error(strategy, clusters):
    bank = make_bank(torch.zeros(9, 3), [0] * 9, clusters)
    with pytest.raises(ValueError, match=r"cluster 0 holds all 9 images.*two clusters or more"):
        STRATEGIES[strategy](2).check(bank)
    pairs = STRATEGIES[strategy](2).draw(torch.zeros(2, 3), torch.tensor([0, 1]), bank)
    assert pairs.negative.tolist() == [[-1, -1], [-1, -1]]


def test_a_pool_smaller_than_the_draw_is_said_once():
    bank = grid_bank([0] * 60 + [1] * 30 + [2] * 10)
    sampler = SemiHard(8, 0.1)  # pools of 4, 7 and 9
    with pytest.warns(UserWarning, match=r"negatives=8.*2 of 3 clusters.*4 at the least.*cluster 0.*60 of 100 images"):
        sampler.check(bank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.check(bank)  # the second time it is silent
        SemiHard(4, 0.1).check(bank)
        Hard(40).check(bank)
    with pytest.warns(UserWarning, match="1 of 3 clusters"):
        Hard(41).check(bank)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("query", "index", "message"),
    [
        ((2, 3), [0], r"\(A, 3\) queries.*not \(2, 3\) and \(1,\)"),
        ((2, 4), [0, 1], r"not \(2, 4\) and \(2,\)"),
        ((2, 2, 3), [0, 1], r"repeat the indices for several views"),
        ((2, 3), [0.0, 1.0], "float32"),
        ((2, 3), [0, -1], "images 0 to 8, not -1"),
        ((2, 3), [0, 9], "images 0 to 8, not 9"),
    ],
)
def test_anchors_that_would_be_broadcast_or_counted_from_the_end(strategy, query, index, message):
    bank = make_bank(torch.zeros(9, 3), [0, 1, 2] * 3, 3)
    with pytest.raises(UserError, match=message):
        STRATEGIES[strategy](2).draw(torch.zeros(query), torch.tensor(index), bank)


def test_a_bank_without_clusters_is_told():
    bank = MemoryBank(9, 3, 0)
    index, features = torch.tensor([0, 1]), torch.ones(2, 3)
    for call in (
        lambda: SemiHard(2).draw(features, index, bank),
        lambda: SemiHard(2).check(bank),
        lambda: OnlineLabels().commit(bank, index, features, 0),
    ):
        with pytest.raises(UserError, match=r"no clusters.*MemoryBank\(…, clusters=k\)"):
            call()
