"""What the page finds in the images as figures for papers: map, clusters, near-duplicates, outliers. PNG and SVG."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import hsv_to_rgb

from interclr.data.copies import near_copies
from interclr.evaluate.plots import draw_tile, figure
from interclr.labels import clustered_bank
from interclr.report import findings
from interclr.report.collect import open_gallery, sampled, training_source
from interclr.report.embedding_map import flatten
from interclr.report.gallery import Gallery
from interclr.run.folder import run_in
from interclr.screen import Screen
from interclr.types import UserError

KINDS = ("map", "clusters", "duplicates", "outliers")
IMAGES = 2_500  # that are compared, at the side that thumbnails have for so many
CLUSTERS = 4  # of each order
PAIRS_A_LINE, OUTLIERS_A_LINE = 4, 9
MOST_NAMED = 20  # classes in a legend
GAP = 0.34  # above a tile, for its text


@dataclass(frozen=True)
class Line:
    """Pictures side by side, with a text above each and one before them. A gap is where the position is None."""

    tiles: list[tuple[int | None, str]]
    title: str = ""


def plot_found(
    kind: str,
    run_folder: str | Path,
    out: str | Path,
    *,
    device: torch.device,
    screen: Screen,
    data: str | None = None,
    seed: int = 0,
) -> None:
    """``kind`` is one of ``KINDS``. Of a larger set a sample is compared, another one for another ``seed``.

    ``data`` are other images than the run's own, or those where they lie now.
    """
    run = run_in(run_folder)
    settings = run.settings
    source, _ = training_source(run, settings.data.at(data), None)
    gallery = open_gallery(run.folder, source, sampled(len(source), IMAGES, seed), settings, device, screen)
    if kind == "map":
        return _draw_map(gallery, Path(out), screen)
    _draw_lines(
        gallery, {"clusters": clusters, "duplicates": duplicates, "outliers": outliers}[kind](gallery), Path(out)
    )


def clusters(gallery: Gallery) -> list[Line]:
    found = findings.clusters(clustered_bank(gallery.features), gallery.labels())
    names, lines = gallery.source.classes or (), []
    for order, picked in found["orders"].items():
        for number, cluster in enumerate(picked[:CLUSTERS]):
            entry = found["shown"][str(cluster)]
            about = f"{entry['size']} images"
            if "purity" in entry:
                name = str(names[entry["classes"][0][0]]) if names else "one class"
                about += f"\n{100 * entry['purity']:.0f} % {name}"
            title = f"{order}\n{about}" if number == 0 else about
            lines.append(Line([(member, "") for member in entry["members"]], title))
    return lines


def duplicates(gallery: Gallery) -> list[Line]:
    pairs = [(group["images"][:2], "equal") for group in findings.exact_duplicates(gallery.digests)["shown"]]
    near = findings.closest(near_copies(torch.stack(gallery.tiny), gallery.digests))["shown"]
    pairs += [(pair["images"], f"{pair['likeness']:.3f}") for pair in near]
    if not pairs:
        raise UserError(f"no two of the {len(gallery):,} images compared are equal or nearly so: nothing to draw")
    lines = []
    for start in range(0, len(pairs), PAIRS_A_LINE):
        tiles: list[tuple[int | None, str]] = []
        for (one, other), text in pairs[start : start + PAIRS_A_LINE]:
            tiles += [*([(None, "")] if tiles else []), (one, text), (other, "")]
        lines.append(Line(tiles))
    return lines


def outliers(gallery: Gallery) -> list[Line]:
    found = findings.outliers(findings.neighbours(gallery.features)[0])
    tiles: list[tuple[int | None, str]] = [(entry["image"], f"{entry['cosine']:.2f}") for entry in found]
    return [Line(tiles[start : start + OUTLIERS_A_LINE]) for start in range(0, len(tiles), OUTLIERS_A_LINE)]


def _draw_lines(gallery: Gallery, lines: list[Line], out: Path) -> None:
    before = 2.0 if any(line.title for line in lines) else 0.0
    width = before + max(len(line.tiles) for line in lines)
    with figure(out, width=0.86 * width + 0.3, height=0.86 * (1 + GAP) * len(lines) + 0.3) as (axes,):
        for number, line in enumerate(lines):
            y = number * (1 + GAP)
            axes.text(before - 0.15, y + 0.5, line.title, ha="right", va="center", fontsize=9)
            for place, (position, text) in enumerate(line.tiles):
                if position is not None:
                    draw_tile(axes, np.asarray(gallery.squares[position]), before + place, y, text)
        axes.set_xlim(-0.05, width + 0.05)
        axes.set_ylim(len(lines) * (1 + GAP) - GAP, -0.3)
        axes.set_aspect("equal")
        axes.axis("off")


def _draw_map(gallery: Gallery, out: Path, screen: Screen) -> None:
    places, method = flatten(gallery.features.numpy(), screen)
    labels, names = gallery.labels(), gallery.source.classes
    groups = clustered_bank(gallery.features).labels if labels is None else labels
    with figure(out, width=6.4, height=6.4) as (axes,):
        shown = sorted(set(groups.tolist()))
        for number, group in enumerate(shown):
            own = groups == group
            label = None if labels is None or names is None or group < 0 else str(names[group])
            colour = "0.7" if group < 0 else hsv_to_rgb((number / len(shown), 0.75, 0.85))
            x, y = places[own.numpy()].T
            axes.scatter(x, y, s=min(24, max(4, 8_000 / len(gallery))), color=colour, linewidths=0, label=label)
        by = "cluster" if labels is None else "label"
        axes.set_title(f"{method} of {len(gallery):,} images, coloured by {by}", fontsize=10, loc="left")
        axes.set_aspect("equal")
        axes.axis("off")
        if labels is not None and names is not None and len(shown) <= MOST_NAMED:
            axes.figure.legend(loc="outside lower center", ncols=5, markerscale=3, fontsize=9, handletextpad=0.1)
