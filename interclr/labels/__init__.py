"""Pseudo-labels: which cluster of the memory bank each image belongs to, and how that is kept up."""

from typing import Annotated

from pydantic import Field

from interclr.labels.base import Labels
from interclr.labels.clustered import clustered_bank
from interclr.labels.kmeans import Clustering, auto_clusters, kmeans, nearest_centroid
from interclr.labels.offline import OfflineLabels, OfflineLabelsConfig
from interclr.labels.online import OnlineLabels, OnlineLabelsConfig
from interclr.labels.repair import minimum_size, repair

LabelsConfig = Annotated[OnlineLabelsConfig | OfflineLabelsConfig, Field(discriminator="name")]

__all__ = [
    "Clustering",
    "Labels",
    "LabelsConfig",
    "OfflineLabels",
    "OfflineLabelsConfig",
    "OnlineLabels",
    "OnlineLabelsConfig",
    "auto_clusters",
    "clustered_bank",
    "kmeans",
    "minimum_size",
    "nearest_centroid",
    "repair",
]
