from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.model_selection import LeaveOneOut, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from interclr import knn
from interclr.data.source import ArraySource
from interclr.evaluate import knn as protocol
from interclr.evaluate.base import Context, LabelledData, Subject, features_of
from interclr.evaluate.knn import KNN
from interclr.knn import auto_k
from interclr.models import Backbone
from interclr.screen import Screen
from interclr.types import UserError


def source(count: int, seed: int, classes: int = 7) -> ArraySource:
    patterns = torch.randint(0, 256, (classes, 3, 8, 8), generator=torch.Generator().manual_seed(9)).float()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    pixels = patterns[labels] * 0.3 + 60 + 70 * torch.randn(count, 3, 8, 8, generator=generator)
    return ArraySource(pixels.clamp(0, 255).byte(), labels, name="patterns")


SUBJECT = Subject(Backbone(nn.Flatten(), 192), "pixels", 8, (0.4, 0.4, 0.4), (0.25, 0.25, 0.25))


def context(out: Path, device: str = "cpu") -> Context:
    out.mkdir(parents=True, exist_ok=True)
    return Context(out, torch.device(device), Screen(quiet=True))


@pytest.mark.parametrize(("k", "temperature"), [(5, 0.1), (50, 0.07)])
def test_against_scikit_learn(k: int, temperature: float, tmp_path: Path) -> None:
    data = LabelledData(source(300, 0), source(100, 1), "patterns")
    where = context(tmp_path / "knn")
    figures = KNN(k=k, temperature=temperature).run(SUBJECT, data, where)
    bank, queries = (features_of(SUBJECT, part, where).double().numpy() for part in (data.train, data.test))
    oracle = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
    ).fit(bank, data.train.labels)
    share = oracle.predict_proba(queries)
    truth = np.asarray(data.test.labels)
    assert figures["top1"] == pytest.approx(100 * (share.argmax(1) == truth).mean())
    best_five = np.argsort(-share, 1, kind="stable")[:, :5]
    voted = np.take_along_axis(share, best_five, 1) > 0
    assert figures["top5"] == pytest.approx(100 * ((best_five == truth[:, None]) & voted).any(1).mean())
    assert (figures["k"], figures["temperature"]) == (k, temperature)
    kept = load_file(where.out / "predictions.safetensors")
    np.testing.assert_allclose(kept["votes"], share, atol=1e-4)
    assert 30 < figures["top1"] < 100
    result = json.loads((where.out / "result.json").read_text())
    assert result["figures"] == figures
    assert result["accuracy_by_k"][str(k)]["top1"] == figures["top1"]
    one = KNeighborsClassifier(1, metric="cosine", algorithm="brute").fit(bank, data.train.labels)
    assert result["accuracy_by_k"]["1"]["top1"] == pytest.approx(100 * one.score(queries, truth))
    assert (where.out / "knn.png").stat().st_size > 1000


def test_a_table_of_votes_of_many_classes_is_made_in_parts_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = LabelledData(source(300, 0), source(100, 1), "patterns")
    whole = KNN(k=20).run(SUBJECT, data, context(tmp_path / "whole"))
    monkeypatch.setattr(protocol, "VOTES", 7 * data.classes)  # seven images at once
    assert KNN(k=20).run(SUBJECT, data, context(tmp_path / "parts")) == whole
    one, other = (load_file(tmp_path / name / "predictions.safetensors") for name in ("whole", "parts"))
    assert one.keys() - other.keys() == {"votes"}
    for name, tensor in other.items():
        assert torch.equal(tensor, one[name])
    curves = [json.loads((tmp_path / name / "result.json").read_text())["accuracy_by_k"] for name in ("whole", "parts")]
    assert curves[0] == curves[1]


def test_leave_one_out_against_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = source(299, 0)
    data, where = LabelledData(train, source(50, 1), "patterns"), context(tmp_path / "knn")
    monkeypatch.setattr(knn, "CHUNK_ELEMENTS", 40 * len(train))  # 299 rows in parts of 40 ...
    monkeypatch.setattr("interclr.evaluate.knn.ROWS", 70)  # ... of parts of 70
    figures = KNN(k=9, leave_one_out=True).run(SUBJECT, data, where)
    features, labels = features_of(SUBJECT, train, where).double().numpy(), np.asarray(train.labels)
    oracle = KNeighborsClassifier(
        9, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / 0.1)
    )
    right = cross_val_predict(oracle, features, labels, cv=LeaveOneOut()) == labels
    assert figures["leave_one_out"] == pytest.approx(100 * right.mean())
    assert 30 < figures["leave_one_out"] < 100
    plain = KNN(k=9).run(SUBJECT, data, where)
    assert plain == {name: value for name, value in figures.items() if name != "leave_one_out"}


def test_left_out_of_its_own_neighbours_is_the_row_not_its_copies() -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    similarity, nearest = knn.nearest_rows(rows, rows, 5, own_from=0)
    assert nearest.tolist() == [[1, 2], [0, 2], [0, 1]]
    assert similarity[:2].tolist() == [[1, 0], [1, 0]]
    assert knn.nearest_rows(rows, rows[1:], 2, own_from=1)[1].tolist() == [[0, 2], [0, 1]]
    assert knn.nearest_rows(rows, rows, 1)[1].flatten().tolist()[2] == 2  # without it, itself


def test_a_class_without_a_vote_is_not_among_the_five(tmp_path: Path) -> None:
    data = LabelledData(source(300, 0), source(100, 1), "patterns")
    figures = KNN(k=1).run(SUBJECT, data, context(tmp_path / "knn"))
    assert figures["top5"] == figures["top1"] < 100  # one neighbour votes for one class


def test_with_five_classes_there_is_no_top_5_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = LabelledData(source(40, 0, 5), source(20, 1, 5), "patterns")
    where = Context(context(tmp_path / "knn").out, torch.device("cpu"), Screen())
    figures = KNN(k=40).run(SUBJECT, data, where)
    assert set(figures) == {"top1", "k", "temperature"}
    printed = capsys.readouterr().out
    assert "top-5" not in printed
    assert all(word in printed for word in ("top-1 %", "k", "40", "0.1"))


def test_more_neighbours_than_images_are_refused(tmp_path: Path) -> None:
    data = LabelledData(source(40, 0, 3), source(20, 1, 3), "patterns")
    with pytest.raises(UserError, match=r"^k=41 .* patterns: 40 at most"):
        KNN(k=41).run(SUBJECT, data, context(tmp_path))


def test_by_default_as_many_neighbours_as_while_training(tmp_path: Path) -> None:
    data = LabelledData(source(150, 0, 3), source(20, 1, 3), "patterns")
    assert KNN().run(SUBJECT, data, context(tmp_path))["k"] == auto_k(150) == 3
    assert [auto_k(images) for images in (1, 60, 5_000, 10_000, 50_000)] == [1, 1, 100, 200, 200]


def test_bad_labels(tmp_path: Path) -> None:
    train, test = source(40, 0, 3), source(20, 1, 5)
    with pytest.raises(UserError, match="2 classes of the test split have no training image"):
        KNN().run(SUBJECT, LabelledData(train, test, "patterns"), context(tmp_path))
    test.labels = None
    with pytest.raises(UserError, match="20 of 20 test images of patterns have no label"):
        KNN().run(SUBJECT, LabelledData(train, test, "patterns"), context(tmp_path))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_agrees_with_cpu(tmp_path: Path) -> None:
    data = LabelledData(source(300, 0), source(100, 1), "patterns")
    on_cpu, on_gpu = (KNN(k=20).run(SUBJECT, data, context(tmp_path / d / "knn", d)) for d in ("cpu", "cuda"))
    assert on_gpu == pytest.approx(on_cpu, abs=1.01)
