"""k-NN accuracy and health while training. Labels are looked at here only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from interclr.config import Settings
from interclr.data.canvas import Canvas
from interclr.data.reading import Unreadable
from interclr.data.source import Source
from interclr.data.stream import in_order
from interclr.data.subset import Subset, readable_rows
from interclr.data.views import centre_crop
from interclr.engine.dataset import TrainingData
from interclr.engine.step import PRECISIONS
from interclr.features import embed_all, evenly
from interclr.health import cluster_health, embedding_health, pair_health, warnings_of
from interclr.knn import knn_accuracy
from interclr.learner import Learner
from interclr.models.heads import Encoded
from interclr.screen import Screen
from interclr.types import Images

BATCH = 256
PIXELS_LARGEST = 64  # raw-pixel k-NN is measured up to this side
HEALTH_IMAGES = 2048


class Monitor:
    def __init__(self, settings: Settings, data: TrainingData, device: torch.device, screen: Screen) -> None:
        self.settings, self.data, self.device, self.screen = settings, data, device, screen
        assert isinstance(settings.monitor.k, int)
        self.rows = self._spread(data.bank_rows) if data.bank_rows is not None else None
        self.k = settings.monitor.k if self.rows is None else min(settings.monitor.k, len(self.rows))
        self.temperature = settings.monitor.temperature

    def _spread(self, rows: Tensor) -> Tensor:
        """At most ``limit`` rows, spread evenly over the set."""
        limit = self.settings.monitor.limit
        return rows if len(rows) <= limit else rows[evenly(len(rows), limit)]

    @property
    def measures_knn(self) -> bool:
        return self.rows is not None and self.data.queries is not None

    def knn(self, network: nn.Module) -> float | None:
        """Top-1 of the weighted k-NN, in percent; None without labels."""
        if self.rows is None or self.data.queries is None or self.data.labels is None:
            return None
        truth = self.data.queries.labels
        assert truth is not None
        labels = self.data.labels[self.rows]
        bank, labels = self._readable(network, self.take(self.rows), labels, "embedding training images for k-NN")
        queries, truth = self._readable(network, self.data.queries, truth, "embedding test images for k-NN")
        if not len(bank) or not len(queries):
            self.screen.warn("no k-NN: none of the images it is measured on can be read")
            return None
        return knn_accuracy(bank, labels, queries, truth, self.k, self.temperature)

    @property
    def guessing(self) -> float | None:
        """What always naming the bank's commonest class gives, in percent: much, where classes are uneven."""
        if self.rows is None or self.data.queries is None or self.data.labels is None:
            return None
        truth = self.data.queries.labels
        assert truth is not None
        commonest = self.data.labels[self.rows].mode().values
        return 100 * (truth == commonest.to(truth.device)).float().mean().item()

    def _readable(
        self, network: nn.Module, images: Canvas | Source, labels: Tensor, what: str
    ) -> tuple[Tensor, Tensor]:
        """Features and labels of the images that can be read: the others would be seen as their neighbours."""
        met = Unreadable()
        features = self.embed(network, images, what, met)
        labels = labels.to(features.device)
        if not met.reasons or isinstance(images, Canvas):
            return features, labels
        kept = readable_rows(images, met.reasons)
        return features[kept], labels[kept]

    def knn_of_pixels(self) -> float | None:
        """What the pixels themselves give: a floor that any training must leave behind."""
        if not self.measures_knn or int(self.settings.data.image_size) > PIXELS_LARGEST:
            return None
        return self.knn(nn.Flatten())

    def health(self, learner: Learner, epoch: int) -> dict[str, float]:
        """Rank and uniformity of the embedding on some training images, and the clusters' state; says what is wrong."""
        rows = evenly(len(self.data.source), HEALTH_IMAGES)
        encoder = learner.intra.bank_encoder()
        figures = embedding_health(self.embed(encoder, self.take(rows), "embedding images for health"))
        if learner.bank is not None and learner.inter_active(epoch):
            figures |= cluster_health(learner.bank, self.data.labels)
            if learner.draws_pairs:
                sampler = learner.sampler if learner.intra.uses_negatives else None
                figures |= pair_health(learner.bank, sampler, self.data.labels)
        # Soft labels relate every image to all clusters: one that is alone in its own is no less related to others.
        judged = {key: value for key, value in figures.items() if learner.draws_pairs or key != "cluster_median"}
        for line in warnings_of(judged, learner.intra.dim, len(self.data.source)):
            self.screen.warn(line)
        return figures

    def embed(
        self,
        network: nn.Module,
        images: Canvas | Source,
        what: str,
        unreadable: Unreadable | None = None,
        heed: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """``heed`` is called after every batch, and may end it by an exception."""
        data, engine = self.settings.data, self.settings.engine
        size = int(data.image_size)

        def transform(batch: Images) -> Tensor:
            return centre_crop(batch, size, data.mean, data.std)

        with self.screen.working(what) as progress:

            def tell(done: int) -> None:
                progress(done, len(images))
                heed()

            return embed_all(
                network,
                in_order(images, self.device, BATCH, None if data.workers == "auto" else data.workers, unreadable),
                transform,
                pick=_inter_projection,
                channels_last=engine.channels_last,
                autocast=PRECISIONS[engine.precision],
                progress=tell,
                total=len(images),
            )

    def take(self, rows: Tensor) -> Canvas | Source:
        images = self.data.images
        return images.rows(rows) if isinstance(images, Canvas) else Subset(images, rows.tolist())


def _inter_projection(output: object) -> Tensor:
    """What the bank holds of an encoder's output; a backbone's output as it is."""
    if isinstance(output, Encoded):
        return output.inter_projection
    assert isinstance(output, Tensor)
    return output


def describe(figures: dict[str, float]) -> str:
    """The figures people look at, in one line."""
    parts = {
        "loss": "loss {:.3f}",
        "knn": "k-NN {:.1f} %",
        "rank_me": "rank {:.1f}",
        "alignment": "alignment {:.2f}",
        "uniformity": "uniformity {:.2f}",
        "purity": "purity {:.2f}",
        "nmi": "NMI {:.2f}",
        "positives_right": "positives right {:.2f}",
        "negatives_wrong": "negatives wrong {:.2f}",
        "cluster_min": "clusters {:.0f}",
        "cluster_median": "/{:g}",
        "cluster_max": "/{:.0f}",
        "cluster_entropy": "entropy {:.2f}",
        "labels_changed": "relabelled {:.0%}",
    }
    text = "  ".join(form.format(figures[name]) for name, form in parts.items() if name in figures)
    return text.replace("  /", "/")
