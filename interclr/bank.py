"""The memory bank: one feature and one pseudo-label per image, and the exact mean of every cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from interclr.checks import WHOLE, check_tensors
from interclr.types import UserError

FIXED_POINT = 2.0**30  # one unit in `sums`; N·2³⁰ stays inside int64 up to N = 2³³ unit vectors
ROWS = 2**16  # rows at a time wherever a pass over all N images is made, to bound memory
FEW = 512  # indices of a batch: so many are compared pairwise, more are sorted


@dataclass(frozen=True, slots=True)
class Entries:
    """What a batch is about to do to the bank: worked out by ``blend``, applied by ``store``."""

    index: Tensor  # (B,) int64
    first: Tensor  # (B,) int64, where in the batch this index occurs first
    before: Tensor  # (B, D) as stored now
    after: Tensor  # (B, D) as it will be stored, equal for equal indices


def is_unit(rows: Tensor) -> Tensor:
    """(B, 1): which of normalised rows have a direction. Normalising leaves others zero, short or NaN."""
    return rows.square().sum(dim=1, keepdim=True) > 0.5


class MemoryBank(nn.Module):
    """Features v̂ (N, D), labels (N,) and the centroids (k, D) of their clusters, all in the ``state_dict``.

    **Always consistent.** After every method ``counts``, ``sums`` and ``centroids`` are exactly those of ``features``
    and ``labels``. The sums are int64 in *fixed point*, ``round(feature as stored · 2³⁰)``. Integer addition is
    associative, so what was added is subtracted to the last bit, atomics on a GPU cannot reorder the result, every
    rank that applies the same writes holds the same bits, and rounding never drifts, however many steps are made.
    The design's rebuild once an epoch is thus unnecessary; ``rebuild`` exists and changes no bit.

    **No waiting.** ``blend``, ``store`` and ``write`` have fixed shapes, touch O(B·D) numbers (plus O(k) counts) and
    never ask the host.

    The features start as random unit vectors (what NPID expects) from ``generator`` (a fixed seed when None, so that
    ranks agree; the bank is made on its device) and the labels as ``i mod k``. ``clusters=0`` keeps features only: for
    NPID without the inter branch.
    """

    features: Tensor  # (N, D) float32 or bfloat16
    labels: Tensor  # (N,) int64, -1 throughout when there are no clusters
    centroids: Tensor  # (k, D) float32
    counts: Tensor  # (k,) int64
    sums: Tensor  # (k, D) int64, fixed point
    repair_due: Tensor  # () bool: small clusters were seen when online labels last looked

    def __init__(
        self,
        size: int,
        dim: int,
        clusters: int,
        momentum: float = 1.0,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if size < 1 or dim < 1:
            raise UserError(f"a bank has one image and one dimension or more, not size={size} and dim={dim}")
        check_clusters(clusters, size)
        if not 0.0 < momentum <= 1.0:
            raise UserError(f"the bank's momentum ω must be in (0, 1], not {momentum}")
        if dtype not in (torch.float32, torch.bfloat16):
            raise UserError(f"the bank stores float32 or bfloat16, not {dtype}")
        self.size, self.dim, self.clusters, self.momentum = size, dim, clusters, momentum
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        with generator.device:
            start = torch.randn(size, dim, generator=generator)
            self.register_buffer("features", functional.normalize(start, dim=1, out=start).to(dtype))
            self.register_buffer("labels", torch.arange(size) % clusters if clusters else torch.full((size,), -1))
            self.register_buffer("centroids", torch.zeros(clusters, dim))
            self.register_buffer("counts", torch.zeros(clusters, dtype=torch.int64))
            self.register_buffer("sums", torch.zeros(clusters, dim, dtype=torch.int64))
            self.register_buffer("repair_due", torch.zeros((), dtype=torch.bool))
        self.rebuild()

    # The write path of a step.

    @torch.no_grad()
    def blend(self, index: Tensor, features: Tensor) -> Entries:
        """v̂ᵢ ← (1−ω)·v̂ᵢ + ω·vᵢ, normalised again; nothing is written yet.

        Of an index that occurs twice in a batch the first occurrence counts. A feature with NaN or infinity leaves
        its entry as it is: the loss will tell of it, while one such row would spoil a centroid for good. So does one
        without a direction: zero, or too small or too large to be normalised.
        """
        self._check(index, features)
        first = first_occurrence(index)
        before = self.features[index]  # (B, D)
        fresh = features[first].float()  # (B, D)
        mixed = functional.normalize((1 - self.momentum) * before.float() + self.momentum * fresh, dim=1)
        return Entries(index, first, before, torch.where(is_unit(mixed), mixed.to(before.dtype), before))

    def _check(self, index: Tensor, features: Tensor) -> None:
        """What would be broadcast, cut off or counted from the end in silence. Numbers are looked at on a CPU only."""
        check_tensors(index=index, features=features)
        if index.ndim != 1 or index.dtype not in WHOLE or features.shape != (len(index), self.dim):
            raise UserError(
                f"the bank takes (B,) int64 indices and (B, {self.dim}) features, not {tuple(index.shape)} of "
                f"{index.dtype} and {tuple(features.shape)}: one feature for each image, such as the mean of its views"
            )
        if index.device.type == "cpu" and len(index) and not torch.compiler.is_compiling():
            low, high = index.aminmax()
            if low < 0 or high >= self.size:
                raise UserError(f"the bank holds images 0 to {self.size - 1}, not {int(low if low < 0 else high)}")

    @torch.no_grad()
    def store(self, entries: Entries, labels: Tensor | None = None) -> Tensor:
        """Apply ``entries`` and, when given, the new labels (B,). Returns how many labels changed, a 0-d tensor.

        **A cluster is never left empty**: where all members of a cluster would leave in this batch, the first of them
        in batch order stays. Arrivals are not counted in its favour, because they may be held back themselves.
        """
        index, first, before, after = entries.index, entries.first, entries.before, entries.after
        self.features[index] = after  # equal indices carry equal rows, so their order does not matter
        if self.clusters == 0:
            return index.new_zeros(())
        old = self.labels[index]  # (B,)
        once = first == torch.arange(len(index), device=index.device)  # (B,) False for repetitions
        new = old if labels is None else self._never_empty(old, labels, once)[first]
        self.labels[index] = new
        self._transfer(old, new, before, after, once.long())
        return ((new != old) & once).sum()

    def write(self, index: Tensor, features: Tensor) -> Tensor:
        """Update the features of a batch and leave its labels alone. Returns the features as stored, (B, D)."""
        entries = self.blend(index, features)
        self.store(entries)
        return entries.after

    def _never_empty(self, old: Tensor, new: Tensor, once: Tensor) -> Tensor:
        position = torch.arange(len(old), device=old.device)  # (B,)
        leaves = (new != old) & once
        leaving = torch.zeros_like(self.counts).index_add_(0, old, leaves.long())  # (k,)
        earliest = torch.full_like(self.counts, len(old)).scatter_reduce_(
            0, old, position.masked_fill(~leaves, len(old)), "amin"
        )  # (k,) the first to leave each cluster
        stays = leaves & (leaving == self.counts)[old] & (earliest[old] == position)
        return torch.where(stays, old, new)

    def _transfer(self, old: Tensor, new: Tensor, before: Tensor, after: Tensor, weight: Tensor) -> None:
        """Take ``before`` out of clusters ``old``, put ``after`` into ``new``; weight 0 for rows that do not count."""
        touched, sign = torch.cat((old, new)), torch.cat((-weight, weight))  # (2B,)
        self.counts.index_add_(0, touched, sign)
        self.sums.index_add_(0, touched, fixed_point(torch.cat((before, after))) * sign[:, None])
        if self.clusters <= len(touched) and not self.sums.is_cuda:  # all: fewer operations, and the same result
            self.centroids.copy_(mean_of(self.sums, self.counts))
        else:
            self.centroids[touched] = mean_of(self.sums[touched], self.counts[touched])

    # Changes to the whole bank, outside the step.

    @torch.no_grad()
    def fill(self, features: Tensor) -> None:
        """Replace every feature (N, D), in the order of the image indices; labels stay.

        As in a step, a feature without a direction leaves the entry as it is. The bank's own features change nothing.
        """
        if tuple(features.shape) != (self.size, self.dim):
            raise UserError(f"the bank holds ({self.size}, {self.dim}) features, not {tuple(features.shape)}")
        check_finite(features)
        for rows in row_slices(self.size if features is not self.features else 0):  # again normalised they could differ
            fresh = functional.normalize(features[rows].to(self.features.device).float(), dim=1)
            self.features[rows] = torch.where(is_unit(fresh), fresh.to(self.features.dtype), self.features[rows])
        self.rebuild()

    @torch.no_grad()
    def assign(self, labels: Tensor) -> None:
        """Replace every label (N,). Waits for the host."""
        if labels.shape != self.labels.shape:
            raise UserError(f"the bank holds ({self.size},) labels, not {tuple(labels.shape)}")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.clusters:
            raise UserError(f"labels are 0 to {self.clusters - 1}, not {low} to {high}: nothing was changed")
        self.labels.copy_(labels)
        self.rebuild()

    @torch.no_grad()
    def move(self, index: Tensor, labels: Tensor) -> None:
        """Give the images ``index`` (M,), all different, new labels; here a cluster may become empty."""
        for rows in row_slices(len(index)):
            here, new = index[rows], labels[rows]
            feature, old = self.features[here], self.labels[here]
            self.labels[here] = new
            self._transfer(old, new, feature, feature, torch.ones_like(new))

    @torch.no_grad()
    def rebuild(self) -> None:
        """Recompute counts, sums and centroids from features and labels: O(N·D), and bit for bit what they were."""
        if self.clusters:
            self.sums.copy_(group_sums(self.features, self.labels, self.clusters))
            self.counts.zero_().index_add_(0, self.labels, torch.ones_like(self.labels))
            self.centroids.copy_(mean_of(self.sums, self.counts))

    # A bank keeps its precision: half() of a model that holds one, or a state of another precision, would round the
    # features and leave the sums those of the unrounded.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def moved(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            return changed if changed.dtype == tensor.dtype else tensor.to(changed.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        features = state_dict.get(f"{prefix}features")
        if features is not None and features.dtype != self.features.dtype:
            self.rebuild()

    # Reading.

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor], prefix: str = "bank.") -> Self:
        """A bank as a checkpoint of a learner holds it, to the bit, in memory of the host; for looking at (ω is 1)."""
        own = {key.removeprefix(prefix): value.cpu() for key, value in state.items() if key.startswith(prefix)}
        size, dim = own["features"].shape
        bank = cls(size, dim, len(own["counts"]), dtype=own["features"].dtype)
        bank.load_state_dict(own)
        return bank

    def members(self) -> tuple[Tensor, Tensor]:
        """The images grouped by label: cluster c is ``order[start[c] : start[c] + counts[c]]``, indices ascending."""
        if self.labels.is_cuda:  # radix sort: fewer digits
            narrow = self.labels.to(torch.int16 if self.clusters <= 2**15 else torch.int32)
            order = torch.argsort(narrow, stable=True)  # (N,)
        else:  # NumPy's radix sort, which it has for two bytes, is several times as fast as torch's on a CPU
            short = self.labels.numpy().astype(np.uint16 if self.clusters <= 2**16 else np.int32)
            order = torch.from_numpy(np.argsort(short, kind="stable"))
        start = self.counts.cumsum(0) - self.counts  # (k,)
        return order, start

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}, clusters={self.clusters}, momentum={self.momentum}"


def first_occurrence(index: Tensor) -> Tensor:
    """For each element of ``index`` (B,) the position at which its value occurs first."""
    if len(index) == 0:
        return index
    if index.device.type == "cpu" and len(index) <= FEW:
        return (index[:, None] == index).to(torch.uint8).argmax(1)  # the first of equal maxima
    order = torch.argsort(index, stable=True)  # (B,)
    value = index[order]
    fresh = torch.cat([torch.ones_like(value[:1], dtype=torch.bool), value[1:] != value[:-1]])  # opens a run of equals
    position = torch.arange(len(index), device=index.device)
    opener = position.masked_fill(~fresh, 0).cummax(0).values  # (B,) where this element's run opens
    return torch.empty_like(order).scatter_(0, order, order[opener])


def fixed_point(features: Tensor, scale: float = FIXED_POINT) -> Tensor:
    """``round(features · scale)`` in int64; ``scale`` is a power of two, so the product itself is exact."""
    return (features.float() * scale).round_().long()


def group_sums(features: Tensor, group: Tensor, groups: int, scale: float = FIXED_POINT) -> Tensor:
    """Sum the rows of ``features`` (M, D) by ``group`` (M,), in fixed point: (groups, D) int64."""
    sums = torch.zeros(groups, features.shape[1], dtype=torch.int64, device=features.device)
    for rows in row_slices(len(features)):
        sums.index_add_(0, group[rows], fixed_point(features[rows], scale))
    return sums


def mean_of(sums: Tensor, counts: Tensor, scale: float = FIXED_POINT) -> Tensor:
    """sums / counts as float32, and zero for an empty group."""
    return sums.float() / (counts.clamp(min=1).float() * scale)[:, None]


def row_slices(rows: int, chunk: int = ROWS) -> list[slice]:
    """Of no rows one empty slice, so that there is something to concatenate."""
    return [slice(start, min(start + chunk, rows)) for start in range(0, max(rows, 1), chunk)]


def check_clusters(clusters: int, size: int) -> None:
    if clusters < 0:
        raise UserError(f"k={clusters} clusters asked for: use two or more, or 0 for a bank of features only")
    if clusters > size:
        raise UserError(f"k={clusters} clusters asked of N={size} images: use clusters: auto or at most N")


def check_finite(features: Tensor) -> None:
    """Refuse NaN and infinity, naming the images (waits for the host)."""
    bad = torch.cat([~features[rows].isfinite().all(dim=1) for rows in row_slices(len(features))]).nonzero().flatten()
    if len(bad):
        named = ", ".join(str(i) for i in bad[:8].tolist()) + (", …" if len(bad) > 8 else "")
        raise UserError(
            f"{len(bad)} of {len(features)} features are NaN or infinite, those of the images with index {named}: "
            "look at these images, or lower the learning rate if training has diverged"
        )
