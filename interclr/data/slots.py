"""A few batches' worth of shared memory: workers write it, the GPU copies from it by itself."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import time
from collections.abc import Sequence

import torch
from torch import Tensor

POLL_SECONDS = 0.005  # between two looks of a worker whether its slot is free


class Slots:
    """Shared memory that workers lay batches into, batch ``k`` into slot ``k`` modulo their number once that is free.

    It is allocated and pinned once. Fresh memory for each batch would cost a page fault for every 4 kB, in the worker
    and again in this process, and this process a copy into pinned memory.
    """

    def __init__(self, count: int, size: int) -> None:
        shared = torch.UntypedStorage._new_shared(count * size)
        self.memory = torch.empty(0, dtype=torch.uint8).set_(shared).view(count, size)
        self.freed = torch.zeros(1, dtype=torch.int64).share_memory_()  # so many batches need their slot no longer
        self.is_pinned = False

    def allocate(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """In a worker: memory for batch ``number``, inside its slot where that is large enough."""
        count, size = self.memory.shape
        needed = math.prod(shape)
        if needed > size:
            return torch.empty(shape, dtype=torch.uint8)
        main = multiprocessing.parent_process()
        while number - count >= int(self.freed) and (main is None or main.is_alive()):
            time.sleep(POLL_SECONDS)
        return self.memory[number % count, :needed].view(shape)

    def hold(self, pixels: Tensor) -> bool:
        return pixels.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()

    def view(self, number: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        return self.memory[number % len(self.memory)].as_strided(shape, stride)

    def free(self, count: int) -> None:
        """The first ``count`` batches need their slot no longer."""
        self.freed.fill_(count)

    def pin(self, device: torch.device) -> None:
        """Let the GPU copy from here by itself. Where that is refused, copies are slower and nothing else changes."""
        with torch.cuda.device(device):
            refused = int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 0))
            self.is_pinned = not refused
            if refused:
                with contextlib.suppress(RuntimeError):  # CUDA reports it once more, with the next kernel
                    torch.zeros(1, device=device)

    def unpin(self, device: torch.device) -> None:
        if self.is_pinned:
            torch.cuda.synchronize(device)  # the last copies
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            self.is_pinned = False
