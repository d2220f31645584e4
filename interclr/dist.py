"""Rank, world and collectives, as the identity when there is one process and no launcher."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor

T = TypeVar("T")


def is_distributed() -> bool:
    return torch_dist.is_available() and torch_dist.is_initialized()


def rank() -> int:
    return torch_dist.get_rank() if is_distributed() else 0


def world() -> int:
    return torch_dist.get_world_size() if is_distributed() else 1


def is_main() -> bool:
    return rank() == 0


def launched() -> bool:
    """True under ``torchrun``."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def start(device: torch.device) -> None:
    """Join the process group ``torchrun`` describes; nothing to do for one process."""
    if launched() and not is_distributed():
        torch_dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def stop() -> None:
    if is_distributed():
        torch_dist.destroy_process_group()


def all_gather(tensor: Tensor) -> Tensor:
    """Concatenate every rank's ``tensor``, all of one size, along the first dimension, in rank order (no gradient)."""
    if world() == 1:
        return tensor
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(world())]
    torch_dist.all_gather(parts, tensor)
    return torch.cat(parts)


def broadcast(tensor: Tensor, source: int = 0) -> Tensor:
    """Overwrite ``tensor`` with rank ``source``'s values, in place."""
    if world() > 1:
        torch_dist.broadcast(tensor, source)
    return tensor


def broadcast_all(tensors: Sequence[Tensor], source: int = 0) -> None:
    """The same for many of one type, in one message."""
    if world() == 1 or not tensors:
        return
    message = broadcast(torch.cat([tensor.flatten() for tensor in tensors]), source)
    parts = message.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


def all_reduce_mean(tensor: Tensor) -> Tensor:
    """The mean of ``tensor`` over ranks, as a new tensor."""
    if world() == 1:
        return tensor
    total = tensor.clone()
    torch_dist.all_reduce(total)
    return total / world()


def gathered(value: T) -> list[T]:
    """Every rank's ``value``, any object of few bytes, in rank order."""
    if world() == 1:
        return [value]
    values: list[T] = [value] * world()
    torch_dist.all_gather_object(values, value)
    return values


def slice_of_rank(rows: int) -> slice:
    """The rows of a global batch that belong to this rank; the global batch divides evenly by contract."""
    share, rest = divmod(rows, world())
    assert rest == 0, f"a global batch of {rows} does not divide over {world()} ranks"
    return slice(rank() * share, (rank() + 1) * share)


def all_gather_with_gradient(tensor: Tensor) -> Tensor:
    """As ``all_gather``, but gradients flow back to the rank each row came from."""
    if world() == 1:
        return tensor
    from torch.distributed.nn.functional import all_gather as gather

    return torch.cat(gather(tensor.contiguous()))
