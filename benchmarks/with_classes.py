"""A control, never a method: the command line of a training whose pairs are right, as the classes of its images tell.

    python benchmarks/with_classes.py positives,negatives pretrain RECIPE …
    python benchmarks/with_classes.py positives=0.6 pretrain RECIPE …

``positives``: an anchor's positive is drawn among those of its cluster that are of its class (itself where it is the
only one), or of a share of all draws, each decided by itself, as ``positives=0.6`` says: the others are drawn from the
whole cluster, so that some of them are right as well. ``negatives``: images of the anchor's class are left out of its
negatives. All else, clusters included, is as without: what such a run gains over one without is what wrong pairs cost,
and what better pseudo-labels could gain at most. It trains with labels, so its figures are no evidence for anything but
that.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from interclr import learner
from interclr.cli import main
from interclr.engine import training
from interclr.engine.training import Training
from interclr.samplers import Sampler, base, select_positive
from interclr.samplers.base import Bank, Prepared
from interclr.types import Pairs, UserError

PART = r"positives(=0?\.\d+)?|negatives"
SHARES = 2**20  # as finely as a share of draws is told


@dataclass(frozen=True)
class WithinClasses:
    """A bank whose clusters are cut by class: what drawing a positive reads of one."""

    features: Tensor
    labels: Tensor  # (N,) cluster · classes + class
    counts: Tensor  # (k · classes,)

    def members(self) -> tuple[Tensor, Tensor]:
        return torch.argsort(self.labels, stable=True), self.counts.cumsum(0) - self.counts


def within_classes(bank: Bank, classes: Tensor, number: int) -> WithinClasses:
    labels = bank.labels * number + classes
    counts = bank.counts.new_zeros(len(bank.counts) * number)
    return WithinClasses(bank.features, labels, counts.scatter_add_(0, labels, torch.ones_like(labels)))


def positives_of_class(index: Tensor, bank: Bank, lots: Tensor, classes: Tensor, number: int, share: float) -> Tensor:
    """(A,) as ``select_positive`` draws them, a share of them among those of the anchor's class only."""
    cut = within_classes(bank, classes, number)
    right = select_positive(index, cut.labels[index], cut, lots)
    if share == 1:
        return right
    decided = (lots >> 40) % SHARES < share * SHARES  # upper digits, which say next to nothing of which image it is
    return torch.where(decided, right, select_positive(index, bank.labels[index], bank, lots))


def right_pairs(pairs: Pairs, anchors: Tensor, classes: Tensor) -> Pairs:
    """The same without negatives of the anchor's class: −1 in their place, which no loss counts."""
    drawn = pairs.negative
    wrong = (classes[drawn.clamp_min(0)] == classes[anchors][:, None]) & (drawn >= 0)
    cosine = None if pairs.cosine is None else pairs.cosine.masked_fill(wrong, -torch.inf)
    return replace(pairs, negative=drawn.masked_fill(wrong, -1), cosine=cosine)


def install(parts: list[str]) -> None:
    """Have every training of this process draw its pairs so."""
    known: dict[str, Any] = {}  # the classes, once a training has its images
    start, prepare, complete = Training.__init__, Sampler.prepare, Sampler.complete
    shares = [float(share or 1) for name, _, share in (part.partition("=") for part in parts) if name == "positives"]

    def starts(self: Training, *given: Any, **named: Any) -> None:
        start(self, *given, **named)
        labels = self.data.labels
        if labels is None or bool((labels < 0).any()):
            raise UserError("this control needs the class of every image")
        if not self.learner.draws_pairs:
            raise UserError("this run draws no pairs that could be right: it has no inter branch, or a soft loss")
        if "negatives" in parts and not self.learner.intra.uses_negatives:
            raise UserError(f"{self.settings.method.name} has no negatives that could be right")
        known["classes"], known["number"] = labels.to(self.device), int(labels.max()) + 1

    def positive(index: Tensor, label: Tensor, bank: Bank, lots: Tensor) -> Tensor:
        return positives_of_class(index, bank, lots, known["classes"], known["number"], shares[0])

    def prepares(self: Sampler, index: Tensor, bank: Bank, priority: Tensor, lots: Tensor) -> Prepared:
        known["anchors"] = index
        return prepare(self, index, bank, priority, lots)

    def completes(self: Sampler, query: Tensor, prepared: Prepared, bank: Bank) -> Pairs:
        return right_pairs(complete(self, query, prepared, bank), known["anchors"], known["classes"])

    Training.__init__ = starts  # type: ignore[method-assign]
    if shares:
        base.select_positive = learner.select_positive = positive  # type: ignore[attr-defined]
    if "negatives" in parts:
        Sampler.prepare, Sampler.complete = prepares, completes  # type: ignore[method-assign]


if __name__ == "__main__":
    asked = sys.argv[1].split(",") if len(sys.argv) > 1 else []
    if not asked or not all(re.fullmatch(PART, part) for part in asked):
        sys.exit(f"usage: {sys.argv[0]} positives,negatives pretrain RECIPE … (or one of them, or positives=0.6)")
    install(asked)
    if "--no-report" not in sys.argv:  # the page draws from some of the images only, whose classes are not known here
        sys.argv.append("--no-report")
    typed = shlex.join(["python", "benchmarks/with_classes.py", *sys.argv[1:]])
    training.command_line = lambda: typed  # type: ignore[attr-defined]  # what the run's result says it was made by
    del sys.argv[1]
    main()
