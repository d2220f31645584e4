from __future__ import annotations

import torch
from brute_force import grid_bank
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from interclr.samplers import Random


def draw_positive(labels: list[int], index: torch.Tensor, seed: int) -> torch.Tensor:
    bank = grid_bank(labels)
    return Random(1).draw(torch.zeros(len(index), 3), index, bank, torch.Generator().manual_seed(seed)).positive


@settings(max_examples=100, deadline=None)
@given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=30), seed=st.integers(0, 10**6))
def test_positive_is_another_image_of_the_cluster_or_itself_when_alone(labels, seed):
    positive = draw_positive(labels, torch.arange(len(labels)), seed).tolist()
    for own, drawn in enumerate(positive):
        assert labels[drawn] == labels[own]
        assert (drawn == own) == (labels.count(labels[own]) == 1)


def test_positive_is_uniform_over_the_others_of_the_cluster():
    labels = [1, 0, 2, 0, 0, 1, 0, 2, 0, 2]
    cluster = [i for i, label in enumerate(labels) if label == 0]
    for own in cluster:  # first, inner and last place in its cluster
        index = torch.full((4000,), own)
        counts = torch.bincount(draw_positive(labels, index, seed=own), minlength=len(labels))
        others = [i for i in cluster if i != own]
        assert int(counts[others].sum()) == 4000
        assert chisquare(counts[others].numpy()).pvalue > 1e-3


def test_positives_of_different_anchors_are_independent():
    labels = [0, 0, 0] * 2
    index = torch.tensor([0, 1]).repeat(4000)
    first, second = draw_positive(labels, index, seed=0).view(4000, 2).T
    table = torch.bincount(first * 6 + second, minlength=36).view(6, 6)[[1, 2, 3, 4, 5]][:, [0, 2, 3, 4, 5]]
    assert chisquare(table.flatten().numpy()).pvalue > 1e-3
