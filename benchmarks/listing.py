"""How long a folder of a million images takes to list, first and from the cache.

    python benchmarks/listing.py [files] [folders]

Makes empty files in a temporary folder: listing reads names only. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Time how long a large folder takes to list.")
    parser.add_argument("files", type=int, nargs="?", default=1_000_000)
    parser.add_argument("folders", type=int, nargs="?", default=1_000)
    given = parser.parse_args()
    files, folders = given.files, given.folders
    with tempfile.TemporaryDirectory() as place:
        os.environ["INTERCLR_CACHE"] = str(Path(place) / "cache")
        root = Path(place) / "images"
        for number in range(folders):
            folder = root / f"class{number:04d}"
            folder.mkdir(parents=True)
            for image in range(files // folders):
                os.close(os.open(folder / f"{image:06d}.jpg", os.O_CREAT | os.O_WRONLY))
        time.sleep(3)  # folders that changed in the last two seconds are not cached

        from interclr.data.builtin import open_source

        times = []
        for _ in range(4):
            started = time.perf_counter()
            count = len(open_source(str(root)))
            times.append(round(time.perf_counter() - started, 3))
        print(json.dumps({"files": count, "folders": folders, "first_seconds": times[0], "cached_seconds": times[1:]}))


if __name__ == "__main__":
    main()
