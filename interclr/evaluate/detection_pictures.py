"""What a detector does, to look at: curves of precision against recall, and a few images with their boxes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import resize
from torchvision.utils import draw_bounding_boxes, make_grid

from interclr.data.decode import decode, read_bytes
from interclr.evaluate.average_precision import Found, Truth, precision_recall
from interclr.evaluate.plots import figure
from interclr.evaluate.voc_boxes import BoxedSet

IMAGES = 8
TILE = 400  # pixels
SHOWN = 0.5  # score from which a detection is drawn
TRUE, GUESS = "white", "orangered"


def draw_curves(
    path: Path,
    truth: Sequence[Truth],
    found: Sequence[Found],
    classes: Sequence[str],
    ap50: Sequence[float],
    losses: Sequence[tuple[float, float]],
) -> None:
    """Every class at IoU .5 by VOC's rules, beside the loss of the training."""
    with figure(path, columns=2, width=7.5, height=5.5) as (left, right):
        colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(classes)))
        for label, name in enumerate(classes):
            curve = precision_recall(truth, found, label)
            if curve is not None:
                shown = name.replace("$", r"\$")
                left.plot(*curve, color=colours[label], linewidth=1.2, label=f"{shown} {100 * ap50[label]:.1f}")
        left.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision", title="IoU .50, AP50 of each class")
        if len(classes) <= 40:
            left.legend(fontsize=7, ncols=1 + len(classes) // 20, loc="lower left")
        right.plot([at for at, _ in losses], [loss for _, loss in losses])
        right.set(xlabel="iteration", ylabel="training loss", title="training")


def draw_detections(path: Path, data: BoxedSet, found: Sequence[Found]) -> None:
    """Images spread evenly over the set: true boxes white, detections over ``SHOWN`` in colour with their score."""
    chosen = np.unique(np.linspace(0, len(data.images) - 1, min(IMAGES, len(data.images))).round().astype(int))
    tiles = [_tile(data, int(i), found[i]) for i in chosen]
    grid = make_grid(tiles, nrow=4, padding=4, pad_value=255)
    Image.fromarray(grid.permute(1, 2, 0).numpy()).save(path)


def _tile(data: BoxedSet, index: int, found: Found) -> Tensor:
    image = data.images[index]
    pixels = decode(read_bytes(str(image.path), image.name), image.name)
    scale = TILE / max(pixels.shape[1:])
    height, width = (max(1, round(side * scale)) for side in pixels.shape[1:])
    canvas = torch.full((3, TILE, TILE), 255, dtype=torch.uint8)
    canvas[:, :height, :width] = resize(pixels, [height, width])
    if len(image.boxes):
        canvas = draw_bounding_boxes(canvas, torch.from_numpy(image.boxes) * scale, colors=TRUE, width=1)
    sure = np.flatnonzero(found.scores >= SHOWN)
    if len(sure):
        words = [f"{data.classes[found.labels[i]]} {found.scores[i]:.2f}" for i in sure]
        canvas = draw_bounding_boxes(
            canvas,
            torch.from_numpy(found.boxes[sure].astype(np.float32)) * scale,
            labels=[word.encode("ascii", "replace").decode() for word in words],
            colors=GUESS,
            label_colors="white",
            label_background_colors=GUESS,
            width=2,
        )
    return canvas
