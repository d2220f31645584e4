"""A VOC devkit of tiny JPEGs whose classes are colours; some are marked difficult."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"blue": (0, 0, 220), "green": (0, 220, 0), "red": (220, 0, 0)}


def make(root: Path, count: int = 36, seed: int = 0, lists: bool = True) -> Path:
    """``root/VOCdevkit/VOC2007`` with trainval and test of ``count`` images each; returns the devkit."""
    random = np.random.default_rng(seed)
    year = root / "VOCdevkit" / "VOC2007"
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (year / folder).mkdir(parents=True)
    for first, split in ((0, "trainval"), (count, "test")):
        identifiers = [f"{first + number:06d}" for number in range(count)]
        (year / f"ImageSets/Main/{split}.txt").write_text("\n".join(identifiers) + "\n")
        signs: dict[str, list[str]] = {name: [] for name in COLOURS}
        for number, identifier in enumerate(identifiers):
            pixels = np.full((24, 30, 3), 60, dtype=np.uint8) + random.integers(0, 40, (24, 30, 3), dtype=np.uint8)
            objects = []
            for column, (name, colour) in enumerate(COLOURS.items()):
                sign = -1
                if random.random() < 0.4 or number == column:
                    pixels[4:20, 10 * column : 10 * column + 8] = colour
                    hard = [bool(random.random() < 0.3) and number != column for _ in range(random.integers(1, 3))]
                    sign = 0 if all(hard) else 1
                    objects += [f"<object><name>{name}</name><difficult>{int(h)}</difficult></object>" for h in hard]
                signs[name].append(f"{identifier} {sign:2d}")
            Image.fromarray(pixels).save(year / f"JPEGImages/{identifier}.jpg", quality=95)
            (year / f"Annotations/{identifier}.xml").write_text(f"<annotation>{''.join(objects)}</annotation>")
        if lists:
            for name, lines in signs.items():
                (year / f"ImageSets/Main/{name}_{split}.txt").write_text("\n".join(lines) + "\n")
    return root / "VOCdevkit"
