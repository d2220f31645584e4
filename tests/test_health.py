from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix

from interclr.bank import MemoryBank
from interclr.features import evenly
from interclr.health import agreement, cluster_health, embedding_health, pair_health, warnings_of
from interclr.samplers import Hard, Random, Sampler, SemiHard


@pytest.mark.parametrize(("clusters", "classes"), [(2, 7), (9, 4), (30, 30), (1, 3), (3, 1), (1, 1)])
def test_agreement_against_scikit_learn(clusters: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(clusters)
    labels = torch.randint(classes, (400,), generator=generator)
    noise = torch.rand(400, generator=generator) < 0.5
    found = torch.where(noise, torch.randint(clusters, (400,), generator=generator), labels % clusters)
    figures = agreement(found, labels)
    table = contingency_matrix(labels.numpy(), found.numpy())
    assert figures["purity"] == pytest.approx(table.max(0).sum() / 400)
    assert figures["nmi"] == pytest.approx(normalized_mutual_info_score(labels.numpy(), found.numpy()), abs=1e-9)


def test_as_many_labels_as_a_folder_can_have_take_no_table_of_all_pairs() -> None:
    """50,000 clusters and 100,000 labels would be 40 GB; every step here is of the size of the images."""
    clusters, labels = torch.arange(200_000) % 50_000, torch.arange(200_000) % 100_000
    figures = agreement(clusters, labels)
    assert figures["purity"] == pytest.approx(0.5)  # two labels of two images each in a cluster
    assert figures["nmi"] == pytest.approx(2 * math.log(50_000) / (math.log(50_000) + math.log(100_000)))
    bank = MemoryBank(200_000, 2, 50_000)
    bank.labels.copy_(clusters)
    assert pair_health(bank, None, labels)["positives_right"] == pytest.approx(1 / 3)  # one of three others


def test_agreement_of_equal_partitions_is_one() -> None:
    labels = torch.arange(60) % 6
    assert agreement(5 - labels, labels) == pytest.approx({"purity": 1.0, "nmi": 1.0})


def test_rows_of_a_large_set_are_spread_and_within_it() -> None:
    for total in (16_777_220, 20_000_004, 2**31):
        rows = evenly(total, 50_000)
        assert (rows[0], rows[-1], len(rows)) == (0, total - 1, 50_000)
        assert rows.diff().max() - rows.diff().min() <= 1
    assert evenly(3, 10).tolist() == [0, 1, 2]


def test_rank_me_of_known_matrices() -> None:
    assert embedding_health(torch.eye(8))["rank_me"] == pytest.approx(8, rel=1e-6)
    assert embedding_health(torch.eye(4).repeat(10, 1))["rank_me"] == pytest.approx(4, rel=1e-6)
    assert embedding_health(torch.ones(20, 8))["rank_me"] == pytest.approx(1, abs=1e-4)
    # Two orthogonal directions, 9 rows and 1 row: singular values 3 and 1.
    rows = torch.cat([torch.tensor([[5.0, 0, 0]]).repeat(9, 1), torch.tensor([[0, 2.0, 0]])])
    expected = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert embedding_health(rows)["rank_me"] == pytest.approx(expected, rel=1e-6)


def test_uniformity_by_hand() -> None:
    assert embedding_health(torch.ones(5, 3))["uniformity"] == pytest.approx(0, abs=1e-9)
    opposite = torch.tensor([[1.0, 0], [-1.0, 0]])
    assert embedding_health(opposite)["uniformity"] == pytest.approx(-8)  # ‖x − y‖² = 4
    features = torch.nn.functional.normalize(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    pairs = torch.pdist(features.double()).square()
    assert embedding_health(features)["uniformity"] == pytest.approx(math.log((-2 * pairs).exp().mean()), rel=1e-5)


@pytest.mark.parametrize("features", [torch.zeros(20, 8), torch.ones(20, 8), torch.full((20, 8), torch.nan)])
def test_a_collapsed_embedding_is_said_aloud(features: torch.Tensor) -> None:
    said = warnings_of(embedding_health(features), dim=8, size=20)
    assert len(said) == 1
    assert "collapsed" in said[0]
    assert "unless the images themselves are all alike (interclr data check)" in said[0]
    assert "optimiser.base_lr" in said[0]


def test_a_healthy_run_is_not_warned() -> None:
    features = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    bank = MemoryBank(200, 32, 10)
    assert warnings_of(embedding_health(features) | cluster_health(bank, None), 32, 200) == []


def test_clusters_sizes_entropy_and_warnings() -> None:
    bank = MemoryBank(100, 4, 4)
    assert cluster_health(bank, None) == pytest.approx(
        {"cluster_min": 25, "cluster_median": 25, "cluster_max": 25, "cluster_entropy": 1}
    )
    bank.assign(torch.tensor([0] * 97 + [1, 2, 3]))
    figures = cluster_health(bank, None)
    share = torch.tensor([0.97, 0.01, 0.01, 0.01]).double()
    assert figures["cluster_entropy"] == pytest.approx(-(share * share.log()).sum().item() / math.log(4))
    (line,) = warnings_of(figures, 4, 100)
    assert "97 of 100" in line
    assert not warnings_of({"cluster_max": 19.0, "cluster_entropy": 0.95}, dim=128, size=30)  # one of two
    uneven = {"cluster_max": 40.0, "cluster_entropy": 0.3}
    assert "uneven" in warnings_of(uneven, 4, 100)[0]


def test_images_without_a_label_do_not_count() -> None:
    bank = MemoryBank(6, 4, 2)
    labels = torch.tensor([0, 1, 0, 1, -1, -1])
    assert cluster_health(bank, labels)["purity"] == 1
    assert "purity" not in cluster_health(bank, torch.full((6,), -1))
    assert "purity" not in cluster_health(bank, None)


def random_bank(size: int, clusters: int, seed: int) -> MemoryBank:
    generator = torch.Generator().manual_seed(seed)
    bank = MemoryBank(size, 8, clusters)
    bank.features.copy_(torch.nn.functional.normalize(torch.randn(size, 8, generator=generator), dim=1))
    bank.assign(torch.cat([torch.arange(clusters), torch.randint(clusters, (size - clusters,), generator=generator)]))
    return bank


def test_shares_of_right_positives_by_counting_all_pairs() -> None:
    bank = random_bank(90, 20, 0)
    bank.assign(torch.cat([torch.tensor([19]), torch.randint(19, (89,), generator=torch.Generator().manual_seed(1))]))
    labels = torch.arange(90) % 4
    labels[::7] = -1
    known = [image for image in range(90) if labels[image] >= 0]
    shares = []
    for image in known:
        mates = [each for each in known if each != image and bank.labels[each] == bank.labels[image]]
        shares += [sum(bool(labels[mate] == labels[image]) for mate in mates) / len(mates)] if mates else []
    assert len(shares) < len(known)
    assert pair_health(bank, None, labels) == pytest.approx({"positives_right": sum(shares) / len(shares)})


@pytest.mark.parametrize("sampler", [Random(12), Hard(12), SemiHard(12, 0.5)])
def test_shares_of_wrong_negatives_by_counting_the_draw(sampler: Sampler) -> None:
    bank, labels = random_bank(60, 6, 2), torch.arange(60) % 3
    before = torch.get_rng_state()
    found = pair_health(bank, sampler, labels)["negatives_wrong"]
    assert torch.equal(torch.get_rng_state(), before)
    drawn = sampler.draw(bank.features, torch.arange(60), bank, torch.Generator().manual_seed(0)).negative
    pairs = [(anchor, int(other)) for anchor in range(60) for other in drawn[anchor] if other >= 0]
    assert found == pytest.approx(sum(anchor % 3 == other % 3 for anchor, other in pairs) / len(pairs))


def test_near_negatives_are_wrong_more_often_than_random_ones() -> None:
    labels = torch.arange(400) % 4
    generator = torch.Generator().manual_seed(0)
    bank = random_bank(400, 40, 3)
    centres = torch.nn.functional.one_hot(labels, 8).float()
    noise = 0.1 * torch.randn(400, 8, generator=generator)
    bank.features.copy_(torch.nn.functional.normalize(centres + noise, dim=1))
    near, any_ = (pair_health(bank, each, labels)["negatives_wrong"] for each in (SemiHard(20, 0.1), Random(20)))
    assert near > 0.95
    assert 0.2 < any_ < 0.3


def test_images_that_are_alone_are_no_right_positives() -> None:
    bank = MemoryBank(6, 4, 4)
    bank.assign(torch.tensor([0, 0, 0, 1, 2, 3]))
    labels = torch.tensor([5, 5, 7, 5, 5, 5])
    # Of three in one cluster two have a partner of their class half of the time, the third never.
    assert pair_health(bank, None, labels)["positives_right"] == pytest.approx((0.5 + 0.5 + 0) / 3)
    alone = MemoryBank(6, 4, 6)
    assert pair_health(alone, None, labels) == {}
    (said,) = warnings_of(cluster_health(alone, labels), 4, 6)
    assert "single image" in said


def test_the_median_of_an_even_number_of_clusters() -> None:
    bank = MemoryBank(160, 4, 2)
    bank.assign((torch.arange(160) >= 42).long())
    figures = cluster_health(bank, None)
    assert (figures["cluster_min"], figures["cluster_median"], figures["cluster_max"]) == (42, 80, 118)


def test_no_labels_no_figures_of_pairs() -> None:
    bank = random_bank(20, 4, 4)
    assert pair_health(bank, Random(4), None) == {}
    assert pair_health(bank, Random(4), torch.full((20,), -1)) == {}
