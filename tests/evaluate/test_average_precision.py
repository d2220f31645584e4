"""Average precision against pycocotools, against VOC's published procedure followed literally, and by hand."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

from interclr.evaluate.average_precision import (
    THRESHOLDS,
    Found,
    Truth,
    box_iou,
    coco_rules,
    precision_recall,
    summary,
    voc_rules,
)

CLASSES = 4


def random_case(seed: int, images: int = 40, crowded: bool = True) -> tuple[list[Truth], list[Found]]:
    """Truth with difficult boxes, and guesses that are perturbed truth, doubles, other classes, and noise."""
    random = np.random.default_rng(seed)
    truth, found = [], []
    for _ in range(images):
        count = int(random.integers(0, 7))
        corner, size = random.uniform(0, 80, (count, 2)), random.uniform(4, 60, (count, 2))
        boxes, labels = np.hstack((corner, corner + size)), random.integers(0, CLASSES - 1, count)  # the last never
        difficult = random.random(count) < (0.3 if crowded else 0.0)
        near = np.repeat(boxes, 3, axis=0) + random.normal(0, 3, (3 * count, 4))
        noise = random.uniform(0, 80, (int(random.integers(0, 5)), 2))
        guesses = np.vstack((near, np.hstack((noise, noise + random.uniform(4, 60, noise.shape)))))
        guesses[:, 2:] = np.maximum(guesses[:, 2:], guesses[:, :2] + 1)
        guessed = np.concatenate((np.repeat(labels, 3), random.integers(0, CLASSES, len(noise))))
        wrong = random.random(len(guessed)) < 0.1
        guessed[wrong] = random.integers(0, CLASSES, int(wrong.sum()))
        scores = random.random(len(guessed)).round(2)  # ties included
        truth.append(Truth(boxes, labels, difficult))
        found.append(Found(guesses, guessed, scores))
    return truth, found


def pycocotools_table(truth: list[Truth], found: list[Found]) -> tuple[np.ndarray, np.ndarray]:
    coco = pytest.importorskip("pycocotools.coco")
    evaluation = pytest.importorskip("pycocotools.cocoeval")
    annotations, results = [], []
    for image, (true, guess) in enumerate(zip(truth, found, strict=True), 1):
        for box, label, hard in zip(true.boxes, true.labels, true.difficult, strict=True):
            extent = [*box[:2], *(box[2:] - box[:2])]
            entry = {"id": len(annotations) + 1, "image_id": image, "category_id": int(label) + 1}
            annotations.append({**entry, "bbox": extent, "area": extent[2] * extent[3], "iscrowd": int(hard)})
        for box, label, score in zip(guess.boxes, guess.labels, guess.scores, strict=True):
            extent = [*box[:2], *(box[2:] - box[:2])]
            results.append({"image_id": image, "category_id": int(label) + 1, "bbox": extent, "score": float(score)})
    with contextlib.redirect_stdout(io.StringIO()):
        reference = coco.COCO()
        reference.dataset = {
            "images": [{"id": image} for image in range(1, len(truth) + 1)],
            "categories": [{"id": label + 1, "name": str(label)} for label in range(CLASSES)],
            "annotations": annotations,
        }
        reference.createIndex()
        judge = evaluation.COCOeval(reference, reference.loadRes(results), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    precision = judge.eval["precision"][:, :, :, 0, -1]  # thresholds, recalls, classes; all areas, 100 detections
    table = np.where((precision > -1).all(axis=1), precision.mean(axis=1), np.nan)
    return table, judge.stats[:3]


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_coco_rules_are_those_of_pycocotools(seed: int, crowded: bool) -> None:
    truth, found = random_case(seed, crowded=crowded)
    expected, figures = pycocotools_table(truth, found)
    table = coco_rules(truth, found, CLASSES)
    np.testing.assert_allclose(table, expected, atol=1e-9)
    np.testing.assert_allclose([summary(table)[name] / 100 for name in ("AP", "AP50", "AP75")], figures, atol=1e-6)


def test_coco_rules_count_the_hundred_best_of_an_image() -> None:
    random = np.random.default_rng(0)
    corner = random.uniform(0, 500, (150, 2))
    boxes = np.hstack((corner, corner + 20))
    truth = [Truth(boxes, np.zeros(150, dtype=int), np.zeros(150, dtype=bool))]
    found = [Found(boxes, np.zeros(150, dtype=int), random.random(150))]
    expected, _ = pycocotools_table(truth, found)
    table = coco_rules(truth, found, CLASSES)
    np.testing.assert_allclose(table, expected, atol=1e-9)
    assert table[0, 0] < 0.7


def literal_voc(truth: list[Truth], found: list[Found], label: int, threshold: float, eleven_points: bool) -> float:
    """VOCdevkit's procedure as it is usually written down: one detection after another, 1-based inclusive pixels."""
    positives = sum(int((~true.difficult[true.labels == label]).sum()) for true in truth)
    if positives == 0:
        return float("nan")
    guesses = [
        (float(guess.scores[i]), image, guess.boxes[i] + (1, 1, 0, 0))
        for image, guess in enumerate(found)
        for i in np.flatnonzero(guess.labels == label)
    ]
    guesses.sort(key=lambda entry: -entry[0])
    taken: set[tuple[int, int]] = set()
    right, wrong = [], []
    for _, image, box in guesses:
        best, which = -np.inf, -1
        for i in np.flatnonzero(truth[image].labels == label):
            other = truth[image].boxes[i] + (1, 1, 0, 0)
            width = min(box[2], other[2]) - max(box[0], other[0]) + 1
            height = min(box[3], other[3]) - max(box[1], other[1]) + 1
            shared = max(width, 0) * max(height, 0)
            areas = [(b[2] - b[0] + 1) * (b[3] - b[1] + 1) for b in (box, other)]
            overlap = shared / (sum(areas) - shared)
            if overlap > best:
                best, which = overlap, int(i)
        hit = miss = False
        if best > threshold:
            if not truth[image].difficult[which]:
                hit = (image, which) not in taken
                miss = not hit
                taken.add((image, which))
        else:
            miss = True
        right.append(hit)
        wrong.append(miss)
    recall = np.cumsum(right) / positives
    precision = np.cumsum(right) / np.maximum(np.cumsum(right) + np.cumsum(wrong), 1e-16)
    if eleven_points:
        return float(np.mean([max(precision[recall >= at], default=0.0) for at in np.arange(0.0, 1.1, 0.1)]))
    recall, precision = np.concatenate(([0], recall, [1])), np.concatenate(([0], precision, [0]))
    for i in range(len(precision) - 1, 0, -1):
        precision[i - 1] = max(precision[i - 1], precision[i])
    steps = np.flatnonzero(recall[1:] != recall[:-1])
    return float(((recall[steps + 1] - recall[steps]) * precision[steps + 1]).sum())


@pytest.mark.parametrize("eleven_points", [True, False])
def test_voc_rules_are_the_published_procedure(eleven_points: bool) -> None:
    truth, found = random_case(7)
    table = voc_rules(truth, found, CLASSES, eleven_points=eleven_points)
    expected = [
        [literal_voc(truth, found, label, threshold, eleven_points) for label in range(CLASSES)]
        for threshold in THRESHOLDS
    ]
    np.testing.assert_allclose(table, expected, atol=1e-12)
    assert np.isnan(table[:, -1]).all()  # the last class has no box


def one(box: tuple[float, ...], difficult: bool = False) -> Truth:
    return Truth(np.array([box]), np.array([0]), np.array([difficult]))


def guesses(*boxes: tuple[float, ...]) -> Found:
    return Found(np.array(boxes).reshape(-1, 4), np.zeros(len(boxes), dtype=int), np.linspace(0.9, 0.5, len(boxes)))


@pytest.mark.parametrize("rules", [voc_rules, coco_rules])
def test_perfect_is_a_hundred_and_nothing_is_zero(rules) -> None:
    truth, _ = random_case(3)
    perfect = [Found(true.boxes, true.labels, np.ones(len(true.labels))) for true in truth]
    nothing = [Found(np.empty((0, 4)), np.empty(0, dtype=int), np.empty(0)) for _ in truth]
    for value in summary(rules(truth, perfect, CLASSES)).values():
        assert value == pytest.approx(100)
    assert set(summary(rules(truth, nothing, CLASSES)).values()) == {0.0}


def test_a_box_is_found_once() -> None:
    box = (0.0, 0.0, 10.0, 10.0)
    recall, precision = precision_recall([one(box)], [guesses(box, box)], 0) or ((), ())
    assert list(recall) == [1, 1]
    assert list(precision) == [1, 0.5]


@pytest.mark.parametrize("rules", [voc_rules, coco_rules])
def test_difficult_boxes_neither_help_nor_harm(rules) -> None:
    easy, hard = (0.0, 0.0, 10.0, 10.0), (50.0, 50.0, 60.0, 60.0)
    truth = [one(hard, difficult=True), one(easy)]
    found = [guesses(hard, hard), guesses(easy)]
    assert summary(rules(truth, found, 1))["AP"] == pytest.approx(100)
    assert np.isnan(rules(truth[:1], found[:1], 1)).all()


def test_iou_counts_pixels_as_voc_does() -> None:
    """Pixels 1..2 and 2..3 of a row share one of three."""
    left, right = np.array([[0.0, 0.0, 2.0, 1.0]]), np.array([[1.0, 0.0, 3.0, 1.0]])
    assert box_iou(left, right)[0, 0] == pytest.approx(1 / 3)
    assert box_iou(left, right, over_left=True)[0, 0] == pytest.approx(1 / 2)
    assert box_iou(left, left + 5)[0, 0] == 0
