"""A control, never a method: the command line of a training whose soft targets relate no images.

    python benchmarks/with_own_target.py pretrain RECIPE inter.loss=soft "inter.target_view={}" …

The branch's loss is the method's own (InfoNCE, a distance) of the query and what the target view gives; clusters have
no part in it. All else is as without. What a run without this control gains over one with it is gained by relating
images; what one with it gains over the plain run, by one more and weaker view of the same image.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import Any

from torch import Tensor

from interclr.bank import MemoryBank
from interclr.cli import main
from interclr.engine import training
from interclr.engine.training import Training
from interclr.learner import Learner
from interclr.types import Batch, Embeddings, UserError


def own_loss(self: Learner, embeddings: Embeddings, batch: Batch, bank: MemoryBank) -> Tensor:
    query, intra = embeddings.inter_query, self.intra  # (V, B, D)
    seen = self._seen(batch.views[-1]).expand_as(query)
    vars(intra)["target_of"] = lambda embeddings, bank: seen  # NPID's is the image's entry in the bank
    try:
        return intra.loss(replace(embeddings, query=query, target=seen), bank)
    finally:
        del vars(intra)["target_of"]


def install() -> None:
    """Have every training of this process do so."""
    start = Training.__init__

    def starts(self: Training, *given: Any, **named: Any) -> None:
        start(self, *given, **named)
        if self.learner.inter is None or self.learner.inter.target_view is None:
            raise UserError("this control needs inter.loss=soft and an inter.target_view")
        if self.learner.inter.head == "separate":
            raise UserError("this control takes the method's own loss, whose negatives are of its own head; use shared")

    Training.__init__ = starts  # type: ignore[method-assign]
    Learner._soft_inter_loss = own_loss  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    typed = shlex.join(["python", "benchmarks/with_own_target.py", *sys.argv[1:]])
    training.command_line = lambda: typed  # type: ignore[attr-defined]  # what the run's result says it was made by
    main()
