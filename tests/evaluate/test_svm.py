from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_subject
import voc_labels_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from sklearn.metrics import average_precision_score, precision_recall_curve
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.svm import LinearSVC

from interclr import svm
from interclr.data.builtin import open_source
from interclr.evaluate.base import LabelledData, features_of
from interclr.evaluate.multilabel import open_voc_classification, targets_of
from interclr.evaluate.svm import SVM
from interclr.svm import Machine, average_precision
from interclr.types import UserError

SCORED = st.lists(
    st.tuples(st.sampled_from([1, -1, -1, 0]), st.sampled_from([-1.0, -0.5, 0.0, 0.1, 0.2, 0.7])), min_size=1
)


@given(SCORED)
@settings(max_examples=100, deadline=None)
def test_average_precision_agrees_with_scikit_learn_whatever_the_ties(rows: list[tuple[int, float]]) -> None:
    signs, scores = np.array([sign for sign, _ in rows], dtype=np.int8), np.array([score for _, score in rows])
    if not (signs > 0).any():
        assert np.isnan(average_precision(signs, scores))
        return
    truth, kept = signs[signs != 0] > 0, scores[signs != 0]
    assert average_precision(signs, scores, "step") == pytest.approx(average_precision_score(truth, kept))
    precision, recall, _ = precision_recall_curve(truth, kept)  # recall falls from 1 to 0
    envelope = np.maximum.accumulate(precision[:-1])
    assert average_precision(signs, scores, "area") == pytest.approx(-(np.diff(recall) * envelope).sum())
    points = [precision[recall >= level - 1e-9].max() for level in np.arange(11) / 10]
    # scikit-learn's last point, recall 0 with precision 1, is not a threshold of the data
    points[0] = precision[:-1].max()
    assert average_precision(signs, scores, "11-point") == pytest.approx(np.mean(points))


def test_every_class_equals_a_direct_call_of_liblinear(tmp_path: Path) -> None:
    data, subject, context = tiny_subject.synthetic(), tiny_subject.subject(), tiny_subject.context(tmp_path / "svm")
    costs = (0.01, 1.0, 10.0)
    figures = SVM(costs=costs, solver="dual").run(subject, data, context)
    raw = load_file(context.out / "predictions.safetensors")
    train, test = (features_of(subject, s, context).numpy().astype(np.float64) for s in (data.train, data.test))
    train, test = (x / (np.linalg.norm(x, axis=1, keepdims=True) + 1e-5) for x in (train, test))
    assert data.train.labels is not None
    precisions = []
    for c in range(10):
        truth = np.where(data.train.labels.numpy() == c, 1, -1)

        def machine(cost: float) -> LinearSVC:
            return LinearSVC(C=cost, class_weight={1: 2, -1: 1}, dual=True, max_iter=2000, random_state=0)

        parts = StratifiedKFold(3, shuffle=True, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [
                cross_val_score(machine(cost), train, truth, cv=parts, scoring="average_precision").mean()
                for cost in costs
            ]
            fitted = machine(costs[int(np.argmax(found))]).fit(train, truth)
        assert np.allclose(raw["cross_validated_ap"][c], found, atol=1e-12)
        assert raw["costs"][c] == costs[int(np.argmax(found))]
        assert np.array_equal(raw["weights"][c], np.append(fitted.coef_[0], fitted.intercept_))
        assert np.allclose(raw["scores"][:, c], fitted.decision_function(test), atol=1e-6)
        precisions.append(average_precision(raw["targets"][:, c], raw["scores"][:, c].astype(np.float64)))
    assert figures["mAP"] == pytest.approx(100 * np.mean(precisions))
    assert figures["top1"] == pytest.approx(100 * (raw["scores"].argmax(1) == raw["label"]).mean())


def test_primal_and_dual_find_the_same_machine() -> None:
    random = np.random.default_rng(0)
    features = svm.unit_rows(random.normal(size=(300, 12)))
    signs = np.where(features[:, 0] + 0.1 * random.normal(size=300) > 0.2, 1, -1).astype(np.int8)
    dual, primal = (
        Machine(dual=kind, tolerance=1e-8, iterations=100_000).fit(features, signs, 1.0) for kind in (True, False)
    )
    assert dual[1]
    assert primal[1]
    assert np.allclose(dual[0].coef_, primal[0].coef_, atol=1e-4)


def test_the_result_is_the_same_on_any_number_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svm, "SERIAL_BELOW", 0)
    data, subject = tiny_subject.synthetic(60, 40), tiny_subject.subject()
    found = []
    for jobs in (1, 2):
        context = tiny_subject.context(tmp_path / str(jobs))
        found.append(SVM(costs=(0.1, 1.0), jobs=jobs, solver="dual").run(subject, data, context))
        assert {path.name for path in context.out.iterdir()} == {
            "predictions.safetensors",
            "result.json",
            "svm.png",
            "svm.svg",
        }
    assert found[0] == found[1]
    raw = [load_file(tmp_path / str(jobs) / "predictions.safetensors") for jobs in (1, 2)]
    assert all(np.array_equal(raw[0][name], raw[1][name]) for name in raw[0])


def test_voc_lists_and_annotations_say_the_same_and_difficult_is_honoured(tmp_path: Path) -> None:
    listed, annotated = voc_labels_tree.make(tmp_path / "a"), voc_labels_tree.make(tmp_path / "b", lists=False)
    for split in ("trainval", "test"):
        one, other = open_voc_classification(listed, split), open_voc_classification(annotated, split)
        assert one.classes == other.classes == ("blue", "green", "red")
        assert np.array_equal(one.targets, other.targets)
        assert (one.targets == 0).any()
        assert len(one.source) == 36
        assert one.source.read(0).shape == (3, 24, 30)
    for root in (listed.parent, listed / "VOC2007"):
        again = open_voc_classification(root, "test")
        assert np.array_equal(again.targets, open_voc_classification(listed, "test").targets)
        assert again.source.name_of(0) == "VOC2007/JPEGImages/000036.jpg"


def test_svm_on_voc_leaves_difficult_images_out(tmp_path: Path) -> None:
    kit, subject = voc_labels_tree.make(tmp_path), tiny_subject.subject()
    data = LabelledData(
        open_source("voc07", root=tmp_path), open_source("voc07", "test", root=tmp_path), "voc07"
    )  # found by itself
    context = tiny_subject.context(tmp_path / "one")
    figures = SVM(costs=(1.0, 10.0)).run(subject, data, context)
    named = tiny_subject.context(tmp_path / "two")
    assert SVM(costs=(1.0, 10.0), voc=kit).run(subject, tiny_subject.synthetic(20, 20), named) == figures
    assert "top1" not in figures
    raw = load_file(context.out / "predictions.safetensors")
    train, test = open_voc_classification(kit, "trainval"), open_voc_classification(kit, "test")
    rows = svm.unit_rows(features_of(subject, train.source, context).numpy())
    for c in range(3):
        kept = train.targets[:, c] != 0
        assert not kept.all()
        direct = LinearSVC(C=raw["costs"][c], class_weight={1: 2, -1: 1}, dual=True, max_iter=2000, random_state=0)
        direct.fit(rows[kept], train.targets[kept, c])
        assert np.array_equal(raw["weights"][c, :-1], direct.coef_[0])
        counted = test.targets[:, c] != 0
        truth, scores = test.targets[counted, c] > 0, raw["scores"][counted, c]
        envelope = np.maximum.accumulate(precision_recall_curve(truth, scores)[0][:-1])
        recall = precision_recall_curve(truth, scores)[1]
        assert raw["ap"][c] == pytest.approx(-(np.diff(recall) * envelope).sum())
    assert figures["mAP"] > 60  # colours are easy
    public = tiny_subject.context(tmp_path / "three")
    SVM(costs=(1.0, 10.0), difficult="negative").run(subject, data, public)
    weights = load_file(public.out / "predictions.safetensors")["weights"]
    assert not np.allclose(weights, raw["weights"])


def test_voc_trees_that_are_wrong_are_named(tmp_path: Path) -> None:
    kit = voc_labels_tree.make(tmp_path)
    main = kit / "VOC2007/ImageSets/Main"
    with pytest.raises(UserError, match="no VOC devkit"):
        open_voc_classification(tmp_path / "nothing", "test")
    with pytest.raises(UserError, match=r"val.txt is missing"):
        open_voc_classification(kit, "val")
    text = (main / "red_test.txt").read_text()
    (main / "red_test.txt").write_text(text.replace("000040", "x00040"))
    with pytest.raises(UserError, match=r"nothing of 1 images.*000040"):
        open_voc_classification(kit, "test")
    (main / "red_test.txt").write_text(text.replace("\n", " maybe\n", 1))
    with pytest.raises(UserError, match="line 1"):
        open_voc_classification(kit, "test")
    (main / "red_test.txt").unlink()
    with pytest.raises(UserError, match="differ: red"):
        targets_of(tiny_subject.synthetic(20, 20), kit)
    (main / "red_test.txt").write_text(text)
    lines = [f"{line.split()[0]} -1" for line in (main / "red_trainval.txt").read_text().splitlines()]
    (main / "red_trainval.txt").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"no positive training image.*red"):
        targets_of(tiny_subject.synthetic(20, 20), kit)


def test_classes_without_test_images_unused_numbers_and_single_examples(tmp_path: Path) -> None:
    # Class 1 is a number that nobody uses, class 3 has one training image, class 5 none to test.
    data = tiny_subject.labelled([0] * 8 + [2] * 8 + [3] + [5] * 4, [0, 0, 2, 2, 3])
    context = tiny_subject.context(tmp_path)
    figures = SVM(costs=(0.01, 1.0, 100.0)).run(tiny_subject.subject(), data, context)
    assert all(np.isfinite(value) for value in figures.values())
    result = json.loads((context.out / "result.json").read_text())
    assert [each["name"] for each in result["classes"]] == ["0", "2", "3", "5"]
    assert result["classes"][2]["cost"] == 1.0  # the one nearest to 1: nothing to cross-validate
    assert result["classes"][3]["ap"] is None
    assert result["settings"]["folds"] == 3


def test_bad_labels_are_errors(tmp_path: Path) -> None:
    subject, context = tiny_subject.subject(), tiny_subject.context(tmp_path)
    good = tiny_subject.labelled([0, 0, 1, 1], [0, 1])
    good.train.labels, labels = None, good.train.labels
    with pytest.raises(UserError, match="4 of 4 training images"):
        SVM().run(subject, good, context)
    good.train.labels = labels
    with pytest.raises(UserError, match="no training image: 2"):
        SVM().run(subject, replace(good, test=tiny_subject.labelled([0], [0, 2]).test), context)
    with pytest.raises(UserError, match="all training images of noise are of one class"):
        SVM().run(subject, tiny_subject.labelled([0, 0], [0]), context)
