"""Exactly class-balanced random draws of labelled images."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def balanced_draw(labels: NDArray[np.integer[Any]], each: int, random: np.random.Generator) -> Indices:
    """Indices (C, ``each``) of as many distinct images of every class that occurs, classes in order."""
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    assert 0 < each <= min(map(len, members)), f"{each} of {min(map(len, members))}"
    return np.stack([random.choice(rows, each, replace=False) for rows in members])


def smallest_class(labels: NDArray[np.integer[Any]]) -> int:
    return int(np.unique(labels, return_counts=True)[1].min())
