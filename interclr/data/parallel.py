"""Run a function over 0..count-1 in threads and hand the results out in order.

Threads are enough: Pillow's decoders, file reads and hashes all release the interpreter's lock.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

Result = TypeVar("Result")
Progress = Callable[[int, int], None]  # done, total
Working = Callable[[str], AbstractContextManager[Progress]]  # a bar for what has this name, as of ``Screen.working``


def unseen(what: str) -> AbstractContextManager[Progress]:
    """No bar."""
    return nullcontext(lambda done, total: None)


def ordered_map(function: Callable[[int], Result], count: int, workers: int | None = None) -> Iterator[Result]:
    """Only a few results per worker wait at any time, however large ``count`` is."""
    workers = workers or min(16, os.cpu_count() or 1)
    if workers == 1:
        yield from map(function, range(count))
        return
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for index in range(count):
                pending.append(pool.submit(function, index))
                if len(pending) >= 4 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
