from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from interclr import knn


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 16, generator=generator)
    labels, truth = (torch.randint(5, (n,), generator=generator) for n in (300, 90))
    noise = [torch.randn(n, 16, generator=generator) * 1.6 for n in (300, 90)]
    return centres[labels] + noise[0], labels, centres[truth] + noise[1], truth


def votes(bank: torch.Tensor, labels: torch.Tensor, queries: torch.Tensor, k: int, temperature: float) -> torch.Tensor:
    similarity, nearest = knn.nearest_rows(bank, queries, k)
    return knn.votes_of(similarity, labels[nearest], 5, temperature)


@pytest.mark.parametrize("k", [1, 7, 50, 300])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_against_scikit_learn(k: int, temperature: float) -> None:
    bank, labels, queries, truth = data()
    oracle = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
    ).fit(bank.double().numpy(), labels.numpy())
    scores = votes(bank, labels, queries, k, temperature)
    expected = oracle.predict_proba(queries.double().numpy())
    np.testing.assert_allclose((scores / scores.sum(1, keepdim=True)).numpy(), expected, atol=1e-4)
    accuracy = knn.knn_accuracy(bank, labels, queries, truth, k, temperature)
    assert accuracy == pytest.approx(100 * oracle.score(queries.double().numpy(), truth.numpy()), abs=1e-4)
    assert 20 < accuracy < 100


def test_chunks_do_not_change_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, labels, queries, truth = data()
    whole, accuracy = votes(bank, labels, queries, 20, 0.1), knn.knn_accuracy(bank, labels, queries, truth, 20)
    for elements in (1, len(bank), 7 * len(bank), 89 * len(bank)):  # 1: less than one row, so one query at a time
        monkeypatch.setattr(knn, "CHUNK_ELEMENTS", elements)
        torch.testing.assert_close(votes(bank, labels, queries, 20, 0.1), whole, rtol=1e-4, atol=1e-5)
        assert knn.knn_accuracy(bank, labels, queries, truth, 20) == accuracy


def test_length_does_not_matter_and_small_temperatures_do_not_overflow() -> None:
    bank, labels, queries, _ = data()
    scores = votes(bank, labels, queries, 20, 0.001)
    assert scores.isfinite().all()
    assert scores.sum(1).min() >= 1  # the nearest votes with weight 1
    longer = votes(3 * bank, labels, 0.1 * queries, 20, 0.1)
    torch.testing.assert_close(longer, votes(bank, labels, queries, 20, 0.1), rtol=1e-3, atol=1e-4)


def test_more_neighbours_than_images_and_a_class_only_the_queries_have() -> None:
    bank, labels = torch.eye(3), torch.tensor([0, 1, 1])
    assert knn.knn_accuracy(bank, labels, torch.eye(3), torch.tensor([0, 1, 4]), k=200) == pytest.approx(200 / 3)
