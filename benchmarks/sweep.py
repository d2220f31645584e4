"""Run several settings beside each other on one machine and print a table: how defaults are chosen.

python benchmarks/sweep.py OUT RECIPE --jobs 8 -- "method.momentum=0.9" "method.momentum=0.99 data.batch=128"
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def run(folder: Path, recipe: str, overrides: str, common: list[str], jobs: int) -> dict[str, object]:
    name = overrides.replace(" ", "_").replace("/", "-") or "as-is"
    out = folder / f"{recipe}@{name}"
    command = [sys.executable, "-m", "interclr.cli", "pretrain", recipe, *common, *overrides.split(), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    result = out / "result.json"
    if done.returncode or not result.exists():
        return {"recipe": recipe, "overrides": overrides, "error": done.stderr.strip()[-400:]}
    typed = shlex.join(["interclr", "pretrain", recipe, *common, *overrides.split()])
    return (
        {"recipe": recipe, "overrides": overrides} | json.loads(result.read_text()) | {"command": typed, "jobs": jobs}
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("recipes", help="one or more, with commas")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--common", default="", help="overrides for every run")
    parser.add_argument("overrides", nargs="*", default=[""])
    given = parser.parse_intermixed_args()
    jobs = [(recipe, text) for recipe in given.recipes.split(",") for text in given.overrides]
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(lambda job: run(given.out, *job, given.common.split(), given.jobs), jobs))
    for row in rows:
        if "error" in row:
            print(f"{row['recipe']} {row['overrides']}: {row['error']}")
        else:
            figures = "  ".join(
                f"{key} {row[key]:.2f}" for key in ("knn_before", "knn", "purity", "rank_me", "seconds") if key in row
            )
            print(f"{row['recipe']} {row['overrides']}: {figures}")
    (given.out / "sweep.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
