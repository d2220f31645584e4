"""Average precision of boxes by the rules of PASCAL VOC and of COCO, in plain NumPy.

Boxes are continuous edges x0, y0, x1, y1, so a box of one pixel is 1 wide. VOC counts pixels inclusively, its boxes are
1-based and its widths are xmax − xmin + 1; ``voc_boxes`` reads them as (xmin − 1, ymin − 1, xmax, ymax), and the IoU of
such edges is VOC's IoU exactly.

The paper's AP, AP50 and AP75 on VOC07 are those of Detectron2's ``PascalVOCDetectionEvaluator``: VOC's rules with 11
points at each IoU of .50, .55, … .95, averaged; that is ``voc_rules`` with ``eleven_points``. (Detectron2 also rounds
boxes to a tenth of a pixel and scores to three digits on the way through its text files; nothing is rounded here.)
``coco_rules`` gives what pycocotools' ``COCOeval`` gives. The rules differ in more than the interpolation:

=====================  ===============================================  =============================================
\\                      VOC                                              COCO
=====================  ===============================================  =============================================
a detection goes to    its best box, taken or not                       the best box that is still free
overlap needed         IoU > threshold                                  IoU ≥ threshold
difficult boxes        a detection whose best box is difficult is       as ``iscrowd``: only what no ordinary box takes,
                       ignored                                          by intersection over its own area; ignored
precision              11 points, or the area under the curve           101 points
detections             all                                              the 100 best of each image and class
=====================  ===============================================  =============================================

A class without any box that counts has no average precision: NaN, and left out of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
THRESHOLDS: Floats = np.linspace(0.5, 0.95, 10)
COCO_DETECTIONS = 100
COCO_RECALLS: Floats = np.linspace(0.0, 1.0, 101)
VOC_RECALLS: Floats = np.arange(0.0, 1.1, 0.1)


@dataclass(frozen=True, slots=True)
class Truth:
    """The true boxes of one image."""

    boxes: NDArray[np.floating]  # (n, 4) x0, y0, x1, y1
    labels: NDArray[np.integer]  # (n,) 0..classes-1
    difficult: NDArray[np.bool_]  # (n,)


@dataclass(frozen=True, slots=True)
class Found:
    """What a detector says of one image."""

    boxes: NDArray[np.floating]  # (m, 4)
    labels: NDArray[np.integer]  # (m,)
    scores: NDArray[np.floating]  # (m,)


def voc_rules(
    truth: Sequence[Truth],
    found: Sequence[Found],
    classes: int,
    thresholds: Floats = THRESHOLDS,
    eleven_points: bool = True,
) -> Floats:
    """Average precision, 0 to 1, of each threshold and class: (thresholds, classes)."""
    table = np.full((len(thresholds), classes), np.nan)
    for label in range(classes):
        matched = _voc_matches(truth, found, label)
        for row, threshold in enumerate(thresholds):
            curve = _voc_curve(matched, float(threshold))
            if curve is not None:
                table[row, label] = _eleven_points(*curve) if eleven_points else _area(*curve)
    return table


def coco_rules(truth: Sequence[Truth], found: Sequence[Found], classes: int, thresholds: Floats = THRESHOLDS) -> Floats:
    """Average precision, 0 to 1, of each threshold and class: (thresholds, classes)."""
    table = np.full((len(thresholds), classes), np.nan)
    for label in range(classes):
        positives, scores, hits, ignored = 0, [], [], []
        for true, guess in zip(truth, found, strict=True):
            boxes, crowd = true.boxes[true.labels == label], true.difficult[true.labels == label]
            mine = np.flatnonzero(guess.labels == label)
            mine = mine[np.argsort(-guess.scores[mine], kind="stable")][:COCO_DETECTIONS]
            hit, ignore = _coco_matches(guess.boxes[mine], boxes[~crowd], boxes[crowd], thresholds)
            positives += int((~crowd).sum())
            scores.append(guess.scores[mine])
            hits.append(hit)
            ignored.append(ignore)
        if positives == 0:
            continue
        order = np.argsort(-np.concatenate(scores), kind="stable")
        hit, ignore = np.concatenate(hits, axis=1)[:, order], np.concatenate(ignored, axis=1)[:, order]
        for row in range(len(thresholds)):
            right = np.cumsum(hit[row] & ~ignore[row]).astype(np.float64)
            wrong = np.cumsum(~hit[row] & ~ignore[row]).astype(np.float64)
            precision = _falling(right / (right + wrong + np.spacing(1)))
            at = np.searchsorted(right / positives, COCO_RECALLS, side="left")
            table[row, label] = np.append(precision, 0.0)[at].mean()
    return table


def summary(table: Floats) -> dict[str, float]:
    """AP, AP50 and AP75 in per cent, from a (10, classes) table over ``THRESHOLDS``."""
    counted = table[:, ~np.isnan(table).all(axis=0)]
    if counted.shape[1] == 0:
        return {"AP": 0.0, "AP50": 0.0, "AP75": 0.0}
    means = 100 * counted.mean(axis=1)
    return {"AP": float(means.mean()), "AP50": float(means[0]), "AP75": float(means[5])}


def precision_recall(
    truth: Sequence[Truth], found: Sequence[Found], label: int, threshold: float = 0.5
) -> tuple[Floats, Floats] | None:
    """Recall and precision of one class by VOC's rules, best detection first; None where the class has no box."""
    return _voc_curve(_voc_matches(truth, found, label), threshold)


def box_iou(left: NDArray[np.floating], right: NDArray[np.floating], over_left: bool = False) -> Floats:
    """Intersection over union (n, m), or with ``over_left`` over the area of the left box alone."""
    a, b = left.astype(np.float64)[:, None], right.astype(np.float64)[None]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    shared = sides.clip(min=0).prod(-1)
    area = (a[..., 2:] - a[..., :2]).prod(-1)
    whole = area if over_left else area + (b[..., 2:] - b[..., :2]).prod(-1) - shared
    whole = np.broadcast_to(whole, shared.shape)
    overlap: Floats = shared / np.where(whole > 0, whole, 1.0)
    return overlap


@dataclass(frozen=True, slots=True)
class _Matches:
    """All detections of a class, best first, each with the true box it overlaps most."""

    positives: int
    overlap: Floats  # (m,) −1 where the image has no such box
    box: NDArray[np.int64]  # (m,) its number among all true boxes of the class
    difficult: NDArray[np.bool_]  # (m,)


def _voc_matches(truth: Sequence[Truth], found: Sequence[Found], label: int) -> _Matches:
    positives, first = 0, 0
    scores, overlaps, boxes, difficult = [], [], [], []
    for true, guess in zip(truth, found, strict=True):
        there, mine = true.labels == label, guess.labels == label
        hard = true.difficult[there]
        positives += int((~hard).sum())
        if mine.any():
            count = int(mine.sum())
            scores.append(guess.scores[mine])
            if len(hard):
                iou = box_iou(guess.boxes[mine], true.boxes[there])
                best = iou.argmax(axis=1)
                overlaps.append(iou[np.arange(count), best])
            else:
                best = np.zeros(count, dtype=np.int64)
                overlaps.append(np.full(count, -1.0))
            boxes.append(first + best)
            difficult.append(hard[best] if len(hard) else np.zeros(count, dtype=bool))
        first += len(hard)
    if not scores:
        return _Matches(positives, np.empty(0), np.empty(0, dtype=np.int64), np.empty(0, dtype=bool))
    order = np.argsort(-np.concatenate(scores), kind="stable")
    return _Matches(
        positives, np.concatenate(overlaps)[order], np.concatenate(boxes)[order], np.concatenate(difficult)[order]
    )


def _voc_curve(matches: _Matches, threshold: float) -> tuple[Floats, Floats] | None:
    if matches.positives == 0:
        return None
    over = matches.overlap > threshold
    candidates = np.flatnonzero(over & ~matches.difficult)
    hit = np.zeros(len(over), dtype=bool)
    hit[candidates[np.unique(matches.box[candidates], return_index=True)[1]]] = True  # the first on each box
    wrong = np.cumsum(~hit & ~(over & matches.difficult))
    right = np.cumsum(hit)
    return right / matches.positives, right / np.maximum(right + wrong, np.finfo(np.float64).eps)


def _eleven_points(recall: Floats, precision: Floats) -> float:
    return float(sum(precision[recall >= at].max(initial=0.0) for at in VOC_RECALLS) / len(VOC_RECALLS))


def _area(recall: Floats, precision: Floats) -> float:
    recall = np.concatenate(([0.0], recall))
    return float((np.diff(recall) * _falling(precision)).sum())


def _falling(precision: Floats) -> Floats:
    """At each recall the best precision at that recall or a higher one."""
    return np.maximum.accumulate(precision[::-1])[::-1]


def _coco_matches(
    guesses: NDArray[np.floating], boxes: NDArray[np.floating], crowds: NDArray[np.floating], thresholds: Floats
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For detections of one image and class, best first: matched at all, and matched to what does not count."""
    hit = np.zeros((len(thresholds), len(guesses)), dtype=bool)
    ignored = np.zeros_like(hit)
    needed = np.minimum(thresholds, 1 - 1e-10)
    if len(boxes):
        free = np.ones((len(thresholds), len(boxes)), dtype=bool)
        rows = np.arange(len(thresholds))
        for i, overlaps in enumerate(box_iou(guesses, boxes)):
            if overlaps.max() < needed[0]:
                continue
            usable = np.where(free & (overlaps >= needed[:, None]), overlaps, -1.0)
            best = len(boxes) - 1 - usable[:, ::-1].argmax(axis=1)  # of equals COCOeval takes the last
            hit[:, i] = usable[rows, best] >= 0
            free[rows[hit[:, i]], best[hit[:, i]]] = False
    if len(crowds):
        best = box_iou(guesses, crowds, over_left=True).max(axis=1)
        ignored = ~hit & (best >= needed[:, None])
    return hit | ignored, ignored
