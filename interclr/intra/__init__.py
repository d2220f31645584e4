"""Intra-image methods. To add one: a file with its ``MethodSettings`` and class, and the former in the union."""

from typing import Annotated

from pydantic import Field

from interclr.intra.base import IntraMethod, Margin, MethodSettings
from interclr.intra.byol import BYOLConfig
from interclr.intra.moco import MoCoConfig
from interclr.intra.npid import NPIDConfig
from interclr.intra.simclr import SimCLRConfig
from interclr.intra.simsiam import SimSiamConfig

MethodConfig = Annotated[
    NPIDConfig | MoCoConfig | BYOLConfig | SimCLRConfig | SimSiamConfig,
    Field(discriminator="name"),
]

__all__ = [
    "BYOLConfig",
    "IntraMethod",
    "Margin",
    "MethodConfig",
    "MethodSettings",
    "MoCoConfig",
    "NPIDConfig",
    "SimCLRConfig",
    "SimSiamConfig",
]
