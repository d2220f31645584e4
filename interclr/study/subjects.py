"""A trained run opened for pictures: its network, its images in the order of its memory bank, what to call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interclr.config import Settings
from interclr.data.canvas import Canvas
from interclr.data.hold_out import split_off
from interclr.data.reading import read_or_reason
from interclr.data.source import Source, UnreadableImage
from interclr.data.stream import in_order
from interclr.data.views import Views, centre_crop
from interclr.engine.dataset import TrainingData, open_training_source, prepare
from interclr.features import embed_all
from interclr.run import checkpoint
from interclr.run.folder import Run, load, run_in
from interclr.screen import Screen
from interclr.study.plan import what_is_computed
from interclr.study.worker import CELL
from interclr.types import Images, UserError

BATCH = 256
MOST_WORDS = 3  # of what differs, in a title
LONGEST_WORD = 24
CPU = torch.device("cpu")


@dataclass
class Subject:
    """A run, its network, and the images it was trained on in the order of its memory bank."""

    folder: Path
    settings: Settings
    network: nn.Module
    device: torch.device

    def embed(self, images: Canvas | Source) -> Tensor:
        """Normalised features (N, F), centre-cropped."""
        return F.normalize(embed_all(self.network, in_order(images, self.device, BATCH), self._crop), dim=1)

    def embed_views(self, images: Images, views: int, seed: int) -> Tensor:
        """Features of ``views`` random views of each image, (N · views, F), the views of an image together."""
        size, data = int(self.settings.data.image_size), self.settings.data
        many = torch.arange(len(images)).repeat_interleave(views)
        repeated = Images(many, images.pixels[many], None if images.size is None else images.size[many])
        make = Views(self.settings.views[:1], size, data.mean, data.std)
        batch = make(repeated.to(self.device), torch.Generator(self.device).manual_seed(seed)).views[0]
        with torch.no_grad():
            return F.normalize(torch.cat([self.network(part) for part in batch.split(BATCH)]), dim=1).cpu()

    def _crop(self, batch: Images) -> Tensor:
        data = self.settings.data
        return centre_crop(batch, int(data.image_size), data.mean, data.std)


def open_run(path: str | Path, device: torch.device = CPU) -> Subject:
    run = run_in(path)
    return Subject(run.folder, run.settings, load(run.folder).to(device), device)


def state_of_run(folder: Path) -> checkpoint.State:
    found = checkpoint.load_latest(folder / "checkpoint")
    if found is None:
        raise UserError(f"{folder} has no checkpoint: this picture needs more than the backbone")
    return found[0]


def training_data(settings: Settings, data: str | None = None) -> TrainingData:
    """The training images as the run numbered them, and the labelled queries it was measured on."""
    config = settings.data.at(data)
    return prepare(open_training_source(config), config, CPU, Screen(quiet=True))


def training_images(settings: Settings, data: str | None = None) -> Source:
    """The training images without decoding them: for pictures of a few. The unreadable are still among them."""
    config = settings.data.at(data)
    source = open_training_source(config)
    return split_off(source, config.hold_out)[0] if config.hold_out else source


def names_of(subjects: Sequence[Subject]) -> list[str]:
    """What the paper calls them, by their λ; by folder where that does not tell them apart."""
    names = []
    for subject in subjects:
        inter = subject.settings.inter
        weight = 1.0 if inter is None else inter.intra_weight
        names.append({1.0: "Intra-image only", 0.0: "Inter-image only"}.get(weight, "Intra- & inter-image"))
    return names if len(set(names)) == len(names) else titles([subject.folder for subject in subjects])


def titles(folders: Sequence[Path]) -> list[str]:
    """The last parts of paths, as few as tell them apart; of a study's cells, named by a hash, what they vary."""
    paths = _apart(folders)
    settled = [folder for folder in folders if (folder / "resolved.yaml").exists()]
    cells = [folder for folder in settled if (folder / CELL).exists()]
    compared = settled if len(cells) == 1 else cells
    try:
        varied = differences([what_is_computed(Run(folder).settings) for folder in compared])
    except UserError:  # settings of another version: a picture needs no more than names
        return paths
    words = {folder: _words(varied, compared.index(folder)) for folder in cells} if varied else {}
    names = [words.get(folder, path) for folder, path in zip(folders, paths, strict=True)]
    return names if len(set(names)) == len(names) else paths


def differences(trees: Sequence[Any], key: str = "") -> dict[str, list[Any]]:
    """The values of the dotted keys in which ``trees`` differ; of components with other names only the names."""
    if all(tree == trees[0] for tree in trees):
        return {}
    if all(isinstance(tree, list) and len(tree) == len(trees[0]) for tree in trees):
        trees = [{str(place): value for place, value in enumerate(tree)} for tree in trees]
    if not all(isinstance(tree, dict) for tree in trees):
        return {key: list(trees)}
    names = [tree.get("name") for tree in trees]
    if len(set(names)) > 1:
        return {key: names}
    keys = dict.fromkeys(part for tree in trees for part in tree)
    below = [differences([tree.get(part) for tree in trees], f"{key}.{part}".removeprefix(".")) for part in keys]
    return {name: values for found in below for name, values in found.items()}


def _words(varied: dict[str, list[Any]], which: int) -> str:
    words = [f"{key}={_short(values[which])}" for key, values in varied.items()]
    return "\n".join(words[:MOST_WORDS]) + " …" * (len(words) > MOST_WORDS)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("name", "…"))
    text = f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
    return text if len(text) <= LONGEST_WORD else f"{text[:LONGEST_WORD]}…"


def _apart(folders: Sequence[Path]) -> list[str]:
    parts = [folder.parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def choose(source: Source, classes: int, images: int, seed: int) -> list[list[int]]:
    """Rows by class, the classes with the most images first; without labels one group of all. Each can be read."""
    generator = torch.Generator().manual_seed(seed)
    if source.labels is None or bool((source.labels < 0).all()):
        rows = torch.randperm(len(source), generator=generator)
        return [_readable(source, rows, classes * images)]
    counts = torch.bincount(source.labels[source.labels >= 0])
    groups = []
    for label in counts.sort(descending=True, stable=True).indices[:classes].sort().values.tolist():
        rows = (source.labels == label).nonzero().flatten()
        if len(rows):
            groups.append(_readable(source, rows[torch.randperm(len(rows), generator=generator)], images))
    return [group for group in groups if group] or [[]]


def _readable(source: Source, rows: Tensor, count: int) -> list[int]:
    """The first ``count`` of ``rows`` that can be read."""
    found = (row for row in rows.tolist() if not isinstance(read_or_reason(source, row), UnreadableImage))
    return list(islice(found, count))


def check_runs(runs: Sequence[str | Path]) -> None:
    if not runs:
        raise UserError("name one run folder or more")
