"""A training step as one CUDA graph: one launch, not a thousand, so that the GPU never waits for the host to launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from interclr import dist
from interclr.models import in_one_piece
from interclr.streams import forget_side_streams
from interclr.types import Batch

WARM_UP = 3  # steps made in the ordinary way first: kernels compile and load, the optimiser's state appears

Compute = Callable[[Batch], dict[str, Tensor]]


def can_capture(device: torch.device, precision: str, accumulate: int) -> bool:
    """fp16's loss scaling asks the host; gradients kept between graphs and collectives inside them are not worth it."""
    return device.type == "cuda" and precision != "fp16" and accumulate == 1 and dist.world() == 1


class CaptureFailed(RuntimeError):
    """The step asks the host for something, or does not fit into memory as a graph. Nothing has been computed."""


class CapturedStep:
    """Calls ``compute`` three times, then captures it, and from then on replays the graph on the batch given.

    Random numbers stay a function of the step: the graph draws from ``generators`` as they are seeded when it is
    replayed. Numbers that change must come from tensors, and every batch must have the shapes of the first.
    """

    def __init__(self, generators: tuple[torch.Generator, ...]) -> None:
        self.generators = generators
        self.calls = 0
        self.side = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.taken = torch.cuda.Event()  # behind the copy of the latest batch
        self.batch: Batch
        self.names: list[str]
        self.terms: Tensor  # (terms,) of the latest replay

    def __call__(self, compute: Compute, batch: Batch) -> dict[str, Tensor]:
        if self.calls < WARM_UP:
            self.calls += 1
            return self._aside(compute, batch)
        if self.graph is None:
            self._capture(compute, batch)
        assert self.graph is not None
        for held, given in _copies(self.batch, batch):
            assert held.shape == given.shape, f"a graph of {tuple(held.shape)} was given {tuple(given.shape)}"
            held.copy_(given, non_blocking=True)
        self.taken.record()
        self.graph.replay()
        return dict(zip(self.names, self.terms.clone().unbind(), strict=True))  # a copy: the next replay overwrites it

    def _aside(self, compute: Compute, batch: Batch) -> dict[str, Tensor]:
        """On a side stream, as capturing asks of the steps before it."""
        side, current = self.side, torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            terms = compute(batch)
        current.wait_stream(side)
        torch.cuda.synchronize()  # the stream's memory may be used again at once; three times a run
        return terms

    def _capture(self, compute: Compute, batch: Batch) -> None:
        # The views lie one behind the other, so that an encoder which takes them together need not copy them.
        self.batch = Batch(batch.index.clone(), torch.cat(batch.views).chunk(len(batch.views)))
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        forget_side_streams()
        try:
            # Other threads (loggers, pinned copies) may go on with what they do. The stream is set so that it is again
            # the current one after a capture that failed.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                terms = compute(self.batch)
                self.names = list(terms)
                self.terms = torch.stack([value.detach().float() for value in terms.values()])
        except RuntimeError as error:  # also out of memory
            forget_side_streams()
            raise CaptureFailed(" ".join(str(error.__context__ or error).split())[:300]) from error
        self.graph = graph


def _copies(held: Batch, given: Batch) -> list[tuple[Tensor, Tensor]]:
    """What to copy from where; all views at once where those given lie as those held do."""
    to, of = in_one_piece(held.views), in_one_piece(given.views)
    apart = to is None or of is None
    views = list(zip(held.views, given.views, strict=True)) if apart else [(to, of)]
    return [(held.index, given.index), *views]
