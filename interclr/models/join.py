"""Parts of a batch as one batch, without a copy where they lie one behind the other in memory, as chunks of one do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat(parts)``; perhaps the parts' own memory, so not to be written to."""
    whole = in_one_piece(parts)
    return torch.cat(list(parts)) if whole is None else whole


def in_one_piece(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that ``parts`` are the chunks of, in their order; None where there is none."""
    first, after = parts[0], parts[0].storage_offset()
    for part in parts:
        here = (part.dtype, part.shape[1:], part.stride(), part.storage_offset(), part.untyped_storage().data_ptr())
        if here != (first.dtype, first.shape[1:], first.stride(), after, first.untyped_storage().data_ptr()):
            return None
        after += len(part) * part.stride(0)
    shape = (sum(map(len, parts)), *first.shape[1:])
    if not any(part.requires_grad for part in parts):
        return first.as_strided(shape, first.stride())
    # Gradients must find their way: only through the tensor that the parts were made of.
    base = first._base
    if base is None or not base.requires_grad or any(part._base is not base for part in parts):
        return None
    same = (base.shape, base.stride(), base.storage_offset()) == (shape, first.stride(), first.storage_offset())
    return base if same else None
