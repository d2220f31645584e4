"""Embed a whole data set: for the start of the clusters, for evaluation, for plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from interclr.types import Images


def evenly(total: int, count: int) -> Tensor:
    """At most ``count`` of the rows 0…total − 1, spread evenly. Double: single would count beyond 2²⁴ by twos."""
    return torch.linspace(0, total - 1, min(count, total), dtype=torch.float64).long()


@torch.no_grad()
def embed_all(
    network: nn.Module,
    batches: Iterable[Images],
    transform: Callable[[Images], Tensor],
    *,
    pick: Callable[[object], Tensor] | None = None,
    channels_last: bool = False,
    autocast: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
    total: int | None = None,
    keep_on: torch.device | None = None,
) -> Tensor:
    """Outputs (N, F) of ``network`` in eval mode for every image, in order; the network's mode is put back after.

    ``transform`` turns raw images into the network's input (centre crop); ``pick`` selects one tensor from outputs.
    Of ``total`` images, where that is known, they are written to where they stay, on ``keep_on`` (the network's device
    by default); else they are joined at the end, which takes twice the memory.
    """
    was_training = network.training
    network.eval()
    rows: list[Tensor] = []
    whole: Tensor | None = None
    done = 0
    try:
        for images in batches:
            inputs = transform(images)
            if channels_last:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            # Eagerly: a network compiled for training would be compiled once more for this.
            with (
                torch.compiler.set_stance("force_eager"),
                torch.autocast(inputs.device.type, autocast or torch.bfloat16, enabled=autocast is not None),
            ):
                output = network(inputs)
            part = (pick(output) if pick is not None else output).float()
            if total is None:
                rows.append(part)
            else:
                if whole is None:
                    whole = torch.empty(total, *part.shape[1:], device=keep_on or part.device)
                whole[done : done + len(part)] = part
            done += len(images)
            if progress is not None:
                progress(done)
    finally:
        network.train(was_training)
    return torch.cat(rows) if whole is None else whole[:done]
