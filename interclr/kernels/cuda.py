"""CUDA C++ kernels, compiled when first used by the compiler that comes with PyTorch.

For what Triton cannot say. Needs NVIDIA's ``cuda-bindings``, which PyTorch's own packages for CUDA bring along.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def installed() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ImportError:  # no cuda, or another module of that name
        return False


def compile_for(architecture: str, source: str, macros: Sequence[tuple[str, int]] = ()) -> bytes:
    """Machine code for ``architecture``, such as sm_90a. Needs no GPU."""
    from cuda.bindings import nvrtc

    options = [
        f"--gpu-architecture={architecture}",
        "-std=c++17",
        "-default-device",
        *(f"-D{name}={value}" for name, value in macros),
    ]
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, None, None))
    result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(result[0]) != 0:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"a CUDA kernel does not compile: {log.decode().rstrip(chr(0))}")
    code: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


class Kernel:
    """A function of a compiled source, on one device."""

    def __init__(self, code: bytes, name: str, device: int, threads: int, shared: int) -> None:
        from cuda.bindings import driver

        self.device, self.threads, self.shared = device, threads, shared
        self.context = _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device))))
        with torch.cuda.device(device):
            self._enter()
            self.module = _checked(driver.cuModuleLoadData(code))
            self.function = _checked(driver.cuModuleGetFunction(self.module, name.encode()))
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self.function, most, shared))

    def __call__(self, blocks: int, *arguments: Tensor | int | None) -> None:
        """On the current stream. Tensors are passed as pointers, None as a null pointer."""
        from cuda.bindings import driver

        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments)
        types = tuple(ctypes.c_int if isinstance(a, int) else ctypes.c_void_p for a in arguments)
        with torch.cuda.device(self.device):
            self._enter()
            stream = torch.cuda.current_stream().cuda_stream
            _checked(
                driver.cuLaunchKernel(
                    self.function, blocks, 1, 1, self.threads, 1, 1, self.shared, stream, (values, types), 0
                )
            )

    def _enter(self) -> None:
        """A thread that has not used the device yet, as autograd's, may have no context."""
        from cuda.bindings import driver

        if int(_checked(driver.cuCtxGetCurrent())) == 0:
            _checked(driver.cuCtxSetCurrent(self.context))


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call gave, which comes behind its error code."""
    if int(result[0]) != 0:
        raise RuntimeError(f"CUDA: {result[0]!r}")
    return result[1] if len(result) > 1 else None
