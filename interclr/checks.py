"""What callers of the bank, the samplers and k-means may get wrong, said before torch says it less clearly."""

from __future__ import annotations

import torch
from torch import Tensor

from interclr.types import UserError

WHOLE = (torch.int64, torch.int32)  # numbers of indices; torch takes uint8 and bool for masks


def check_tensors(**given: object) -> None:
    """A list or a NumPy array would fail later, and not say why."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{name} is a {type(value).__name__}: give a tensor, torch.as_tensor({name})")
