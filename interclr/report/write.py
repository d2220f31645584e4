"""``report``: collect what a run shows and write it as one page that needs nothing else."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import torch

from interclr.report.collect import collect
from interclr.report.page import render
from interclr.run.files import check_writable, write_bytes, write_text
from interclr.run.folder import run_in
from interclr.screen import Screen
from interclr.types import UserError

POINTS = 5_000  # images on the map
MOST_POINTS = 20_000
CPU = torch.device("cpu")


def report(
    run_folder: str | Path,
    *,
    screen: Screen,
    out: str | Path | None = None,
    device: torch.device = CPU,
    points: int = POINTS,
    data: str | None = None,
) -> Path:
    """Write ``report.html`` of a run, into its folder unless ``out`` names a file or folder. Returns its path.

    ``out`` is a file where it ends in .html or .htm; anything else is a folder, made where there is none.

    ``points`` is the number of images embedded for the map and everything that compares images; a larger set is
    sampled. ``data`` is where the images lie that have been moved since the run. An unfinished run is shown as its
    latest checkpoint has it. The same run gives the same bytes.
    """
    folder = run_in(run_folder).folder
    if not 2 <= points <= MOST_POINTS:
        raise UserError(f"--points {points}: from 2 to {MOST_POINTS:,} images can be shown")
    target = _file_of(folder if out is None else out)
    hint = "; for a page of that name add .html" if target.parent.is_file() else ""
    check_writable(target.parent, f"choose another --out{hint}")
    content = collect(folder, points, device, screen, data)
    table = target.with_name("duplicates.csv" if target.name == "report.html" else f"{target.stem}-duplicates.csv")
    pairs = []
    if content["images"] is not None:
        pairs = content["images"].pop("duplicates")
        content["images"]["table"] = table.name
    page = render(content)
    if content["images"] is None and target.exists():
        raise UserError(
            f"{target} is left as it is: the images cannot be opened now, and it may show them (moved ones: --data)"
        )
    write_text(target, page)
    screen.say(f"report: {target} ({len(page) / 1e6:.1f} MB)")
    if pairs:
        text = io.StringIO()
        rows = [(kind, likeness, _cell(image), _cell(other)) for kind, likeness, image, other in pairs]
        # Quoted throughout: a name may hold a carriage return, which is not quoted of itself.
        writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
        writer.writerows([("kind", "likeness", "image", "other"), *rows])
        write_bytes(table, text.getvalue().encode("utf-8", "surrogateescape"))
        exact, near = (sum(found == kind for found, *_ in pairs) for kind in ("exact", "near"))
        compared, total = len(content["images"]["names"]), content["images"]["total"]
        more = f" among {compared:,} of {total:,} images; interclr data check compares up to 500,000"
        among = more if compared < total else ""
        screen.say(f"duplicates: {table} ({exact:,} exact and {near:,} near copies{among}; then what is most alike)")
    return target


def _cell(name: str) -> str:
    """The same path, but no formula to a spreadsheet."""
    return f"./{name}" if name.startswith(("=", "+", "-", "@")) else name


def _file_of(out: str | Path) -> Path:
    """Browsers show a file without their suffix as source, so only what has it is a file."""
    path = Path(out)
    named = path.suffix.lower() in (".html", ".htm") and not str(out).endswith(os.sep)
    return path if named and not path.is_dir() else path / "report.html"
