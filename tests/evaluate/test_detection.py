"""Detection on a VOC devkit made here: reading it, learning from it, going on after a stop, and its scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from box_tree import COLOURS, HEIGHT, WIDTH, write_annotation, write_year
from torchvision.models.resnet import resnet18

from interclr.evaluate import detection
from interclr.evaluate.average_precision import Found, coco_rules, summary, voc_rules
from interclr.evaluate.base import Context, Subject
from interclr.evaluate.detection import Detection, predictions, truth_of
from interclr.evaluate.faster_rcnn import build
from interclr.evaluate.voc_boxes import MAX_XML_BYTES, find_splits, read_boxes
from interclr.models import Backbone, BackboneConfig
from interclr.screen import Screen
from interclr.types import UserError


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """VOC2007 with trainval and test, VOC2012 with trainval and a test list that must not be taken."""
    write_year(tmp_path / "VOCdevkit" / "VOC2007", {"trainval": 12, "test": 6}, seed=1)
    write_year(tmp_path / "VOCdevkit" / "VOC2012", {"trainval": 8, "test": 2}, seed=2)
    return tmp_path / "VOCdevkit"


def subject(config: BackboneConfig | None = None) -> Subject:
    torch.manual_seed(0)
    backbone = (config or BackboneConfig(backbone="resnet10", width=8)).build()
    return Subject(backbone, "tiny", 32, (0.48, 0.46, 0.41), (0.23, 0.22, 0.23))


def context(folder: Path, seed: int = 0) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(folder, torch.device("cpu"), Screen(quiet=True), seed)


def small(kit: Path, **changes: object) -> Detection:
    settings: dict[str, object] = {
        "data": kit,
        "iterations": 6,
        "batch": 4,
        "warmup": 2,
        "short_sides": (48, 64),
        "test_short_side": 64,
        "long_side": 128,
        "anchors": (16, 32),
        "regions": 16,
        "test_proposals": 30,
        "precise_norm": 2,
        "checkpoint_every": 2,
    }
    return Detection.model_validate({**settings, **changes})


def test_the_devkit_is_read_as_voc07_and_12(kit: Path) -> None:
    for folder in (kit, kit.parent):
        train, test = find_splits(folder)
        assert [str(split) for split in train] == ["VOC2007/trainval", "VOC2012/trainval"]
        assert [str(split) for split in test] == ["VOC2007/test"]
    learn = read_boxes(train)
    assert len(learn.images) == 20
    assert learn.classes == tuple(sorted(COLOURS))
    assert learn.images[0].name == "VOC2007/000000"
    assert (learn.clipped, learn.dropped, learn.resized, learn.empty) == (0, 0, 0, 0)
    assert any(image.difficult.any() for image in learn.images)
    assert [str(split) for split in find_splits(kit, ("VOC2012/trainval",), ("VOC2012/test",))[1]] == ["VOC2012/test"]


def test_boxes_lie_where_the_colour_is(kit: Path) -> None:
    learn = read_boxes(find_splits(kit)[0])
    for image in learn.images[:5]:
        pixels = detection._pixels(image)
        for box, label in zip(image.boxes.astype(int), image.labels, strict=True):
            inside = pixels[:, box[1] : box[3], box[0] : box[2]].flatten(1).float().mean(1)
            wanted = torch.tensor(COLOURS[learn.classes[label]], dtype=torch.float32)
            assert (inside - wanted).abs().max() < 25


def test_a_single_folder_and_its_named_lists(tmp_path: Path) -> None:
    folder = write_year(tmp_path / "mine", {"train": 3, "val": 2, "odd": 1})
    train, test = find_splits(folder)
    assert ([str(s) for s in train], [str(s) for s in test]) == (["train"], ["val"])
    assert [str(s) for s in find_splits(folder, ("odd",))[0]] == ["odd"]
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        find_splits(folder, ("nowhere",))
    with pytest.raises(UserError, match="has not VOC's layout"):
        find_splits(tmp_path / "mine" / "Annotations")


def test_boxes_outside_are_clipped_and_empty_ones_dropped(tmp_path: Path) -> None:
    folder = write_year(tmp_path / "mine", {"train": 2, "val": 1})
    objects = [
        ("cat", (-10, 5, 20, 100), False),  # reaches outside
        ("cat", (0, 1, WIDTH, HEIGHT), False),  # counted from 0: no fault
        ("cat", (30, 10, 20, 20), False),  # no area
        ("cat", (200, 10, 220, 20), False),  # nothing of it inside
        ("dog", (7, 7, 7, 7), True),  # one pixel
    ]
    write_annotation(folder, "000000", objects, size=(99, 99))
    write_annotation(folder, "000001", [])
    boxed = read_boxes(find_splits(folder)[0])
    assert (boxed.clipped, boxed.dropped, boxed.resized, boxed.empty) == (1, 2, 1, 1)
    assert boxed.images[0].boxes.tolist() == [[0, 4, 20, HEIGHT], [0, 0, WIDTH, HEIGHT], [6, 6, 7, 7]]
    assert boxed.images[0].difficult.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no annotation"),
        ("<annotation>", "not well-formed"),
        ("", "not well-formed"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><annotation>&b;</annotation>', "document type"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', "document type"),
        ("<annotation><object><name>cat</name></object></annotation>", "no bndbox"),
        ("<annotation><object><bndbox/></object></annotation>", "no name"),
        (
            "<annotation><object><name>cat</name><bndbox><xmin>nan</xmin></bndbox></object></annotation>",
            "xmin of a box is 'nan'",
        ),
        (" " * (MAX_XML_BYTES + 1), "is not read"),
    ],
)
def test_a_bad_annotation_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    folder = write_year(tmp_path / "mine", {"train": 2, "val": 1})
    file = folder / "Annotations" / "000001.xml"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_boxes(find_splits(folder)[0])
    assert "000001.xml" in str(caught.value)


def test_other_bad_input_is_named(tmp_path: Path) -> None:
    folder = write_year(tmp_path / "mine", {"train": 2, "val": 1})
    train, test = find_splits(folder)
    write_annotation(folder, "000002", [("zebra", (1, 1, 9, 9), False)])
    with pytest.raises(UserError, match=r"000002\.xml has an object of the unknown class 'zebra'"):
        read_boxes(test, tuple(COLOURS))
    (folder / "JPEGImages" / "000001.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"000001\.jpg"):
        read_boxes(train)
    (folder / "JPEGImages" / "000001.jpg").unlink()
    with pytest.raises(UserError, match="there is no image"):
        read_boxes(train)
    train[0].file.write_text("../../secret\n")
    with pytest.raises(UserError, match="outside"):
        read_boxes(train)
    train[0].file.write_text("\n")
    with pytest.raises(UserError, match="no image is listed"):
        read_boxes(train)


def test_it_learns_and_writes_everything(kit: Path, tmp_path: Path) -> None:
    settings = small(kit, iterations=60, lr=0.02, warmup=5, batch=6, checkpoint_every=100, precise_norm=5)
    figures = settings.run(subject(), None, context(tmp_path / "out"))
    assert set(figures) == {f"{rule}{name}" for rule in ("", "coco_") for name in ("AP", "AP50", "AP75")}
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    losses = [loss for _, loss in result["losses"]]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    assert result["figures"] == figures
    assert result["training"]["images"] == 20
    written = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [image["id"] for image in written["images"]] == [1, 2, 3, 4, 5, 6]
    assert {"image_id", "category_id", "bbox", "score"} == set(written["annotations"][0])
    for name in ("precision_recall.png", "detections.png", "checkpoint.pt"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    assert figures["AP50"] > 1


def test_boxes_are_not_rounded_to_bfloat16(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the network computes in bfloat16; anchors, proposals and losses do not."""
    seen: list[torch.Tensor] = []
    inside: list[torch.dtype] = []

    def watched(*given: Any, **named: Any) -> Any:
        model = build(*given, **named)
        model.rpn.anchor_generator.register_forward_hook(lambda *found: seen.extend(found[2]))
        model.rpn.register_forward_hook(lambda *found: seen.extend([*found[2][0], *found[2][1].values()]))
        model.backbone.layer1[0].conv1.register_forward_hook(lambda *found: inside.append(found[2].dtype))
        return model

    monkeypatch.setattr(detection, "build", watched)
    half = replace(context(tmp_path / "out"), autocast=torch.bfloat16)
    small(kit, iterations=2, precise_norm=1).run(subject(), None, half)
    assert {each.dtype for each in seen} == {torch.float32}
    assert set(inside) == {torch.bfloat16}


def test_a_stopped_run_goes_on_bit_for_bit(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = small(kit).run(subject(), None, context(whole))
    real, calls = detection.train_step, []

    def stops(*arguments: object) -> float:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(detection, "train_step", stops)
    with pytest.raises(KeyboardInterrupt):
        small(kit).run(subject(), None, context(parts))
    assert torch.load(parts / "checkpoint.pt", weights_only=True)["done"] == 2
    calls[:] = [1] * 10
    torch.rand(7)  # the state of the global generator is of no account
    assert small(kit).run(subject(), None, context(parts)) == expected
    assert len(calls) == 14  # iterations 2 to 5, not all six
    one, other = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, parts))
    assert one["losses"] == other["losses"]
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    assert (whole / "predictions.json").read_text() == (parts / "predictions.json").read_text()

    small(kit).run(subject(), None, context(parts))
    assert len(calls) == 14  # finished: only tested again
    small(kit, lr=0.001).run(subject(), None, context(parts))
    assert len(calls) == 20  # another plan starts again
    (parts / "checkpoint.pt").write_bytes(b"broken")
    small(kit, lr=0.001).run(subject(), None, context(parts))
    assert len(calls) == 26


def test_the_subject_is_left_as_it_was(kit: Path, tmp_path: Path) -> None:
    mine = subject()
    mine.backbone.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in mine.backbone.state_dict().items()}
    state = torch.random.get_rng_state()
    small(kit, iterations=2, keep_empty=True, difficult_in_training=False).run(mine, None, context(tmp_path / "out"))
    assert all(torch.equal(before[name], tensor) for name, tensor in mine.backbone.state_dict().items())
    assert not any(parameter.requires_grad for parameter in mine.backbone.parameters())
    assert torch.equal(state, torch.random.get_rng_state())
    trained = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["model"]
    assert not torch.equal(trained["backbone.stem.0.weight"], before["network.conv1.weight"])


def test_perfect_detections_score_a_hundred_and_none_zero(kit: Path) -> None:
    judge = read_boxes(find_splits(kit)[1])
    truth = truth_of(judge)
    perfect = [Found(image.boxes, image.labels, np.ones(len(image.boxes))) for image in judge.images]
    nothing = [Found(np.empty((0, 4)), np.empty(0, dtype=int), np.empty(0)) for _ in judge.images]
    for rules in (voc_rules, coco_rules):
        assert summary(rules(truth, perfect, 3))["AP"] == pytest.approx(100)
        assert summary(rules(truth, nothing, 3))["AP"] == 0
    assert len(predictions(judge, perfect)["annotations"]) == judge.boxes


def test_the_schedule_is_the_papers() -> None:
    paper = Detection()
    assert paper.rate(0) == pytest.approx(0.02 * 0.001)
    assert paper.rate(50) == pytest.approx(0.02, rel=0.51)
    rates = [paper.rate(i) for i in (100, 17_999, 18_000, 21_999, 22_000, 23_999)]
    assert rates == pytest.approx([0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002])
    assert paper.short_sides == (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)


@pytest.mark.parametrize(("stem", "stride"), [("standard", 16), ("strided", 8), ("small", 4)])
def test_the_stride_follows_the_stem(stem: str, stride: int) -> None:
    mine = subject(BackboneConfig.model_validate({"backbone": "resnet10", "width": 8, "stem": stem}))
    model = build(
        mine,
        3,
        anchors=(16,),
        regions=8,
        test_proposals=10,
        short_sides=(64,),
        long_side=64,
        extra_norm=False,
    )
    assert (model.backbone.stride, model.backbone.out_channels) == (stride, 32)


def test_resnet18_of_torchvision_is_cut_into_features_and_head() -> None:
    network = resnet18()
    network.fc = torch.nn.Identity()
    mine = Subject(Backbone(network, 512), "resnet18", 224, (0.5,) * 3, (0.25,) * 3)
    model = build(
        mine,
        20,
        anchors=(32, 64, 128, 256, 512),
        regions=8,
        test_proposals=10,
        short_sides=(96,),
        long_side=128,
        extra_norm=True,
    )
    assert (model.backbone.stride, model.backbone.out_channels) == (16, 256)
    assert torch.equal(model.roi_heads.box_head.layer4[1].conv2.weight, network.layer4[1].conv2.weight)
    assert model.rpn.head.cls_logits.out_channels == 15
    assert model.roi_heads.box_predictor.cls_score.out_features == 21


def test_a_backbone_without_four_stages_is_refused(kit: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="four stages"):
        small(kit).run(subject(BackboneConfig(backbone="resnet8", width=8)), None, context(tmp_path / "out"))


def test_an_image_in_both_lists_is_refused(kit: Path, tmp_path: Path) -> None:
    lists = kit / "VOC2007" / "ImageSets" / "Main"
    (lists / "test.txt").write_text("000000\n000012\n")
    with pytest.raises(UserError, match="both the training and the test"):
        small(kit).run(subject(), None, context(tmp_path / "out"))


def test_a_loss_that_is_no_number_ends_the_run(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "train_step", lambda *_: float("nan"))
    with pytest.raises(UserError, match="lower lr"):
        small(kit).run(subject(), None, context(tmp_path / "out"))
    assert not (tmp_path / "out" / "checkpoint.pt").exists()
