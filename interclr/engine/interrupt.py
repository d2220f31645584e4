"""Ctrl-C, a scheduler's TERM, a session that ends: a run ends after its current step, with a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def _asking() -> list[signal.Signals]:
    """Those that ask a run to stop: also the end of a terminal or ssh session, unless started with nohup."""
    hang_up = getattr(signal, "SIGHUP", None)
    ignored = hang_up is None or signal.getsignal(hang_up) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored or hang_up is None else [hang_up])]


class Interruption:
    """``asked`` becomes true with the first signal; a second one ends the run at once.

    So does the first while a step is being compiled (``preparing``): a signal to the whole process group may end the
    compiler's processes, and this one might wait for them for ever (suspected after a hang, not proven). There are four
    steps to lose at most.
    """

    def __init__(self) -> None:
        self.asked = False
        self.preparing = False

    @contextmanager
    def heeded(self) -> Iterator[None]:
        def ask(number: int, frame: FrameType | None) -> None:
            if self.asked or self.preparing:
                raise KeyboardInterrupt
            self.asked = True

        try:
            before = {number: signal.signal(number, ask) for number in _asking()}
        except ValueError:  # not in the main thread: somebody else looks after signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def term_as_interrupt() -> Iterator[None]:
    """A scheduler's TERM is as Ctrl-C, so that what is half done is cleared away; a run that trains handles both."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: somebody else looks after signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
