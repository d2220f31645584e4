"""The embedding in two dimensions: t-SNE, or UMAP where umap-learn is installed; PCA for a handful of images."""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.manifold import TSNE

from interclr.screen import Screen

Array = NDArray[np.float32]
FEW = 8  # under so many images neighbourhoods mean nothing
COMPONENTS = 30  # of PCA, before t-SNE
SECONDS_PER_STEP = 5.5e-6  # of t-SNE for one image on one CPU core, roughly
MOST_STEPS, LEAST_STEPS = 750, 300
BUDGET = 25.0  # seconds t-SNE may take, roughly; a large map gets fewer steps, not fewer than LEAST_STEPS


def flatten(features: Array, screen: Screen, seed: int = 0) -> tuple[Array, str]:
    """Positions (N, 2) of features (N, D), within −1…1, and the name of the method."""
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    reduced = principal(unit, COMPONENTS)
    if len(reduced) < FEW or not reduced.any():
        return _fitted(reduced[:, :2]), "PCA"
    try:
        umap: Any = importlib.import_module("umap")
    except ImportError:
        return _fitted(_tsne(reduced, screen, seed)), "t-SNE"
    with screen.working(f"UMAP of {len(reduced):,} images"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that a seed means one thread
        neighbours = min(15, len(reduced) - 1)
        return _fitted(umap.UMAP(n_neighbors=neighbours, random_state=seed).fit_transform(reduced)), "UMAP"


def principal(features: Array, components: int) -> Array:
    """(N, components) scores of PCA, padded with zeros; signs fixed, so that the picture does not flip."""
    centred = features.astype(np.float64) - features.mean(0, dtype=np.float64)
    if len(centred) >= centred.shape[1]:
        _, directions = np.linalg.eigh(centred.T @ centred)
        directions = directions[:, ::-1][:, :components]
    else:
        directions = np.linalg.svd(centred, full_matrices=False)[2][:components].T
    largest = np.abs(directions).argmax(0)
    scores = centred @ (directions * np.sign(directions[largest, np.arange(directions.shape[1])]))
    return np.pad(scores, ((0, 0), (0, max(0, components - scores.shape[1])))).astype(np.float32)


def _tsne(reduced: Array, screen: Screen, seed: int) -> Array:
    count = len(reduced)
    steps = round(min(MOST_STEPS, max(LEAST_STEPS, BUDGET / (SECONDS_PER_STEP * count))))
    seconds = SECONDS_PER_STEP * count * steps
    limit = "max_iter" if "max_iter" in inspect.signature(TSNE).parameters else "n_iter"  # before scikit-learn 1.5
    what = f"t-SNE of {count:,} images" + (f", about {seconds:.0f} s" if seconds > 2 else "")
    screen.say(what)
    with screen.working(what):
        # one thread: its sums, and so the picture, do not depend on which thread is first
        layout = TSNE(
            perplexity=min(30.0, (count - 1) / 3), init="pca", random_state=seed, n_jobs=1, **{limit: steps}
        ).fit_transform(reduced)
    return np.asarray(layout, dtype=np.float32)


def _fitted(layout: Any) -> Array:
    """Centred, and scaled to −1…1 without distortion."""
    layout = np.asarray(layout, dtype=np.float32)
    low, high = layout.min(0), layout.max(0)
    span = float((high - low).max()) / 2
    return np.asarray((layout - (low + high) / 2) / (span if span > 0 else 1.0), dtype=np.float32)
