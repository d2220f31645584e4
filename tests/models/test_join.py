from __future__ import annotations

import pytest
import torch

from interclr.models import in_one_piece, joined


def test_chunks_are_joined_without_a_copy() -> None:
    whole = torch.randn(6, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    again = joined(whole.chunk(3))
    assert torch.equal(again, whole)
    assert again.data_ptr() == whole.data_ptr()
    assert again.is_contiguous(memory_format=torch.channels_last)
    middle = joined(whole.chunk(3)[1:])
    assert torch.equal(middle, whole[2:])
    assert middle.data_ptr() == whole[2:].data_ptr()


def test_a_gradient_finds_its_way() -> None:
    leaf = torch.randn(6, 4, requires_grad=True)
    whole = leaf * 2
    again = joined(whole.chunk(2))
    assert again is whole
    again[5].sum().backward()
    expected = torch.zeros(6, 4)
    expected[5] = 2
    assert torch.equal(leaf.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("with_gradient", [False, True])
def test_others_are_copied(with_gradient: bool) -> None:
    whole = torch.randn(6, 4, requires_grad=with_gradient) * 1
    a, b, c = whole.chunk(3)
    for parts in ((b, a), (a, c), (a, b.clone()), (a, b[:, :2].repeat(1, 2)), (whole[:, :2], whole[:, 2:])):
        assert in_one_piece(parts) is None
        assert torch.equal(joined(parts), torch.cat(parts))
    assert (in_one_piece((a, b)) is None) == with_gradient  # not all of what they were made of
