"""Training: the loop, its steps, checkpoints, figures and progress."""

from interclr.engine.pretrain import pretrain
from interclr.engine.run import Run, embed, load

__all__ = ["Run", "embed", "load", "pretrain"]
