"""The small frozen values that flow through a step: ``Images`` → ``Batch`` → ``Embeddings`` → ``Pairs``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:  # the command line imports this module, and --help need not wait for torch
    import torch
    from torch import Tensor


class Config(BaseModel):
    """Base of every configuration node: immutable, and an unknown key is an error rather than ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """A file name that is not UTF-8 is no reason to end a run, and one with escape sequences none to obey them."""
    return text.translate(CONTROL).encode("utf-8", "backslashreplace").decode()


class UserError(ValueError):
    """Something the user can mend. The command line prints it as one line, without a traceback, and exits with 2."""


@dataclass(frozen=True, slots=True)
class Images:
    """What a loader yields: raw pixels on a common canvas.

    Image ``i`` occupies ``pixels[i, :, : size[i, 0], : size[i, 1]]``; the rest of the canvas is padding.
    """

    index: Tensor  # (B,) int64, stable in 0..N-1: the memory bank depends on it
    pixels: Tensor  # (B, 3, H, W) uint8
    size: Tensor | None = None  # (B, 2) int64 height, width; None: every image fills its canvas
    label: Tensor | None = None  # (B,) int64, -1 where unknown

    def __len__(self) -> int:
        return self.index.shape[0]

    def each(self, change: Callable[[Tensor], Tensor]) -> Images:
        """The same with every tensor changed."""
        size = None if self.size is None else change(self.size)
        return Images(change(self.index), change(self.pixels), size, None if self.label is None else change(self.label))

    def to(self, device: torch.device) -> Images:
        """Copied without waiting where the memory is pinned; from a GPU whole, as a copy under way could be read."""
        ahead = device.type == "cuda"
        return self.each(lambda tensor: tensor.to(device, non_blocking=ahead))


@dataclass(frozen=True, slots=True)
class Batch:
    """Augmented views of the images in ``Images``, ready for an encoder."""

    index: Tensor  # (B,) int64
    views: tuple[Tensor, ...]  # each (B, 3, S, S) float, normalised
    label: Tensor | None = None  # (B,) int64: fine-tuning learns from it, pre-training never


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What an intra method makes of a batch. V directions (1, or 2 when symmetric); rows are L2-normalised."""

    index: Tensor  # (B,) int64
    query: Tensor  # (V, B, D) with gradient: the anchors of the intra loss
    target: Tensor  # (V, B, D) what each query should agree with
    inter_query: Tensor  # (V, B, D) with gradient: the anchors of the inter loss (the same tensor with a shared head)
    feature: Tensor  # (B, D) without gradient: what the memory bank stores


@dataclass(frozen=True, slots=True)
class Pairs:
    """Bank indices drawn for each anchor. ``-1`` in ``negative`` marks a slot for which no image exists."""

    positive: Tensor  # (A,) int64
    negative: Tensor  # (A, K) int64
    cosine: Tensor | None = None  # (A, K) of the negatives, −inf for −1, where the sampler has worked them out anyway
