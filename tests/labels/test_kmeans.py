"""k-means against scikit-learn from the same start, and on every awkward shape."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from torch import Tensor
from torch.nn.functional import normalize

from interclr.labels import auto_clusters, kmeans, minimum_size, nearest_centroid
from interclr.types import UserError


def blobs(size: int, dim: int = 8, centres: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(centres, dim, generator=generator)
    which = torch.randint(centres, (size,), generator=generator)
    return normalize(means[which] + 0.5 * torch.randn(size, dim, generator=generator), dim=1)


def means(features: Tensor, labels: Tensor, k: int) -> Tensor:
    return torch.stack([features[labels == c].double().mean(0) for c in range(k)])


@pytest.mark.parametrize("scale", [1.0, 37.0, 1e-3])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_agrees_with_scikit_learn(k: int, scale: float) -> None:
    features = blobs(600) * scale
    start = features[:k]
    for iterations in (1, 3, 300):
        history: list[float] = []
        labels, centroids = kmeans(features, k, iterations + 1, start=start, history=history)
        # scikit-learn assigns once more after its last update
        theirs = KMeans(k, init=start.numpy(), n_init=1, max_iter=iterations, tol=0, algorithm="lloyd").fit(features)
        assert torch.equal(labels, torch.from_numpy(theirs.labels_).long())
        assert history[-1] == pytest.approx(theirs.inertia_, rel=1e-5)
        torch.testing.assert_close(centroids.double(), means(features, labels, k), atol=1e-6 * scale, rtol=1e-6)


@pytest.mark.parametrize("away", [1e3, 1e4])
def test_agrees_with_scikit_learn_far_from_the_origin(away: float) -> None:
    features = torch.randn(2_000, 16, generator=torch.Generator().manual_seed(0)) + away
    history: list[float] = []
    found = kmeans(features, 50, 31, start=features[:50], history=history)
    theirs = KMeans(50, init=features[:50].double().numpy(), n_init=1, max_iter=30, tol=0, algorithm="lloyd")
    theirs.fit(features.double().numpy())
    assert (found.labels == torch.from_numpy(theirs.labels_)).float().mean() > 0.99
    assert history[-1] == pytest.approx(theirs.inertia_, rel=1e-3)
    torch.testing.assert_close(found.centroids.double(), means(features, found.labels, 50), atol=1e-6 * away, rtol=0)


def test_features_of_one_dimension_are_refused() -> None:
    with pytest.raises(UserError, match=r"features \(N, D\), not \(5,\)"):
        kmeans(torch.arange(5.0), 2)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 60),
    share=st.floats(0, 1),
    distinct=st.integers(1, 60),
    start=st.sampled_from(["random", "k-means++"]),
    seed=st.integers(0, 99),
)
def test_every_shape(size: int, share: float, distinct: int, start: str, seed: int) -> None:
    k = max(1, round(share * size))
    features = blobs(distinct, seed=seed)[torch.arange(size) % distinct]
    history: list[float] = []
    generator = torch.Generator().manual_seed(seed)
    labels, centroids = kmeans(features, k, 10, generator, start, history=history)  # type: ignore[arg-type]
    assert labels.bincount(minlength=k).shape == (k,)
    assert labels.bincount(minlength=k).min() >= 1
    assert all(after <= before * (1 + 1e-6) + 1e-9 for before, after in pairwise(history))
    torch.testing.assert_close(centroids.double(), means(features, labels, k), atol=1e-6, rtol=0)


def test_objective_falls_from_an_empty_start() -> None:
    features, history = blobs(500), []
    far = torch.cat([features[:3], torch.full((7, 8), 9.0)])  # seven clusters nobody is near to
    labels, _ = kmeans(features, 10, 30, start=far, history=history)
    assert labels.bincount(minlength=10).min() >= 1
    assert all(after <= before * (1 + 1e-7) for before, after in pairwise(history))
    assert history[-1] < 0.9 * history[0]


@pytest.mark.parametrize("start", ["random", "k-means++"])
def test_chunks_and_seed(start: str) -> None:
    features = blobs(700, dim=16)
    results = [
        kmeans(features, 25, 8, torch.Generator().manual_seed(7), start, chunk=chunk)  # type: ignore[arg-type]
        for chunk in (None, 700, 64, 7, 1)
    ]
    for other in results[1:]:
        assert torch.equal(other.labels, results[0].labels)
        assert torch.equal(other.centroids, results[0].centroids)


def test_plus_plus_finds_separate_blobs() -> None:
    corners = 10 * torch.eye(8)
    features = corners.repeat_interleave(40, 0) + 0.1 * torch.randn(320, 8, generator=torch.Generator().manual_seed(0))
    labels, _ = kmeans(features, 8, 5, torch.Generator().manual_seed(0), "k-means++")
    assert len({tuple(sorted(set(part.tolist()))) for part in labels.split(40)}) == 8


def test_as_many_clusters_as_images_and_one() -> None:
    features = blobs(30)
    assert sorted(kmeans(features, 30).labels.tolist()) == list(range(30))
    assert kmeans(features, 1).labels.tolist() == [0] * 30
    assert kmeans(features.bfloat16(), 4).centroids.dtype == torch.float32


def test_refuses_with_a_clear_text() -> None:
    features = blobs(20)
    with pytest.raises(ValueError, match="k=21 clusters asked of N=20 images: use clusters: auto or at most N"):
        kmeans(features, 21)
    with pytest.raises(ValueError, match="at least one cluster"):
        kmeans(features, 0)
    with pytest.raises(ValueError, match=r"\(3, 8\) centroids"):
        kmeans(features, 3, start=features[:2])
    with pytest.raises(ValueError, match="not 'best'"):
        kmeans(features, 3, start="best")  # type: ignore[arg-type]
    features[3:15, 1] = torch.nan
    with pytest.raises(ValueError, match=r"12 of 20 .* index 3, 4, 5, 6, 7, 8, 9, 10, …"):
        kmeans(features, 2)


def test_nearest_is_by_distance_to_the_mean_and_ties_go_low(monkeypatch: pytest.MonkeyPatch) -> None:
    features, centroids = blobs(200), blobs(30, seed=1) * torch.rand(30, 1)
    expected = torch.cdist(features.double(), centroids.double()).argmin(1)
    assert torch.equal(nearest_centroid(features, centroids), expected)
    assert torch.equal(nearest_centroid(features, centroids.repeat(2, 1)), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(nearest_centroid(features, centroids), expected)
    monkeypatch.setattr(sys.modules["interclr.labels.kmeans"], "SCORES", 100)
    assert torch.equal(nearest_centroid(features, centroids), expected)


def test_auto_clusters() -> None:
    assert auto_clusters(1_281_167) == 10_000
    assert 400 <= auto_clusters(50_000) <= 1000
    assert 8 <= auto_clusters(200) <= 12
    sizes = [*range(4, 3000), 10**4, 10**5, 10**6, 10**8]
    chosen = [auto_clusters(n) for n in sizes]
    assert all(2 <= k <= n // 2 for n, k in zip(sizes, chosen, strict=True))
    assert chosen == sorted(chosen)
    assert [auto_clusters(n) for n in (2, 3)] == [2, 2]


def test_progress_is_told_of_every_part_and_may_end_it() -> None:
    told: list[tuple[int, int]] = []
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    kmeans(features, 5, 3, torch.Generator().manual_seed(0), chunk=20, progress=lambda *done: told.append(done))
    assert told == [(done, 9) for done in range(len(told))]
    assert len(told) in (6, 9)  # two iterations or three, of three parts each

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kmeans(features, 5, progress=stop)


def test_minimum_size() -> None:
    assert minimum_size(128 * 100, 100) == 20
    assert minimum_size(64 * 100, 100) == 10
    assert minimum_size(100, 100) == 1
    assert minimum_size(1000, 100, min_cluster=20) == 5  # N/(2k)
    assert minimum_size(1000, 100, min_cluster=0) == 1
