"""Small pictures of images: sheets of many for the map, single ones where a person looks closely."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

PER_SHEET = 2_500
SHEETS_BUDGET = 9_000_000  # characters of all sheets together
QUALITIES = (85, 75, 65, 50, 35, 20)
SINGLE_SIDE = 96
SINGLE_QUALITY = 80


def side_for(count: int) -> int:
    """How large the thumbnails of a map can be, so that the page stays small."""
    return 64 if count <= 2_500 else 48 if count <= 6_000 else 32 if count <= 12_000 else 28


def square(pixels: Tensor, side: int) -> Image.Image:
    """The central square of (3, h, w) uint8 pixels, shrunk to ``side``; a smaller image is enlarged by whole pixels."""
    image = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).cpu().numpy()))
    enlarge = min(image.size) < side
    method = Image.Resampling.NEAREST if enlarge else Image.Resampling.BOX
    return ImageOps.fit(image, (side, side), method)


def sheets(squares: Sequence[Image.Image], side: int) -> dict[str, Any]:
    """All squares, row by row, on JPEG sheets that together stay below the budget."""
    columns = max(1, min(50, len(squares)))
    pages = []
    for start in range(0, len(squares), PER_SHEET):
        part = squares[start : start + PER_SHEET]
        page = Image.new("RGB", (columns * side, -(-len(part) // columns) * side))
        for i, image in enumerate(part):
            page.paste(image, (i % columns * side, i // columns * side))
        pages.append(page)
    encoded: list[str] = []
    for quality in QUALITIES:
        encoded = [data_uri(page, quality) for page in pages]
        if sum(map(len, encoded)) <= SHEETS_BUDGET:
            break
    return {"side": side, "columns": columns, "perSheet": PER_SHEET, "sheets": encoded}


def data_uri(image: Image.Image, quality: int = SINGLE_QUALITY) -> str:
    buffer = io.BytesIO()
    detail = 0 if quality >= QUALITIES[1] else 2  # of colour: small pictures suffer from halving it
    image.save(buffer, "JPEG", quality=quality, subsampling=detail)  # optimize=True fails on large noise
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
