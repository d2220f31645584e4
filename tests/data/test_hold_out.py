"""The images that are lent to a test split that is missing."""

from __future__ import annotations

import pytest
import torch

from interclr.data.hold_out import TEST_SEED, a_fifth_of_every_class


def one_class_after_the_other(labels: torch.Tensor) -> set[int]:
    """As it was first written; figures of old runs depend on it."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(TEST_SEED))
    chosen: set[int] = set()
    for label in labels.unique().tolist():
        rows = [row for row in shuffled.tolist() if labels[row] == label]
        chosen.update(rows[: max(1, round(0.2 * len(rows)))] if len(rows) > 1 else [])
    return chosen


@pytest.mark.parametrize("sizes", [[1], [2, 1], [1, 2, 3, 7, 8, 12, 13, 22, 50], [100, 3], [5] * 20])
def test_a_fifth_of_every_class_is_the_draw_it_always_was(sizes: list[int]) -> None:
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    labels = 3 * labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]  # with gaps
    tested = a_fifth_of_every_class(labels)
    assert set(tested.nonzero().flatten().tolist()) == one_class_after_the_other(labels)


def test_images_without_a_label_change_nothing() -> None:
    labels = torch.arange(40) % 4
    some = torch.full((80,), -1)
    some[1::2] = labels
    tested = a_fifth_of_every_class(some)
    assert torch.equal(tested[1::2], a_fifth_of_every_class(labels))
    assert not tested[::2].any()
    for none in (torch.full((5,), -1), torch.empty(0, dtype=torch.int64)):
        assert not a_fifth_of_every_class(none).any()
