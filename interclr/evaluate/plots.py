"""Figures without a display: drawn by Agg, kept as PNG for looking and SVG for papers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from numpy.typing import NDArray

from interclr.run.files import replacing
from interclr.types import printable

STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "interclr",  # the same figure gives the same file
}


@contextmanager
def figure(
    path: Path, columns: int = 1, width: float = 6.4, height: float = 4.2, rows: int = 1
) -> Iterator[list[Axes]]:
    """Draw on ``columns`` axes side by side, in ``rows`` rows, each ``width`` by ``height`` inches.

    ``path`` without its suffix becomes a ``.png`` and a ``.svg``.

    No pyplot, so there is no global state, nothing to close, and threads do not meet.
    """
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(width * columns, height * rows), layout="constrained")
        FigureCanvasAgg(drawn)
        yield list(drawn.subplots(rows, columns, squeeze=False).flat)
        for text in drawn.findobj(Text):
            assert isinstance(text, Text)
            text.set_text(printable(text.get_text()))  # names of folders and classes need not be UTF-8
        with replacing(path.with_suffix(".png")) as temporary:
            drawn.savefig(temporary, format="png", dpi=150)
        with replacing(path.with_suffix(".svg")) as temporary:
            drawn.savefig(temporary, format="svg", metadata={"Date": None})


def draw_tile(axes: Axes, picture: NDArray[Any], x: float, y: float, text: str, frame: str | None = None) -> None:
    """A picture (S, S, 3) in the unit square whose upper left corner is (x, y), a text above it, a frame around."""
    inset = 0.04
    axes.imshow(picture, extent=(x + inset, x + 1 - inset, y + 1 - inset, y + inset), interpolation="nearest")
    if frame is not None:
        side = 1 - 2 * inset
        axes.add_patch(Rectangle((x + inset, y + inset), side, side, fill=False, edgecolor=frame, linewidth=2.4))
    if text:
        axes.text(x + 0.5, y - 0.01, text, ha="center", va="bottom", fontsize=8)
