"""What the tests of the CIFAR-10 pages share: records with known figures, and the pages that are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cifar10_scripts import page, plan_of


def record(name: str, seed: int, knn: float, group: str = "main", **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "group": group,
        "name": name,
        "seed": seed,
        "overrides": [],
        "note": "",
        "from": None,
        "commit": "0123456789abcdef",
        "date": "2026-11-15T12:00:00+00:00",
        "versions": {"torch": "2.11"},
        "machine": "GPU",
        "jobs": 2,
        "settings": {
            "data": {"hold_out": 0 if group == "main" else 5000},
            "schedule": {"epochs": 200},
            "inter": {"clusters": 9} if name.endswith("-interclr") else None,
            "method": {"name": "npidv2" if name.startswith("npidv2") else "mocov2"},
            "optimiser": {"base_lr": 0.06},
            "model": {},
            "views": [],
        },
        "measured_on": "test" if group == "main" else "held-out",
        "figures": {"knn": knn, "knn_k": 200, "knn_temperature": 0.1},
        "seconds": 100.0 + seed,
        "compile_seconds": 20.0,
        "images_per_second": 20_000.0,
        "peak_memory_bytes": 3_500_000_000,
        "epochs": [{"epoch": 0, "knn_before": 30.0}, {"epoch": 100, "knn": knn - 5}, {"epoch": 200, "knn": knn}],
    }
    made |= more
    if "error" in made:
        del made["figures"]
    return made


METHODS = [f"{method}{branch}" for method in ("npidv2", "mocov2", "byol") for branch in ("", "-interclr")]
PLANNED = {"main": METHODS, "choices": ["mocov2", "mocov2-interclr"]}


def page_of(folder: Path, records: list[dict[str, Any]], **more: dict[str, Any]) -> str:
    """Both pages, one behind the other; ``more`` is what the plan says of its groups beyond runs."""
    for made in records:
        path = folder / "records" / made["group"] / f"{made['name']}-s{made['seed']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made))
    runs = {group: {name: {"recipe": "cifar10-byol"} for name in names} for group, names in PLANNED.items()}
    pages = {"main": "results", "choices": "choices"}
    plan = plan_of(
        folder,
        {
            group: {"about": f"About {group}.\n", "runs": named, "page": pages[group]} | more.get(group, {})
            for group, named in runs.items()
        },
    )
    words = ["--plan", str(plan), "--records", str(folder / "records"), "--page", str(folder / "docs" / "results.md")]
    assert page.main(words) == 0
    assert page.main([*words, "--check"]) == 0
    return (folder / "docs" / "results.md").read_text() + (folder / "docs" / "results-choices.md").read_text()


def cells(text: str, first: str) -> list[list[str]]:
    """The rows of all tables that begin with ``first``."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] == first]
