"""The memory bank against an independent recomputation in numpy, float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from interclr.bank import MemoryBank, first_occurrence, fixed_point
from interclr.labels import OnlineLabels
from interclr.samplers import SemiHard
from interclr.types import UserError


def consistent(bank: MemoryBank, empty_ok: bool = False) -> None:
    """Counts, sums and centroids are those of features and labels."""
    features, labels = bank.features.double().numpy(), bank.labels.numpy()
    assert labels.min() >= 0
    assert labels.max() < bank.clusters
    counts = np.bincount(labels, minlength=bank.clusters)
    np.testing.assert_array_equal(bank.counts.numpy(), counts)
    assert empty_ok or counts.min() >= 1
    sums = np.zeros((bank.clusters, bank.dim))
    np.add.at(sums, labels, features)
    np.testing.assert_allclose(
        bank.sums.double().numpy() / 2**30, sums, atol=bank.size * 2**-30
    )  # half a unit for each image
    np.testing.assert_allclose(bank.centroids.numpy(), sums / np.maximum(counts, 1)[:, None], atol=1e-6)


def batches(size: int, dim: int, batch: int, steps: int, seed: int = 0, duplicates: bool = True):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        if duplicates:
            index = torch.randint(size, (batch,), generator=generator)
        else:
            index = torch.randperm(size, generator=generator)[:batch]
        yield index, normalize(torch.randn(batch, dim, generator=generator), dim=1)


@pytest.mark.parametrize("momentum", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_equal_brute_force(momentum: float, dtype: torch.dtype) -> None:
    bank = MemoryBank(60, 8, 5, momentum, dtype)
    expected = bank.features.double().numpy().copy()
    for index, features in batches(60, 8, 24, 300):
        seen = set()
        for i, feature in zip(index.tolist(), features.double().numpy(), strict=True):
            if i not in seen:
                seen.add(i)
                mixed = (1 - momentum) * expected[i] + momentum * feature
                mixed /= np.linalg.norm(mixed)
                expected[i] = torch.from_numpy(mixed).to(dtype).double().numpy()
        before = bank.labels.clone()
        stored = bank.write(index, features)
        assert torch.equal(stored, bank.features[index])
        assert torch.equal(bank.labels, before)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7  # bf16: a different last bit may be carried along
    np.testing.assert_allclose(bank.features.double().numpy(), expected, atol=tolerance)
    consistent(bank)


def test_first_occurrence() -> None:
    for index in ([3, 1, 3, 3, 0, 1], [5], [2, 2, 2], [0, 1, 2]):
        assert first_occurrence(torch.tensor(index)).tolist() == [index.index(i) for i in index]


def test_store_moves_labels_and_ignores_repetitions() -> None:
    bank = MemoryBank(12, 4, 3)
    index = torch.tensor([0, 0, 4, 8])
    changed = bank.store(bank.blend(index, torch.randn(4, 4)), torch.tensor([1, 2, 1, 0]))
    assert bank.labels[[0, 4, 8]].tolist() == [1, 1, 0]  # label 2 of the second occurrence of 0 is ignored
    assert int(changed) == 2  # image 4 had label 1 before
    consistent(bank)


def test_the_first_in_the_batch_stays_when_all_would_leave() -> None:
    bank = MemoryBank(6, 4, 3)  # labels 0 1 2 0 1 2
    index = torch.tensor([3, 1, 0])
    changed = bank.store(bank.blend(index, torch.randn(3, 4)), torch.tensor([1, 2, 2]))
    assert bank.labels.tolist() == [2, 2, 2, 0, 1, 2]  # image 3 stays, 1 and 0 leave
    assert int(changed) == 2
    consistent(bank)


def test_never_empty_under_random_labels() -> None:
    generator = torch.Generator().manual_seed(1)
    for clusters in (1, 2, 7, 20):
        bank = MemoryBank(20, 4, clusters)
        for index, features in batches(20, 4, 16, 100, seed=clusters):
            proposal = torch.randint(clusters, (16,), generator=generator)
            before = bank.labels.clone()
            changed = bank.store(bank.blend(index, features), proposal)
            assert int(changed) == int((bank.labels != before).sum())
            assert int(bank.counts.min()) >= 1
        consistent(bank)


def test_rebuild_changes_no_bit() -> None:
    bank = MemoryBank(100, 16, 9, 0.5)
    generator = torch.Generator().manual_seed(2)
    for index, features in batches(100, 16, 32, 400):
        bank.store(bank.blend(index, features), torch.randint(9, (32,), generator=generator))
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    bank.rebuild()
    assert all(torch.equal(value, before[name]) for name, value in bank.state_dict().items())


def test_move_may_empty_a_cluster_and_stays_consistent() -> None:
    bank = MemoryBank(10, 4, 5)
    bank.move(torch.tensor([0, 5]), torch.tensor([1, 1]))
    assert bank.counts.tolist() == [0, 4, 2, 2, 2]
    consistent(bank, empty_ok=True)


def test_members_lists_each_cluster() -> None:
    bank = MemoryBank(50, 4, 7)
    bank.assign(torch.randint(7, (50,), generator=torch.Generator().manual_seed(3)))
    order, start = bank.members()
    for c in range(7):
        here = order[start[c] : start[c] + bank.counts[c]].tolist()
        assert here == [i for i in range(50) if bank.labels[i] == c]


def test_state_dict_round_trip() -> None:
    bank = MemoryBank(30, 4, 3, 0.5, torch.bfloat16)
    for index, features in batches(30, 4, 8, 20):
        bank.write(index, features)
    other = MemoryBank(30, 4, 3, 0.5, torch.bfloat16, generator=torch.Generator().manual_seed(9))
    assert not torch.equal(other.features, bank.features)
    other.load_state_dict(bank.state_dict())
    for index, features in batches(30, 4, 8, 20, seed=4):
        bank.write(index, features)
        other.write(index, features)
    assert set(bank.state_dict()) == {"features", "labels", "centroids", "counts", "sums", "repair_due"}
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in bank.state_dict().items())


def test_starts_as_seeded_unit_vectors() -> None:
    bank, again = MemoryBank(40, 8, 4), MemoryBank(40, 8, 4)
    torch.testing.assert_close(bank.features.norm(dim=1), torch.ones(40))
    assert torch.equal(bank.features, again.features)
    other = MemoryBank(40, 8, 4, generator=torch.Generator().manual_seed(5))
    assert not torch.equal(bank.features, other.features)
    consistent(bank)


def test_without_clusters_keeps_features_only() -> None:
    bank = MemoryBank(10, 4, 0, 0.5)
    bank.write(torch.tensor([1, 2]), torch.randn(2, 4))
    bank.rebuild()
    assert bank.centroids.shape == (0, 4)
    torch.testing.assert_close(bank.features.norm(dim=1), torch.ones(10))


def test_a_broken_feature_leaves_its_entry_alone() -> None:
    bank = MemoryBank(10, 4, 2)
    before = bank.features.clone()
    features = torch.randn(6, 4)
    features[1, 2], features[3], features[4] = torch.nan, 0, 1e30
    features[5] *= 1e-13  # the last three have no direction that could be told
    bank.write(torch.tensor([1, 2, 3, 4, 5, 6]), features)
    for kept in (2, 4, 5, 6):
        assert torch.equal(bank.features[kept], before[kept])
    torch.testing.assert_close(bank.features[3], normalize(features[2], dim=0))
    consistent(bank)


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        ([0, 1], (4, 4), r"not \(2,\) of torch.int64 and \(4, 4\)"),  # two views, one index
        ([0, 1], (2, 1), "one feature for each image"),  # would be broadcast
        ([[0], [1]], (2, 4), "one feature for each image"),
        ([-1, 9], (2, 4), "holds images 0 to 9, not -1"),
        ([3, 10], (2, 4), "holds images 0 to 9, not 10"),
    ],
)
def test_what_would_be_written_wrongly_is_refused(index: list[int], shape: tuple[int, ...], message: str) -> None:
    bank = MemoryBank(10, 4, 2)
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    with pytest.raises(UserError, match=message):
        OnlineLabels().commit(bank, torch.tensor(index), torch.randn(shape), 0)
    assert all(torch.equal(value, before[name]) for name, value in bank.state_dict().items())


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ([0, 1], "index is a list: give a tensor"),
        (np.array([0, 1]), "index is a ndarray: give a tensor"),
        (torch.tensor([0.0, 1.0]), "of torch.float32"),
        (torch.tensor([0, 1], dtype=torch.uint8), "of torch.uint8"),  # torch would take it for a mask
        (torch.tensor([False, True]), "of torch.bool"),
    ],
)
def test_indices_are_whole_numbers_in_a_tensor(index: Any, says: str) -> None:
    bank, features = MemoryBank(10, 4, 2), torch.randn(2, 4)
    with pytest.raises(UserError, match=says):
        OnlineLabels().commit(bank, index, features)
    with pytest.raises(UserError, match=says):
        SemiHard(negatives=2).draw(features, index, bank)
    OnlineLabels().commit(bank, torch.tensor([0, 1], dtype=torch.int32), features)


@pytest.mark.parametrize(("size", "dim"), [(0, 4), (-5, 4), (10, 0)])
def test_a_bank_of_nothing_is_refused(size: int, dim: int) -> None:
    with pytest.raises(UserError, match=f"size={size} and dim={dim}"):
        MemoryBank(size, dim, 0)


def test_its_own_features_change_no_bit() -> None:
    bank = MemoryBank(500, 7, 4, generator=torch.Generator().manual_seed(3))
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    bank.fill(bank.features)
    assert all(torch.equal(value, before[name]) for name, value in bank.state_dict().items())


def test_an_empty_batch_changes_nothing() -> None:
    bank = MemoryBank(10, 4, 2)
    before = bank.features.clone()
    changed = OnlineLabels().commit(bank, torch.empty(0, dtype=torch.int64), torch.empty(0, 4), 0)
    assert int(changed) == 0
    assert torch.equal(bank.features, before)
    consistent(bank)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0], r"holds \(6,\) labels, not \(1,\)"),
        ([0, 1, 2, 0, 1, 0], "0 to 1, not 0 to 2"),
        ([0, 1, -1, 0, 1, 0], "not -1 to 1"),
    ],
)
def test_labels_of_other_clusters_change_nothing(labels: list[int], message: str) -> None:
    bank = MemoryBank(6, 3, 2)
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    with pytest.raises(UserError, match=message):
        bank.assign(torch.tensor(labels))
    assert all(torch.equal(value, before[name]) for name, value in bank.state_dict().items())


def test_labels_need_clusters() -> None:
    with pytest.raises(UserError, match="no clusters"):
        OnlineLabels().initialise(MemoryBank(10, 4, 0), torch.randn(10, 4))


@pytest.mark.parametrize("convert", [lambda bank: bank.half(), lambda bank: bank.to(torch.bfloat16)])
def test_a_bank_keeps_its_precision_inside_a_model_that_changes_its_own(convert: Callable[..., object]) -> None:
    bank = MemoryBank(30, 4, 3)
    before = bank.features.clone()
    convert(torch.nn.ModuleDict({"bank": bank, "head": torch.nn.Linear(2, 2)}))
    assert torch.equal(bank.features, before)
    bank.write(torch.arange(8), torch.randn(8, 4))
    consistent(bank)


def test_a_state_of_another_precision_is_rounded_and_stays_consistent() -> None:
    bank, rounded = MemoryBank(30, 4, 3), MemoryBank(30, 4, 3, dtype=torch.bfloat16)
    for index, features in batches(30, 4, 8, 20):
        bank.write(index, features)
    rounded.load_state_dict(bank.state_dict())
    assert torch.equal(rounded.features, bank.features.bfloat16())
    consistent(rounded)


def test_fill_normalises_and_names_broken_images() -> None:
    bank = MemoryBank(10, 4, 2)
    features = 3 * torch.randn(10, 4)
    bank.fill(features)
    torch.testing.assert_close(bank.features, normalize(features, dim=1))
    consistent(bank)
    before, aimless = bank.features.clone(), -features
    aimless[2], aimless[5], aimless[6] = 0, 1e30, 1e-13
    bank.fill(aimless)
    torch.testing.assert_close(bank.features[[2, 5, 6]], before[[2, 5, 6]])
    torch.testing.assert_close(bank.features[[0, 1, 3, 4, 7, 8, 9]], -before[[0, 1, 3, 4, 7, 8, 9]])
    consistent(bank)
    features[4, 0], features[7, 1] = torch.nan, torch.inf
    with pytest.raises(ValueError, match=r"2 of 10 features are NaN or infinite.* index 4, 7:"):
        bank.fill(features)
    with pytest.raises(ValueError, match=r"\(10, 4\) features, not \(9, 4\)"):
        bank.fill(features[:9])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clusters": 11}, "k=11 clusters asked of N=10 images: use clusters: auto or at most N"),
        ({"clusters": 2, "momentum": 0.0}, "momentum"),
        ({"clusters": 2, "dtype": torch.float16}, "bfloat16"),
    ],
)
def test_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryBank(10, 4, **arguments)  # type: ignore[arg-type]


def test_fixed_point_is_exact_to_half_a_unit() -> None:
    values = normalize(torch.randn(1000, 16), dim=1)
    assert (fixed_point(values).double() / 2**30 - values.double()).abs().max() <= 2**-31


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bank_out_of_a_checkpoint_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    bank = MemoryBank(30, 6, 4, momentum=0.5, dtype=dtype)
    OnlineLabels().commit(bank, torch.arange(8), torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))
    state = {f"bank.{name}": value for name, value in bank.state_dict().items()} | {"intra.weight": torch.ones(2)}
    again = MemoryBank.of_state(state)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in bank.state_dict().items())


@pytest.mark.parametrize("clusters", [2**15 + 1, 2**16, 2**16 + 1])
def test_members_of_more_clusters_than_two_bytes_with_a_sign_hold(clusters: int) -> None:
    bank = MemoryBank(70_000, 2, clusters)
    labels = torch.arange(70_000).flip(0) % clusters
    bank.labels.copy_(labels)
    bank.counts.copy_(labels.bincount(minlength=clusters))
    order, start = bank.members()
    assert torch.equal(order, labels.argsort(stable=True))
    assert order[start[-1]] == (labels == clusters - 1).nonzero()[0, 0]
