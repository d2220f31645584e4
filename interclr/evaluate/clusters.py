"""How well clusters agree with the true classes: the run's own clusters, or k-means of the features."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from interclr.data.source import Source
from interclr.data.subset import Subset, readable_part
from interclr.evaluate.base import Context, Evaluation, LabelledData, Subject, features_of
from interclr.evaluate.plots import figure
from interclr.evaluate.requested import Request, Requested
from interclr.health import agreement
from interclr.labels import kmeans
from interclr.run import checkpoint
from interclr.run.files import save_tensors
from interclr.run.folder import Run
from interclr.screen import Screen
from interclr.types import UserError

LARGEST = 12  # clusters whose composition is drawn
MATCHED = 4000  # classes up to which clusters are matched to them: the work grows with their cube
PLUS_PLUS = 1000  # k-means++ up to this many clusters: it takes k passes


def cluster_scores(clusters: Tensor, labels: Tensor) -> dict[str, float]:
    """NMI (arithmetic mean of the entropies), adjusted Rand index and purity, each at most 1.

    Where there are as many clusters as classes, and no more than 4,000, also ``accuracy`` in percent under the best
    one-to-one matching of clusters to classes. Images with label −1 are left out.
    """
    known = (labels >= 0).cpu()
    if not bool(known.any()):
        raise UserError("no image has a label: clusters cannot be compared with classes")
    _, clusters = clusters.cpu()[known].unique(return_inverse=True)
    _, labels = labels.cpu()[known].unique(return_inverse=True)
    scores = agreement(clusters, labels)
    figures = {
        "nmi": scores["nmi"],
        "ari": float(adjusted_rand_score(labels.numpy(), clusters.numpy())),
        "purity": scores["purity"],
        "clusters": float(clusters.max() + 1),
        "classes": float(labels.max() + 1),
    }
    if figures["clusters"] == figures["classes"] <= MATCHED:
        table = contingency(clusters, labels)
        rows, columns = linear_sum_assignment(table, maximize=True)
        figures["accuracy"] = 100 * float(table[rows, columns].sum()) / len(labels)
    return figures


def contingency(clusters: Tensor, labels: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """How many images of each cluster (row) have each label (column): for few clusters, or few classes."""
    rows, columns = int(clusters.max()) + 1, int(labels.max()) + 1
    return torch.bincount(clusters * columns + labels, minlength=rows * columns).view(rows, columns).numpy()


class Clusters(Evaluation):
    """``assignments``: a safetensors file whose ``labels`` (N,) give the cluster of each training image.

    Without it, the L2-normalised features of the training images are clustered by k-means into ``k`` clusters, as many
    as there are classes by default. Only training images with a label count; the test split is not looked at.
    """

    name: Literal["clusters"] = "clusters"
    k: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    iterations: Annotated[int, Field(ge=1)] = 50
    assignments: Path | None = None

    @property
    def reads_images(self) -> bool:
        return self.assignments is None

    def open(self, images: Requested) -> tuple[LabelledData, Evaluation]:
        """The test split is not looked at, so none is taken out."""
        train, _ = images.trained_on()
        own = not self.model_fields_set & {"k", "assignments"} and images.request.run is not None
        found = _clusters_of_run(images.request, train, images.screen) if own else None
        if found is None:
            return LabelledData(train, train, images.name), self
        clusters, readable = found
        path, left_out = images.place / "assignments.safetensors", len(train) - len(readable)
        save_tensors(path, {"labels": clusters})
        if left_out:
            images.screen.warn(f"{left_out} of {len(train)} images could not be read by the run: left out")
        data = LabelledData(readable, readable, images.name, left_out)
        return data, self.model_copy(update={"assignments": path})

    def run(self, subject: Subject, data: LabelledData, context: Context) -> dict[str, float]:
        labels = data.train.labels
        if labels is None or not bool((labels >= 0).any()):
            raise UserError(f"no training image of {data.name} has a label: choose --data with labels")
        own = self.assignments is not None
        clusters = self._given(len(labels)) if own else self._found(subject, data, context)
        figures = cluster_scores(clusters, labels)
        whose = "the run's own clusters" if own else "k-means of the features"
        header = {"nmi": "NMI", "ari": "ARI", "purity": "purity", "accuracy": "matched %", "clusters": "clusters"}
        shown = {title: figures[key] for key, title in header.items() if key in figures}
        row = tuple(f"{value:.0f}" if title == "clusters" else f"{value:.3f}" for title, value in shown.items())
        context.screen.table(f"{whose}: {subject.name} on {data.name}", [row], tuple(shown))
        self._draw(clusters, labels, data, whose, context)
        save_tensors(context.out / "predictions.safetensors", {"labels": clusters, "classes": labels})
        self.write_result(
            subject,
            data.name,
            context,
            {
                "clusters_of": "the run" if own else "k-means",
                "figures": figures,
                "sizes": clusters.bincount().tolist(),
            },
        )
        return figures

    def _given(self, images: int) -> Tensor:
        assert self.assignments is not None
        try:
            clusters = load_file(self.assignments)["labels"].long()
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"{self.assignments} is no safetensors file with 'labels': {error}") from None
        if clusters.shape != (images,):
            raise UserError(
                f"{self.assignments} assigns {tuple(clusters.shape)} images, but the training split has {images}: "
                "name the data the run was trained on"
            )
        if bool((clusters < 0).any()):
            raise UserError(f"{self.assignments}: {int((clusters < 0).sum())} images have no cluster (−1)")
        return clusters

    def _found(self, subject: Subject, data: LabelledData, context: Context) -> Tensor:
        assert data.train.labels is not None
        features = F.normalize(features_of(subject, data.train, context), dim=1)
        k = len(data.train.labels[data.train.labels >= 0].unique()) if self.k == "auto" else self.k
        generator = torch.Generator().manual_seed(context.seed)
        start: Literal["random", "k-means++"] = "k-means++" if k <= PLUS_PLUS else "random"
        return kmeans(features, k, self.iterations, generator, start).labels.cpu()

    def _draw(self, clusters: Tensor, labels: Tensor, data: LabelledData, whose: str, context: Context) -> None:
        known = labels >= 0
        sizes = clusters.bincount()
        largest = sizes.topk(min(LARGEST, int((sizes > 0).sum()))).indices
        row = torch.full_like(sizes, -1).scatter_(0, largest, torch.arange(len(largest)))[clusters]  # −1: not drawn
        shown = known & (row >= 0)
        table = torch.zeros(len(largest), int(labels.max()) + 1, dtype=torch.float64)
        table.index_put_((row[shown], labels[shown]), torch.ones((), dtype=torch.float64), accumulate=True)
        share = 100 * table / table.sum(1, keepdim=True).clamp_min(1)
        common = share.sum(0).topk(min(10, share.shape[1])).indices.tolist()  # beyond ten, colours repeat
        names = data.train.classes
        with figure(context.out / "clusters", columns=2, width=5.6) as (left, right):
            left.bar(
                range(1, len(sizes) + 1),
                sizes.sort(descending=True).values.tolist(),
                width=1.0 - 0.2 * (len(sizes) < 60),
            )
            left.set_xlabel("cluster, largest first")
            left.set_ylabel("images")
            left.set_title(f"{len(sizes)} clusters ({whose})")
            under = torch.zeros(len(largest), dtype=torch.float64)
            for place, column in enumerate(common):
                name = names[column] if names else f"class {column}"
                right.bar(
                    range(len(largest)), share[:, column].tolist(), bottom=under.tolist(), label=name, color=f"C{place}"
                )
                under += share[:, column]
            if len(common) < share.shape[1]:
                rest = (share.sum(1) - under).tolist()
                right.bar(range(len(largest)), rest, bottom=under.tolist(), label="others", color="lightgrey")
            right.set_xticks(range(len(largest)), [str(int(sizes[c])) for c in largest])
            right.set_xlabel("images in the cluster")
            right.set_ylabel("share of classes, %")
            right.set_title(f"classes in the {len(largest)} largest clusters")
            right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)


def _clusters_of_run(request: Request, train: Source, screen: Screen) -> tuple[Tensor, Source] | None:
    """Those of the memory bank of a run or a checkpoint, where they have begun and are of these very images.

    With them the images that the run could read. A bank of a run that streams its images has entries for others, too:
    a neighbour's pixels stood in for them.
    """
    subject = Path(request.subject)
    try:
        found = checkpoint.load_latest(subject / "checkpoint") if subject.is_dir() else (checkpoint.load(subject),)
    except UserError:
        if request.data is None:
            raise
        return None  # of other images, in all likelihood: the damage does not matter here
    if found is None or not found[0]["clusters_started"]:
        return None
    assert request.run is not None, "has clusters of its own"
    state, readable = found[0], readable_part(train, Run(request.run).unreadable(found[0]))
    labels: Tensor = state["learner"]["bank.labels"]
    if state["data"] == readable.fingerprint():
        return labels, readable
    if state["data"] == train.fingerprint():
        assert isinstance(readable, Subset)
        return labels[torch.from_numpy(readable.rows)], readable
    if request.data is None:
        screen.warn("the images do not match the checkpoint's: k-means of the features, not the run's own clusters")
    return None
