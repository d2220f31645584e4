"""Training: the loop, its steps, its figures."""

from interclr.engine.pretrain import pretrain

__all__ = ["pretrain"]
