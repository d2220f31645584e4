"""What tests of the session and its subjects share: a small run, labelled images, one call."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from interclr.data.synthetic import generate
from interclr.evaluate import PROTOCOLS, Request, evaluate
from interclr.screen import Screen

QUIET = Screen(quiet=True)
TINY = ["data.source=synthetic:160", "data.batch=32", "model.width=8", "schedule.epochs=1", "engine.device=cpu"]


def measure(names: list[str], subject: str, *overrides: str, **more: object) -> dict[str, dict[str, float]]:
    return evaluate(names, PROTOCOLS, Request(subject, **more), list(overrides), QUIET)  # type: ignore[arg-type]


def class_folder(folder: Path, images: int = 80) -> Path:
    pixels, labels = generate(images, seed=3)
    for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        (folder / f"class{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"class{label}" / f"{number}.png")
    return folder
