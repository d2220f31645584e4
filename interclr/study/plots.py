"""The paper's t-SNE of several runs side by side, and their curves. PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from sklearn.manifold import TSNE

from interclr.data.canvas import on_canvas
from interclr.evaluate.plots import figure
from interclr.run.folder import Run
from interclr.study.figures import keep_to_percent
from interclr.study.subjects import CPU, check_runs, choose, names_of, open_run, titles, training_images
from interclr.types import Images, UserError

CURVES = {
    "loss": "loss",
    "knn": "k-NN, %",
    "lr": "learning rate",
    "rank_me": "RankMe",
    "uniformity": "uniformity",
    "alignment": "alignment",
    "cluster_entropy": "cluster entropy",
    "cluster_median": "images of the median cluster",
    "cluster_max": "images of the largest cluster",
    "nmi": "NMI of clusters and classes",
    "labels_changed": "share of labels changed in a step",
}


def plot_tsne(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    classes: int = 6,
    images: int = 4,
    views: int = 8,
    data: str | None = None,
    seed: int = 0,
    device: torch.device = CPU,
) -> None:
    """``images`` of each of ``classes`` in ``views`` random views each, side by side for the ``runs``.

    Colours are classes, numbers are images: equal colour and number is one image. Without labels every image has its
    own colour. The images and their views are the first run's for all, prepared as each run prepares its own.
    """
    check_runs(runs)
    subjects = [open_run(run, device) for run in runs]
    source = training_images(subjects[0].settings, data)
    groups = choose(source, classes, images, seed)
    if not groups[0]:
        raise UserError(f"no image of {source.name} can be read (find out why with: interclr data check)")
    pixels, size = on_canvas([source.read(row) for group in groups for row in group])
    batch = Images(torch.arange(len(pixels)), pixels, size)
    labels = source.labels
    with figure(Path(out), columns=len(subjects), width=4.6, height=4.8) as panels:
        for axes, subject, name in zip(panels, subjects, names_of(subjects), strict=True):
            features = subject.embed_views(batch, views, seed).numpy()
            perplexity = max(2.0, min(30.0, (len(features) - 1) / 3))
            places = TSNE(metric="cosine", init="pca", perplexity=perplexity, random_state=seed).fit_transform(features)
            _draw_numbers(axes, places, groups, views, labels is not None)
            axes.set_title(name)
        if labels is not None and source.classes is not None:
            for number, group in enumerate(groups):
                panels[0].plot([], [], "s", color=f"C{number % 10}", label=source.classes[int(labels[group[0]])])
            columns = min(3 * len(runs), len(groups))
            panels[0].figure.legend(loc="outside lower center", ncols=columns, fontsize=10, handletextpad=0.1)


def _draw_numbers(
    axes: Axes, places: np.ndarray[Any, Any], groups: list[list[int]], views: int, labelled: bool
) -> None:
    axes.scatter(places[:, 0], places[:, 1], s=0)  # sets the limits; text does not
    image = 0
    for number, group in enumerate(groups):
        for within in range(len(group)):
            colour = f"C{(number if labelled else within) % 10}"
            for x, y in places[image * views : (image + 1) * views]:
                axes.text(x, y, str(within + 1), color=colour, fontsize=8, ha="center", va="center", clip_on=True)
            image += 1
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)
    for spine in axes.spines.values():
        spine.set_color("0.7")


def plot_curves(runs: Sequence[str | Path], out: str | Path) -> None:
    """What ``metrics.jsonl`` holds of several runs, over epochs: every known figure that some run has."""
    check_runs(runs)
    folders = [Path(run) for run in runs]
    for folder in folders:
        if not (folder / "metrics.jsonl").is_file():
            raise UserError(f"{folder} is not a run folder: it has no metrics.jsonl")
    records = [Run(folder).metrics for folder in folders]
    present = {name for lines in records for line in lines for name in line if isinstance(line[name], int | float)}
    names = [name for name in CURVES if name in present]
    if not names:
        raise UserError("these runs have not logged anything yet")
    columns = min(3, len(names))
    with figure(Path(out), columns=columns, width=4.2, height=3.0, rows=-(-len(names) // columns)) as panels:
        for axes, name in zip(panels, names, strict=False):
            for number, lines in enumerate(records):
                points = [(line["epoch"], line[name]) for line in lines if name in line]
                if name == "knn":
                    points = [(line["epoch"], line["knn_before"]) for line in lines if "knn_before" in line] + points
                if points:
                    axes.plot(*zip(*points, strict=True), color=f"C{number % 10}", marker="o" * (len(points) == 1))
            keep_to_percent(axes, name)
            axes.set_title(CURVES[name], fontsize=11)
            axes.set_xlabel("epoch")
        for axes in panels[len(names) :]:
            axes.axis("off")
        if len(runs) > 1:
            for number, title in enumerate(titles(folders)):
                panels[0].plot([], [], color=f"C{number % 10}", label=title)
            panels[0].figure.legend(loc="outside lower center", ncols=min(4, len(runs)))
