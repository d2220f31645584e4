"""A VOCdevkit of tiny images: one or two coloured rectangles on a grey ground, some of them difficult."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"bird": (220, 30, 30), "cat": (30, 200, 30), "dog": (40, 40, 230)}
WIDTH, HEIGHT = 64, 48


def write_annotation(
    year: Path, name: str, objects: list[tuple[str, tuple[float, ...], bool]], size: tuple[int, int] = (WIDTH, HEIGHT)
) -> None:
    """Boxes are VOC's: xmin, ymin, xmax, ymax, 1-based and inclusive."""
    body = "".join(
        f"<object><name>{label}</name><difficult>{int(hard)}</difficult><bndbox><xmin>{box[0]}</xmin>"
        f"<ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"
        for label, box, hard in objects
    )
    extent = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    (year / "Annotations" / f"{name}.xml").write_text(f"<annotation>{extent}{body}</annotation>")


def write_year(year: Path, lists: dict[str, int], seed: int = 0) -> Path:
    """``lists`` maps the name of a list to how many images it has."""
    random = np.random.default_rng(seed)
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (year / folder).mkdir(parents=True, exist_ok=True)
    labels = list(COLOURS)
    number = 0
    for list_name, count in lists.items():
        names = []
        for _ in range(count):
            pixels = np.full((HEIGHT, WIDTH, 3), 120, dtype=np.uint8)
            objects = []
            for half in range(int(random.integers(1, 3))):
                label = labels[int(random.integers(len(labels)))]
                width, height = int(random.integers(14, 26)), int(random.integers(14, 34))
                left = 32 * half + int(random.integers(0, 32 - width))
                top = int(random.integers(0, HEIGHT - height))
                pixels[top : top + height, left : left + width] = COLOURS[label]
                objects.append((label, (left + 1, top + 1, left + width, top + height), bool(random.random() < 0.1)))
            names.append(f"{number:06d}")
            number += 1
            Image.fromarray(pixels).save(year / "JPEGImages" / f"{names[-1]}.jpg", quality=95)
            write_annotation(year, names[-1], objects)
        (year / "ImageSets" / "Main" / f"{list_name}.txt").write_text("\n".join(names) + "\n")
    return year
