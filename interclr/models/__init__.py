"""Backbones, heads, momentum copies and split BatchNorm."""

from interclr.models.backbones import Backbone, BackboneConfig, described
from interclr.models.fused_resnet import fuse
from interclr.models.heads import Encoded, Encoder, mlp
from interclr.models.join import in_one_piece, joined
from interclr.models.momentum import momentum_copy, running_statistics, update_momentum_copy, update_seeing_copy
from interclr.models.split_norm import SplitBatchNorm, split_batch_norm, takes_views_together

__all__ = [
    "Backbone",
    "BackboneConfig",
    "Encoded",
    "Encoder",
    "SplitBatchNorm",
    "described",
    "fuse",
    "in_one_piece",
    "joined",
    "mlp",
    "momentum_copy",
    "running_statistics",
    "split_batch_norm",
    "takes_views_together",
    "update_momentum_copy",
    "update_seeing_copy",
]
