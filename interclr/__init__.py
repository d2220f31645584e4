"""InterCLR: visual representations from unlabelled images, by relating different images to each other."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from interclr.bank import MemoryBank
    from interclr.config import Settings, load_settings
    from interclr.report.pretrain import pretrain
    from interclr.run.folder import Run, embed, load

_HOMES = {
    "MemoryBank": "interclr.bank",
    "Run": "interclr.run.folder",
    "Settings": "interclr.config",
    "embed": "interclr.run.folder",
    "load": "interclr.run.folder",
    "load_settings": "interclr.config",
    "pretrain": "interclr.report.pretrain",
}
__all__ = ["MemoryBank", "Run", "Settings", "embed", "load", "load_settings", "pretrain"]


def __getattr__(name: str) -> Any:
    """Loaded when first used: ``interclr --help`` need not wait for torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'interclr' has no attribute {name!r}")


def __dir__() -> list[str]:
    """With the names that are not loaded yet, for completion."""
    return sorted({*globals(), *__all__})
