from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import tiny_subject
import voc_labels_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.numpy import load_file
from sklearn.svm import LinearSVC

from interclr.evaluate.base import features_of
from interclr.evaluate.draws import balanced_draw
from interclr.evaluate.low_shot import LowShot, draw
from interclr.evaluate.multilabel import open_voc_classification, targets_of
from interclr.screen import Screen
from interclr.svm import unit_rows
from interclr.types import UserError


@given(st.lists(st.integers(0, 6), min_size=1, max_size=80), st.integers(0, 2**32), st.data())
@settings(max_examples=100, deadline=None)
def test_draws_are_exactly_balanced_distinct_and_repeatable(labels: list[int], seed: int, data: st.DataObject) -> None:
    numbers = np.array(labels)
    each = data.draw(st.integers(1, int(np.unique(numbers, return_counts=True)[1].min())))
    rows = balanced_draw(numbers, each, np.random.default_rng(seed))
    assert rows.shape == (len(set(labels)), each)
    assert len(set(rows.ravel().tolist())) == rows.size
    assert np.array_equal(numbers[rows], np.repeat(np.unique(numbers)[:, None], each, axis=1))
    assert np.array_equal(rows, balanced_draw(numbers, each, np.random.default_rng(seed)))


@given(st.integers(1, 3), st.integers(0, 1000), st.integers(0, 4))
@settings(max_examples=30, deadline=None)
def test_voc_draws_follow_the_public_rule(
    tmp_path_factory: pytest.TempPathFactory, size: int, seed: int, n: int
) -> None:
    base = tmp_path_factory.getbasetemp() / "voc-draws"
    kit = base / "VOCdevkit" if base.exists() else voc_labels_tree.make(base)
    train = open_voc_classification(kit, "trainval")
    rows, signs = draw(train, size, seed, n)
    assert ((signs > 0).sum(0) == size).all()
    negatives = (train.targets < 0).sum(0)
    assert ((signs < 0).sum(0) == np.minimum(2 * size, negatives)).all()
    drawn = signs != 0
    assert np.array_equal(signs[drawn], train.targets[rows][drawn])  # never a difficult one
    assert drawn.any(1).all()


def test_draws_are_independent_of_each_other_and_of_the_other_sizes() -> None:
    train, _ = targets_of(tiny_subject.synthetic())
    drawn = [draw(train, 4, 0, number)[0].tolist() for number in range(5)]
    assert len({tuple(rows) for rows in drawn}) == 5
    assert draw(train, 4, 1, 0)[0].tolist() != drawn[0]


def test_curve_is_repeatable_equals_liblinear_and_stops_at_the_smallest_class(tmp_path: Path) -> None:
    data, subject, stream = tiny_subject.synthetic(200, 100), tiny_subject.subject(), StringIO()
    context = tiny_subject.context(tmp_path / "a", Screen(Console(file=stream, width=200)))
    figures = LowShot(draws=3).run(subject, data, context)
    assert "stops at 16 per class" in stream.getvalue()  # twenty of each class
    assert {name for name in figures if name.startswith("mAP@") and not name.endswith("std")} == {
        f"mAP@{size}" for size in (1, 2, 4, 8, 16)
    }
    assert figures == LowShot(draws=3).run(subject, data, tiny_subject.context(tmp_path / "b"))
    raw = load_file(context.out / "predictions.safetensors")
    assert data.train.labels is not None
    train, test = (unit_rows(features_of(subject, s, context).numpy()) for s in (data.train, data.test))
    rows = raw["rows_8_1"]
    assert np.bincount(data.train.labels.numpy()[rows]).tolist() == [8] * 10
    truth = np.where(data.train.labels.numpy()[rows] == 4, 1, -1)
    direct = LinearSVC(C=1.0, class_weight={1: 2, -1: 1}, dual=True, max_iter=2000, random_state=0)
    direct.fit(train[rows], truth)
    assert np.allclose(raw["scores_8_1"][:, 4], direct.decision_function(test), atol=1e-6)
    result = json.loads((context.out / "result.json").read_text())
    at_eight = next(row for row in result["draws"] if row["size"] == 8)
    assert figures["mAP@8"] == pytest.approx(np.mean(at_eight["mAP"]))
    assert figures["mAP@8_std"] == pytest.approx(np.std(at_eight["mAP"], ddof=1))  # of a sample
    assert figures["mAP"] == pytest.approx(np.mean([row["mAP"] for row in result["draws"]]))
    assert (context.out / "low-shot.png").stat().st_size > 0


def test_a_single_draw_has_no_deviation(tmp_path: Path) -> None:
    stream = StringIO()
    context = tiny_subject.context(tmp_path, Screen(Console(file=stream, width=200)))
    data = tiny_subject.synthetic(40, 40)
    figures = LowShot(draws=1, sizes=(1, 2)).run(tiny_subject.subject(), data, context)
    assert not [name for name in figures if name.endswith("_std")]
    assert f"{figures['mAP@2']:.2f} ± –" in stream.getvalue()
    assert "NaN" not in (context.out / "result.json").read_text()
    assert LowShot.qualifier("mAP", figures) == "1…2 per class"
    assert (context.out / "low-shot.png").stat().st_size > 0


def test_costs_are_chosen_on_the_draw_or_as_published_on_the_test(tmp_path: Path) -> None:
    data, subject = tiny_subject.synthetic(100, 60), tiny_subject.subject()
    fixed = [
        LowShot(sizes=(1, 4), draws=2, costs=(cost,)).run(subject, data, tiny_subject.context(tmp_path / str(cost)))
        for cost in (0.01, 10.0)
    ]
    test = LowShot(sizes=(1, 4), draws=2, costs=(0.01, 10.0), choose="test")
    best = test.run(subject, data, tiny_subject.context(tmp_path / "test"))
    for size in (1, 4):
        assert best[f"mAP@{size}"] == max(each[f"mAP@{size}"] for each in fixed)
    context = tiny_subject.context(tmp_path / "own")
    LowShot(sizes=(1, 4), draws=2, costs=(0.01, 1.0, 10.0)).run(subject, data, context)
    result = json.loads((context.out / "result.json").read_text())
    assert result["draws"][0]["costs"] == [1.0, 1.0]
    assert set(result["draws"][1]["costs"]) <= {0.01, 1.0, 10.0}


def test_voc_from_a_devkit(tmp_path: Path) -> None:
    kit, context = voc_labels_tree.make(tmp_path), tiny_subject.context(tmp_path / "out")
    figures = LowShot(sizes=(1, 8), draws=2, voc=kit).run(
        tiny_subject.subject(), tiny_subject.synthetic(20, 20), context
    )
    assert figures["mAP@8"] > figures["mAP@1"] - 5
    assert "top1" not in figures


def test_one_example_per_class_works_and_too_large_sizes_do_not(tmp_path: Path) -> None:
    subject, data = tiny_subject.subject(), tiny_subject.labelled([0, 1, 2], [0, 1, 2])
    figures = LowShot(draws=2).run(subject, data, tiny_subject.context(tmp_path))
    assert figures["mAP@1_std"] == 0  # only one draw is possible
    with pytest.raises(UserError, match="only 1 training image, fewer than the smallest size 2"):
        LowShot(sizes=(2, 4)).run(subject, data, tiny_subject.context(tmp_path))
