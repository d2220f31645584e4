"""Triton kernels for the few places where a plain PyTorch expression moves far too many bytes.

Each has a plain twin beside its caller that computes the same function; callers ask ``usable`` and fall back to it
without a GPU or without Triton. With ``TRITON_INTERPRET=1`` the kernels also run on a CPU, slowly: so the tests compare
them with their twins where there is no GPU.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

from torch import Tensor


@cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels can work on these tensors. ``INTERCLR_KERNELS=0`` switches them off, to compare."""
    wanted = os.environ.get("INTERCLR_KERNELS", "1") != "0"
    return wanted and (interpreting() or all(tensor.is_cuda for tensor in tensors)) and installed()
