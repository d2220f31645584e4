"""One-vs-all linear SVMs by LIBLINEAR, and average precision: what the SVM and low-shot protocols share.

Free of torch, so that the worker processes which share the classes among all cores start in a moment.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import joblib
import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedKFold
from sklearn.svm import LinearSVC

Reals = NDArray[np.floating[Any]]
Signs = NDArray[np.int8]  # 1 positive, −1 negative, 0 left out (VOC's "difficult", or not drawn)
Rule = Literal["area", "11-point", "step"]
# The public VOC07 scripts always add 2^-4 … 2^-19 to the costs they are given. Which they are given varies: 1, 10, 100
# in scripts that descend from them (ours), 10^-7 … 10^2 as the default of the original low-shot test.
COSTS = (*(0.5**power for power in range(19, 3, -1)), 1.0, 10.0, 100.0)
# The public benchmark solves the dual. Both problems have the same solution, but with many images per feature the dual
# needs thousands of passes at high costs, and stops short of it. VOC07 has 2.4 images per feature of a ResNet-50.
PRIMAL_FROM = 4  # images per feature
SERIAL_BELOW = 20_000_000  # images · features · fits that one core does sooner than workers start


def average_precision(signs: Signs, scores: Reals, rule: Rule = "area") -> float:
    """AP of one class over the images that are not left out; NaN where there is no positive.

    ``area`` lets no precision be lower than one at higher recall and takes the area under that curve (VOC from 2010,
    and the public SVM benchmark); ``11-point`` averages the same curve at recalls 0, 0.1, … 1 (VOC07's own rule);
    ``step`` does not smooth (scikit-learn's). Images with equal scores enter together, so their order is no matter.
    """
    kept = signs != 0
    positive, scores = signs[kept] > 0, scores[kept]
    total = int(positive.sum())
    if total == 0:
        return math.nan
    order = np.argsort(-scores, kind="stable")
    positive, scores = positive[order], scores[order]
    ends = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # the last of each run of equal scores
    hits = np.cumsum(positive)[ends]
    precision, recall = hits / (ends + 1), hits / total
    if rule == "step":
        return float((np.diff(recall, prepend=0.0) * precision).sum())
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    if rule == "area":
        return float((np.diff(recall, prepend=0.0) * envelope).sum())
    # First place where the recall reaches each level; exact in whole numbers, where 0.1 · 30 would not be 3.
    places = np.searchsorted(10 * hits, np.arange(11) * total)
    return float(envelope[places].mean())


def unit_rows(features: Reals) -> NDArray[np.float64]:
    """L2-normalised in double precision, as the public benchmark does; a zero row stays zero."""
    features = features.astype(np.float64)
    norms: Reals = np.linalg.norm(features, axis=1, keepdims=True)
    return features / (norms + 1e-5)


@dataclass(frozen=True, slots=True)
class Machine:
    """Settings of LIBLINEAR: ½‖w‖² + C·Σ weight·max(0, 1 − y·(w·x + b))², as in Goyal et al. 2019."""

    positive_weight: float = 2.0
    tolerance: float = 1e-4
    iterations: int = 2000
    dual: bool = True  # which of two equal problems LIBLINEAR solves
    seed: int = 0

    def fit(self, features: Reals, signs: Signs, cost: float) -> tuple[LinearSVC, bool]:
        """The trained SVM of one class, and whether it converged. Images of sign 0 are left out."""
        kept = signs != 0
        machine = LinearSVC(
            C=cost,
            class_weight={1: self.positive_weight, -1: 1.0},
            penalty="l2",
            loss="squared_hinge",
            dual=self.dual,
            tol=self.tolerance,
            max_iter=self.iterations,
            random_state=self.seed,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # counted instead
            machine.fit(features[kept], signs[kept])
        return machine, int(np.max(machine.n_iter_)) < self.iterations

    def cross_validate(self, features: Reals, signs: Signs, cost: float, folds: int) -> float:
        """Mean AP over stratified, shuffled folds; NaN where a class has too few examples for two folds.

        The public scripts do not shuffle. On a folder sorted by class that would hold out whole classes of negatives.
        """
        kept = np.flatnonzero(signs)
        folds = min(folds, int((signs > 0).sum()), int((signs < 0).sum()))
        if folds < 2:
            return math.nan
        parts = StratifiedKFold(folds, shuffle=True, random_state=self.seed).split(kept, signs[kept])
        found = []
        for train, held in parts:
            machine, _ = self.fit(features[kept[train]], signs[kept[train]], cost)
            scores = machine.decision_function(features[kept[held]])
            found.append(average_precision(signs[kept[held]], scores, "step"))
        return float(np.mean(found))

    def decide(
        self, features: Reals, signs: Signs, cost: float, queries: Reals
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], bool]:
        """Decision values (Q,), weights (F + 1,) with the bias last, and whether training converged."""
        machine, converged = self.fit(features, signs, cost)
        return machine.decision_function(queries), np.append(machine.coef_[0], machine.intercept_), converged

    def decide_from(
        self,
        features: Reals,
        rows: NDArray[np.int64],
        signs: Signs,
        costs: tuple[float, ...],
        folds: int,
        queries: Reals,
    ) -> tuple[NDArray[np.float32], float]:
        """All classes from some rows: decision values (Q, C) at the best cost, and that cost.

        ``signs`` (rows, C). Without folds nothing is chosen: the values of every cost, (costs, Q, C).
        """
        features, classes = features[rows], range(signs.shape[1])

        def values(cost: float) -> NDArray[np.float32]:
            each = [self.decide(features, signs[:, c], cost, queries)[0] for c in classes]
            return np.stack(each, axis=1).astype(np.float32)

        if not folds:
            return np.stack([values(cost) for cost in costs]), math.nan
        chosen = costs[0]
        if len(costs) > 1:
            found = [np.mean([self.cross_validate(features, signs[:, c], k, folds) for c in classes]) for k in costs]
            chosen = best_cost(costs, np.array(found))
        return values(chosen), chosen


def best_cost(costs: tuple[float, ...], precisions: Reals) -> float:
    """The cost of the highest cross-validated AP, the smallest of equals; without any, the one nearest to 1."""
    if np.isnan(precisions).any():
        return min(costs, key=lambda cost: abs(math.log(cost)))
    return costs[int(np.argmax(precisions))]


def in_parallel(
    function: Callable[..., Any],
    arguments: Iterable[tuple[Any, ...]],
    *,
    jobs: int,
    work: float,
    progress: Callable[[int], None] | None = None,
) -> list[Any]:
    """``function(*a)`` for each ``a``, in order, on ``jobs`` cores (0: all); on one where ``work`` is little.

    Processes rather than threads: LIBLINEAR's random numbers are one stream per process, so threads would make the
    result depend on their timing. joblib maps large arrays into the workers' memory instead of copying them.
    """
    cores = 1 if work < SERIAL_BELOW else jobs or joblib.cpu_count()
    results = []
    calls = (joblib.delayed(function)(*each) for each in arguments)
    for result in joblib.Parallel(n_jobs=cores, return_as="generator")(calls):
        results.append(result)
        if progress is not None:
            progress(len(results))
    return results
