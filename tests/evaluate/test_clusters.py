from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from torch import nn

from interclr.data.source import ArraySource
from interclr.evaluate.base import Context, LabelledData, Subject
from interclr.evaluate.clusters import Clusters, cluster_scores
from interclr.models import Backbone
from interclr.screen import Screen
from interclr.types import UserError


def setting(tmp_path: Path, labelled: bool = True) -> tuple[Subject, LabelledData, Context]:
    """Images of three plain colours: k-means finds them."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    pixels = torch.randint(0, 30, (90, 3, 8, 8), generator=generator)
    pixels[torch.arange(90), labels] += 200
    source = ArraySource(pixels.byte(), labels if labelled else None, name="colours", classes=("red", "green", "blue"))
    subject = Subject(Backbone(nn.Flatten(), 192), "pixels", 8, (0.5,) * 3, (0.25,) * 3)
    tmp_path.mkdir(exist_ok=True)
    return subject, LabelledData(source, source, "colours"), Context(tmp_path, torch.device("cpu"), Screen(quiet=True))


def test_scores_against_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(7, (500,), generator=generator)
    clusters = torch.where(
        torch.rand(500, generator=generator) < 0.6, labels, torch.randint(11, (500,), generator=generator)
    )
    scores = cluster_scores(clusters * 3, labels)  # ids with gaps
    assert scores["nmi"] == pytest.approx(normalized_mutual_info_score(labels, clusters), abs=1e-9)
    assert scores["ari"] == pytest.approx(adjusted_rand_score(labels, clusters), abs=1e-9)
    commonest = sum(int(labels[clusters == c].bincount().max()) for c in clusters.unique())
    assert scores["purity"] == pytest.approx(commonest / 500)
    assert (scores["clusters"], scores["classes"]) == (11, 7)
    assert "accuracy" not in scores


def test_matched_accuracy_and_unlabelled_images() -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 1, -1])
    scores = cluster_scores(torch.tensor([1, 1, 0, 0, 0, 0, 1]), labels)
    assert scores["accuracy"] == pytest.approx(100 * 5 / 6)
    assert cluster_scores(labels[:6], labels[:6]) == {
        "nmi": pytest.approx(1), "ari": 1, "purity": 1, "clusters": 2, "classes": 2, "accuracy": 100,
    }  # fmt: skip
    with pytest.raises(UserError, match="no image has a label"):
        cluster_scores(torch.tensor([0, 1]), torch.tensor([-1, -1]))


def test_thousands_of_classes_are_not_matched() -> None:
    many = torch.arange(4001)
    assert "accuracy" not in cluster_scores(many, many)
    assert cluster_scores(many[:300], many[:300])["accuracy"] == 100


def test_k_means_of_the_features(tmp_path: Path) -> None:
    first = Clusters().run(*setting(tmp_path / "a"))
    assert first["accuracy"] == 100
    assert first["nmi"] == pytest.approx(1)
    assert first == Clusters().run(*setting(tmp_path / "b"))
    assert Clusters(k=5).run(*setting(tmp_path / "c"))["clusters"] == 5
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["sizes"] == [30, 30, 30]
    assert (tmp_path / "a" / "clusters.png").stat().st_size > 1000


def test_given_assignments(tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    save_file({"labels": torch.arange(90) % 3 // 2 + 4 * (torch.arange(90) % 2)}, file)
    figures = Clusters(assignments=file).run(*setting(tmp_path / "a"))
    assert figures["clusters"] == 4
    assert figures["purity"] == pytest.approx(2 / 3)
    for tensors, message in (
        ({"labels": torch.zeros(4, dtype=torch.int64)}, "training split has 90"),
        ({"other": torch.zeros(90)}, "no safetensors file with 'labels'"),
        ({"labels": torch.full((90,), -1)}, "have no cluster"),
    ):
        save_file(tensors, file)
        with pytest.raises(UserError, match=message):
            Clusters(assignments=file).run(*setting(tmp_path / "a"))
    with pytest.raises(UserError, match="no safetensors file"):
        Clusters(assignments=tmp_path / "missing").run(*setting(tmp_path / "a"))


def test_no_labels(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no training image of colours has a label"):
        Clusters().run(*setting(tmp_path, labelled=False))
