from __future__ import annotations

import pytest
import torch

from interclr import dist
from interclr.data.loader import Order, ResidentLoader
from interclr.data.reading import read_all

from .made_images import CPU, SIZES, Drawn, check_same

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_every_epoch_is_another_permutation() -> None:
    order = Order(20, 5, seed=3)
    assert order.steps_per_epoch == 4
    epochs = [torch.cat([order.indices(4 * e + s) for s in range(4)]) for e in range(5)]
    assert all(epoch.sort().values.tolist() == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 5
    other = Order(20, 5, seed=4)
    assert not torch.equal(torch.cat([other.indices(s) for s in range(4)]), epochs[0])


def test_an_incomplete_batch_is_dropped_and_others_are_dropped_next_time() -> None:
    order = Order(10, 4, seed=0)
    assert order.steps_per_epoch == 2
    left_out = []
    for epoch in range(12):
        shown = torch.cat([order.indices(2 * epoch), order.indices(2 * epoch + 1)]).tolist()
        assert len(set(shown)) == 8
        left_out.append(frozenset(range(10)) - set(shown))
    assert set().union(*left_out) == set(range(10))


def test_a_step_depends_on_nothing_before_it() -> None:
    through = Order(23, 4, seed=1)
    batches = [through.indices(step).tolist() for step in range(30)]
    for step in (29, 0, 17, 5, 4, 12):
        assert Order(23, 4, seed=1).indices(step).tolist() == batches[step]
        assert through.indices(step).tolist() == batches[step]


def resident(order: Order, device: torch.device = CPU) -> ResidentLoader:
    return ResidentLoader(read_all(Drawn(order.count, sizes=SIZES))[0].to(device), order)


@pytest.mark.parametrize("first", [0, 3, 5, 9])
def test_resident_batches_are_those_of_the_order(first: int) -> None:
    """Over several epochs, from anywhere, and though another loop of the same loader is elsewhere meanwhile."""
    order = Order(22, 4, seed=2)  # five steps an epoch
    loader, elsewhere = resident(order), resident(order).iterate(1, 100)
    canvas = loader.canvas
    seen = []
    for batch in loader.iterate(first, 18):
        seen.append(batch)
        next(elsewhere)
    check_same(seen, [canvas.take(Order(22, 4, seed=2).indices(step)) for step in range(first, 18)])


def test_ranks_share_a_resident_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(22, 4, seed=2)
    whole = list(resident(order).iterate(0, 12))
    for rows in (slice(0, 2), slice(2, 4)):
        monkeypatch.setattr(dist, "slice_of_rank", lambda batch, rows=rows: rows)
        part = list(resident(order).iterate(0, 12))
        check_same(part, [batch.each(lambda tensor, rows=rows: tensor[rows]) for batch in whole])


def test_the_permutation_is_copied_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[list[int]] = []
    copy = ResidentLoader._on_device

    def watched(self: ResidentLoader, permutation: torch.Tensor) -> torch.Tensor:
        copied.append(permutation.tolist())
        return copy(self, permutation)

    monkeypatch.setattr(ResidentLoader, "_on_device", watched)
    order = Order(22, 4, seed=2)
    batches = resident(order).iterate(3, 12)
    assert not copied
    for step, batch in zip(range(3, 12), batches, strict=True):
        assert len(copied) == step // 5 + 1
        start = step % 5 * 4
        assert batch.index.tolist() == copied[-1][start : start + 4]
    assert all(sorted(permutation) == list(range(22)) for permutation in copied)


@needs_gpu
def test_resident_batches_on_a_gpu() -> None:
    """Though it is busy, and without the host ever waiting for it, not even between two epochs."""
    order, device, steps = Order(22, 4, seed=2), torch.device("cuda"), 18
    batches = resident(order, device).iterate(0, steps)
    seen = [next(batches)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(steps - 1):
            torch.cuda._sleep(5_000_000)
            seen.append(next(batches))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    check_same([batch.to(CPU) for batch in seen], list(resident(order).iterate(0, steps)))
