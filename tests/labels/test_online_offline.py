"""Online and offline labels against brute force, across ranks, and without waiting for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor
from torch.nn.functional import normalize

from interclr import dist
from interclr.bank import MemoryBank
from interclr.labels import Labels, OfflineLabels, OnlineLabels, kmeans
from interclr.types import UserError

SIZE, DIM, CLUSTERS, BATCH = 120, 8, 10, 24


def start(size: int = SIZE, seed: int = 0) -> Tensor:
    return normalize(torch.randn(size, DIM, generator=torch.Generator().manual_seed(seed)), dim=1)


def batches(steps: int, seed: int = 1, size: int = SIZE) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(size, (BATCH,), generator=generator), torch.randn(BATCH, DIM, generator=generator)


def brute_force_step(bank: MemoryBank, index: Tensor, features: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features and labels after a step, and which of the labels is too near a tie to tell, image by image."""
    stored, labels = bank.features.double().numpy().copy(), bank.labels.numpy().copy()
    centroids = np.stack([stored[labels == c].mean(0) for c in range(bank.clusters)])
    batch: list[int] = []
    for i, feature in zip(index.tolist(), features.double().numpy(), strict=True):
        if i not in batch:
            batch.append(i)
            unit = (1 - bank.momentum) * stored[i] + bank.momentum * feature
            stored[i] = torch.from_numpy(unit / np.linalg.norm(unit)).to(bank.features.dtype).double().numpy()
    distance = ((stored[:, None] - centroids) ** 2).sum(-1)
    ranked = np.sort(distance, 1)
    tie = ranked[:, 1] - ranked[:, 0] < 1e-5
    new = labels.copy()
    new[batch] = distance[batch].argmin(1)
    for c in range(bank.clusters):
        leavers = [i for i in batch if labels[i] == c and new[i] != c]
        if len(leavers) == (labels == c).sum():
            new[leavers[0]] = c
    return stored, new, tie


@pytest.mark.parametrize(("momentum", "dtype"), [(0.5, torch.float32), (1.0, torch.float32), (0.5, torch.bfloat16)])
def test_online_equals_brute_force(momentum: float, dtype: torch.dtype) -> None:
    bank = MemoryBank(SIZE, DIM, CLUSTERS, momentum, dtype)
    online = OnlineLabels(repair_every=0)
    online.initialise(bank, start(), torch.Generator().manual_seed(0))
    total = 0
    for step, (index, features) in enumerate(batches(300)):
        stored, labels, tie = brute_force_step(bank, index, features)
        before = bank.labels.clone()
        changed = online.commit(bank, index, features, step)
        tolerance = 1e-6 if dtype == torch.float32 else 2**-8
        np.testing.assert_allclose(bank.features.double().numpy(), stored, atol=tolerance)
        if dtype == torch.float32:  # bf16 may round a feature the other way, and with it a label
            np.testing.assert_array_equal(bank.labels.numpy()[~tie], labels[~tie])
        assert int(changed) == int((bank.labels != before).sum())
        assert int(bank.counts.min()) >= 1
        total += int(changed)
        exact = torch.stack([bank.features[bank.labels == c].double().mean(0) for c in range(CLUSTERS)])
        assert (bank.centroids.double() - exact).abs().max() <= 1e-6
        np.testing.assert_array_equal(bank.counts.numpy(), np.bincount(bank.labels.numpy(), minlength=CLUSTERS))
    assert total > 300
    state = {name: value.clone() for name, value in bank.state_dict().items()}
    bank.rebuild()
    assert all(torch.equal(value, state[name]) for name, value in bank.state_dict().items())


@pytest.mark.parametrize("clusters", [1, 2, 60, 119, 120])
def test_online_with_repair_never_empties(clusters: int) -> None:
    bank = MemoryBank(SIZE, DIM, clusters)
    online = OnlineLabels(repair_every=3)
    online.initialise(bank, start(), torch.Generator().manual_seed(0))
    for step, (index, features) in enumerate(batches(60)):
        online.commit(bank, index, torch.ones(BATCH, DIM) if step % 2 else features, step)  # half of it collapsed
        assert int(bank.counts.min()) >= 1
    online.end_epoch(bank, 0)
    assert int(bank.counts.sum()) == SIZE


def test_repair_is_a_function_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small clusters are noted every 10 steps and repaired 10 steps later; where there are none, nothing happens."""
    for small, expected in ((True, [20, 30]), (False, [])):
        calls: list[int] = []
        bank, online = MemoryBank(SIZE, DIM, CLUSTERS), OnlineLabels(min_cluster=4, repair_every=10)
        if small:  # cluster 0 keeps one member, which no batch moves
            labels = torch.arange(SIZE) % (CLUSTERS - 1) + 1
            labels[-1] = 0
            bank.assign(labels)
        monkeypatch.setattr("interclr.labels.online.repair", lambda bank, least, calls=calls: calls.append(least))
        monkeypatch.setattr(online, "update", lambda bank, index, features: torch.zeros(()))
        seen = []
        for step, (index, features) in enumerate(batches(30)):
            before = len(calls)
            online.commit(bank, index, features, step)
            seen += [step + 1] * (len(calls) - before)
        assert seen == expected
        online.end_epoch(bank, 0)
        assert len(calls) == len(expected) + 1


def test_resumes_from_the_state_dict() -> None:
    def run(bank: MemoryBank, first: int, last: int) -> MemoryBank:
        online = OnlineLabels(repair_every=4)
        for step, (index, features) in enumerate(batches(last)):
            if step >= first:
                online.commit(bank, index, features, step)
        return bank

    def fresh() -> MemoryBank:
        bank = MemoryBank(SIZE, DIM, CLUSTERS, 0.5)
        OnlineLabels().initialise(bank, start(), torch.Generator().manual_seed(0))
        return bank

    whole = run(fresh(), 0, 50)
    resumed = MemoryBank(SIZE, DIM, CLUSTERS, 0.5, generator=torch.Generator().manual_seed(8))
    resumed.load_state_dict(run(fresh(), 0, 23).state_dict())
    run(resumed, 23, 50)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


def test_offline_keeps_labels_between_epochs_and_renews_them_after() -> None:
    bank, offline = MemoryBank(SIZE, DIM, CLUSTERS), OfflineLabels(every=2)
    offline.initialise(bank, start(), torch.Generator().manual_seed(0))
    labels = bank.labels.clone()
    for step, (index, features) in enumerate(batches(30)):
        assert int(offline.commit(bank, index, features, step)) == 0
    offline.end_epoch(bank, 0)
    assert torch.equal(bank.labels, labels)
    exact = torch.stack([bank.features[labels == c].double().mean(0) for c in range(CLUSTERS)])
    assert (bank.centroids.double() - exact).abs().max() <= 1e-6
    offline.end_epoch(bank, 1, torch.Generator().manual_seed(3))
    assert not torch.equal(bank.labels, labels)
    assert int(bank.counts.min()) >= 1
    with pytest.raises(ValueError, match="every 1 or more epochs"):
        OfflineLabels(every=0)


@pytest.mark.parametrize("labels", [OnlineLabels(), OfflineLabels()])
def test_initialise_is_global_kmeans(labels: Labels) -> None:
    banks = []
    for _ in range(2):
        bank = MemoryBank(SIZE, DIM, 3)
        labels.initialise(bank, 5 * start(), torch.Generator().manual_seed(4))
        banks.append(bank)
    torch.testing.assert_close(banks[0].features, start())
    assert torch.equal(banks[0].labels, banks[1].labels)
    converged = kmeans(start(), 3, 1, start=banks[0].centroids)
    assert (converged.labels == banks[0].labels).float().mean() > 0.9


def test_initialise_names_broken_images() -> None:
    features = start()
    features[17] = torch.nan
    with pytest.raises(ValueError, match=r"1 of 120 features are NaN or infinite.* index 17:"):
        OnlineLabels().initialise(MemoryBank(SIZE, DIM, CLUSTERS), features)


def test_a_least_size_that_cannot_be_kept_is_told() -> None:
    bank = MemoryBank(SIZE, DIM, CLUSTERS)
    with pytest.warns(UserWarning, match="clusters keep 6 members at least, not 9"):
        OnlineLabels(min_cluster=9).initialise(bank, start(), torch.Generator().manual_seed(0))
    assert int(bank.counts.min()) >= 6
    OnlineLabels(min_cluster=6).initialise(bank, start())  # warnings of this package are errors in tests


def test_a_step_never_asks_the_host() -> None:
    """Fake tensors hold no values: whatever needs one (``item``, ``nonzero``, a boolean mask) raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, and ranks below import this file

    fake, bank = FakeTensorMode(), MemoryBank(SIZE, DIM, CLUSTERS, 0.5)
    for name, buffer in list(bank.named_buffers()):
        with fake:
            setattr(bank, name, fake.from_tensor(buffer).to("cuda"))  # on a CPU the host is where the values are
    with fake, torch.device("cuda"):
        index, features = torch.zeros(BATCH, dtype=torch.int64), torch.zeros(BATCH, DIM)
        assert OnlineLabels().commit(bank, index, features, 0).shape == ()
        assert OfflineLabels().commit(bank, index, features, 0).shape == ()
        order, offset = bank.members()
        assert (order.shape, offset.shape) == ((SIZE,), (CLUSTERS,))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_equals_cpu_without_synchronising() -> None:
    banks = [MemoryBank(SIZE, DIM, CLUSTERS, 0.5).to(device) for device in ("cpu", "cuda")]
    pairs = [[(index.to(device), value.to(device)) for index, value in batches(200)] for device in ("cpu", "cuda")]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for bank, steps in zip(banks, pairs, strict=True):
            for index, features in steps:
                OnlineLabels().update(bank, index, features)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu, on_gpu = (bank.cpu() for bank in banks)
    torch.testing.assert_close(on_gpu.features, on_cpu.features)
    assert (on_gpu.labels == on_cpu.labels).float().mean() > 0.95
    state = {name: value.clone() for name, value in on_gpu.state_dict().items()}
    on_gpu.rebuild()
    assert all(torch.equal(value, state[name]) for name, value in on_gpu.state_dict().items())


def _rank(rank: int, world: int, where: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{where}/join", rank=rank, world_size=world)
    for name, labels in (("online", OnlineLabels(repair_every=5)), ("offline", OfflineLabels())):
        bank = MemoryBank(SIZE, DIM, CLUSTERS, 0.5, dtype)
        generator = torch.Generator().manual_seed(0)
        labels.initialise(bank, start() + 1e-7 * rank, generator)  # rank 0's features count
        for step, (index, features) in enumerate(batches(120)):
            mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
            labels.commit(bank, dist.all_gather(index[mine]), dist.all_gather(features[mine]), step)
            if step % 40 == 39:
                labels.end_epoch(bank, step // 40, generator)
        torch.save((bank.state_dict(), generator.get_state()), f"{where}/{name}{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_ranks_hold_the_same_bits(tmp_path: Path, world: int, dtype: torch.dtype) -> None:
    torch.multiprocessing.spawn(_rank, (world, str(tmp_path), dtype), nprocs=world)
    for name in ("online", "offline"):
        saved = [torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True) for rank in range(world)]
        first, generator = saved[0]
        assert int(first["counts"].min()) >= 1
        for other, state in saved[1:]:
            assert all(torch.equal(value, other[key]) for key, value in first.items())
            assert torch.equal(generator, state)  # the next draw agrees, too


@pytest.mark.parametrize("labels", [OnlineLabels(), OfflineLabels()])
def test_own_loops_need_neither_steps_nor_epochs(labels: Labels) -> None:
    generator = torch.Generator().manual_seed(0)
    bank = MemoryBank(60, 8, 4)
    labels.initialise(bank, torch.randn(60, 8, generator=generator), generator)
    for _ in range(5):
        labels.commit(bank, torch.randperm(60, generator=generator)[:16], torch.randn(16, 8, generator=generator))
    labels.end_epoch(bank)
    assert int(bank.counts.min()) > 0
    before = bank.centroids.clone()
    bank.rebuild()
    assert torch.equal(bank.centroids, before)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OnlineLabels(repair_every=-1), "repair_every"),
        (lambda: OnlineLabels(min_cluster=0), "min_cluster=0"),
        (lambda: OnlineLabels(iterations=0), "1 iteration or more"),
        (lambda: OfflineLabels(iterations=0), "1 iteration or more"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_own_loops_too(make: Callable[[], Labels], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()
