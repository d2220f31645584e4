"""Runs and pages for the report's tests."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_runs import INTER, tiny, train

from interclr.report import report
from interclr.report.thumbnails import sheets, side_for
from interclr.screen import Screen

HOSTILE = "<script>alert(1)<%2fscript>.png"  # a file name cannot hold a slash
HOSTILE_NAMES = (HOSTILE, '"><img src=x onerror=alert(1)>.png', "'-alert(1)-'&amp;\u2028.png", "{{content}}.png")
HOSTILE_CLASS = "<b>class<b>"


def content_of(page: str) -> dict[str, Any]:
    """What the page carries about its run."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found.group(1)))


def made(folder: Path, **options: Any) -> dict[str, Any]:
    return content_of(report(folder, screen=Screen(quiet=True), **options).read_text())


def inter_run(folder: Path, *overrides: str) -> Path:
    train(tiny(*INTER, *overrides), folder)
    return folder


def picture_folder(folder: Path, names: list[str], side: int = 32) -> Path:
    """A picture of noise over a colour for each name."""
    generator = np.random.default_rng(0)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = (generator.integers(0, 200, 3) + generator.integers(0, 56, (side, side, 3))).astype(np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def hostile_folder(folder: Path) -> Path:
    """24 images in two classes whose names are markup."""
    names = [f"{HOSTILE_CLASS}/{name}" for name in HOSTILE_NAMES]
    names += [f"{HOSTILE_CLASS if i % 2 else 'plain'}/{i:02d}.png" for i in range(20)]
    return picture_folder(folder, names)


def many_points(content: dict[str, Any], count: int) -> dict[str, Any]:
    """The same report with ``count`` random points on the map, as a run on many images would have."""
    generator = np.random.default_rng(0)

    def packed(values: Any, kind: str) -> str:
        return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode()

    images = dict(content["images"])
    side = side_for(count)
    noise = Image.fromarray(generator.integers(0, 255, (side, side, 3), dtype=np.uint8))
    k = images["neighbours"]["k"]
    images |= {
        "count": count,
        "total": count,
        "names": [f"set/{i:05d}.jpg" for i in range(count)],
        "label": packed(generator.integers(0, 10, count), "<i4"),
        "cluster": packed(generator.integers(0, 400, count), "<i4"),
        "thumbnails": sheets([noise] * count, side),
        "map": {
            "method": "t-SNE",
            "image": packed(np.arange(count), "<i4"),
            "position": packed(generator.normal(0, 0.3, (count, 2)).clip(-1, 1), "<f4"),
        },
        "neighbours": {
            "k": k,
            "image": packed(generator.integers(0, count, (count, k)), "<i4"),
            "cosine": packed(generator.random((count, k)), "<f4"),
        },
    }
    return content | {"images": images}


def numbers(text: str, kind: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), dtype=kind)


def picture(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def unit(rows: list[list[float]]) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.tensor(rows), dim=1)
