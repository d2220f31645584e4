from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import tiny_subject
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from interclr.data.builtin import open_source
from interclr.data.source import ArraySource
from interclr.evaluate.base import LabelledData
from interclr.evaluate.semi_supervised import SemiSupervised, rows_of_list
from interclr.evaluate.session import _settings
from interclr.screen import Screen
from interclr.types import UserError


class Interrupting(Screen):
    """Stops the run, as Ctrl-C would, at a step of the second part."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(quiet=True)
        self.at, self.what = at, what

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[int, int], None]]:
        def progress(done: int, total: int) -> None:
            if self.what in what and done >= self.at:
                raise KeyboardInterrupt

        yield progress


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    data, subject = tiny_subject.synthetic(400, 60), tiny_subject.subject()
    protocol = SemiSupervised(epochs=4, drops=(2, 3))
    whole = protocol.run(subject, data, tiny_subject.context(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        protocol.run(subject, data, tiny_subject.context(tmp_path / "part", Interrupting(13, "on 10%")))
    assert sorted(path.name for path in (tmp_path / "part/checkpoint").iterdir()) == ["1%.pt", "10%.pt"]
    assert not (tmp_path / "part/result.json").exists()
    stream = StringIO()
    screen = Screen(Console(file=stream, width=200))
    assert protocol.run(subject, data, tiny_subject.context(tmp_path / "part", screen)) == whole
    assert "continuing on 1% after epoch 4" in stream.getvalue()
    assert "continuing on 10% after epoch 2" in stream.getvalue()
    one, other = (load_file(tmp_path / name / "predictions.safetensors") for name in ("whole", "part"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (tmp_path / "part/checkpoint").exists()


def test_a_checkpoint_of_something_else_or_a_torn_one_is_not_continued(tmp_path: Path) -> None:
    data, subject = tiny_subject.synthetic(200, 40), tiny_subject.subject()
    protocol = SemiSupervised(fractions=(0.1,), epochs=2)
    whole = protocol.run(subject, data, tiny_subject.context(tmp_path / "whole"))
    context = tiny_subject.context(tmp_path / "other", Interrupting(4, "on 10%"))
    with pytest.raises(KeyboardInterrupt):
        SemiSupervised(fractions=(0.1,), epochs=2, backbone_lr=0.5).run(subject, data, context)
    assert protocol.run(subject, data, tiny_subject.context(tmp_path / "other")) == whole
    folder = tiny_subject.context(tmp_path / "torn").out / "checkpoint"
    folder.mkdir()
    (folder / "10%.pt").write_bytes(b"PK torn")
    assert protocol.run(subject, data, tiny_subject.context(tmp_path / "torn")) == whole


def test_fine_tuning_learns_and_leaves_the_subject_alone(tmp_path: Path) -> None:
    data, subject = tiny_subject.synthetic(1000, 200), tiny_subject.subject(16)
    subject.backbone.requires_grad_(False)
    before = copy.deepcopy(subject.backbone.state_dict())
    context = tiny_subject.context(tmp_path)
    protocol = SemiSupervised(fractions=(0.5,), epochs=10, drops=(6, 8), backbone_lr=0.05)
    figures = protocol.run(subject, data, context)
    assert figures["top1@50%"] > 20  # chance is 10
    assert figures["top5@50%"] > figures["top1@50%"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in subject.backbone.state_dict().items())
    assert not any(parameter.requires_grad for parameter in subject.backbone.parameters())
    assert subject.backbone.training  # as it came
    raw = load_file(context.out / "predictions.safetensors")
    assert data.train.labels is not None
    assert data.train.labels[raw["rows_50%"]].bincount().tolist() == [50] * 10
    assert figures["top1@50%"] == pytest.approx(100 * (raw["prediction_50%"] == raw["label"]).double().mean().item())
    result = json.loads((context.out / "result.json").read_text())
    assert result["parts"][0]["loss_by_epoch"][-1] < result["parts"][0]["loss_by_epoch"][0]
    assert result["parts"][0]["batch"] == 500 // 16
    assert (context.out / "semi-supervised.png").stat().st_size > 0


def test_cudnn_is_used_and_repeatable_while_training(tmp_path: Path) -> None:
    seen: list[tuple[str, tuple[bool, bool]]] = []

    class Watching(Screen):
        @contextmanager
        def working(self, what: str) -> Iterator[Callable[[int, int], None]]:
            cudnn = torch.backends.cudnn
            yield lambda done, total: seen.append((what.split()[0], (cudnn.enabled, cudnn.deterministic)))

    context = tiny_subject.context(tmp_path, Watching(quiet=True))
    SemiSupervised(fractions=(0.1,), epochs=1).run(tiny_subject.subject(), tiny_subject.synthetic(200, 40), context)
    assert {state for what, state in seen if what == "fine-tuning"} == {(True, True)}


def test_settings_of_the_paper() -> None:
    protocol = SemiSupervised()
    assert [protocol.rate(epoch) for epoch in (0, 11, 12, 15, 16, 19)] == pytest.approx([1, 1, 0.2, 0.2, 0.04, 0.04])
    assert (protocol._decay(0.01), protocol._decay(0.0101), protocol._decay(0.1)) == (5e-4, 5e-4, 1e-4)
    assert (protocol.backbone_lr, protocol.head_lr, protocol.batch, protocol.epochs) == (0.01, 1.0, 256, 20)


def test_drops_keep_their_shape_over_another_number_of_epochs() -> None:
    found = {epochs: SemiSupervised(epochs=epochs).drop_epochs for epochs in (20, 100, 10, 4, 2, 1)}
    assert found == {20: (12, 16), 100: (60, 80), 10: (6, 8), 4: (2, 3), 2: (1,), 1: ()}
    ten = SemiSupervised(epochs=10)
    assert [ten.rate(epoch) for epoch in (0, 5, 6, 7, 8, 9)] == pytest.approx([1, 1, 0.2, 0.2, 0.04, 0.04])
    assert SemiSupervised(epochs=10, drops=(3,)).drop_epochs == (3,)
    assert SemiSupervised(drops=()).rate(19) == 1
    with pytest.raises(UserError, match=r"^drops: 10, 16 would never come in 10 epochs; name earlier ones, or leave"):
        _settings(SemiSupervised, ["epochs=10", "drops=[3,10,16]"])


def test_a_checkpoint_of_other_drops_is_not_continued(tmp_path: Path) -> None:
    data, subject = tiny_subject.synthetic(200, 40), tiny_subject.subject()
    with pytest.raises(KeyboardInterrupt):
        SemiSupervised(fractions=(0.1,), epochs=4, drops=(1,)).run(
            subject, data, tiny_subject.context(tmp_path, Interrupting(4, "on 10%"))
        )
    stream = StringIO()
    context = tiny_subject.context(tmp_path, Screen(Console(file=stream, width=200)))
    SemiSupervised(fractions=(0.1,), epochs=4).run(subject, data, context)
    assert "continuing" not in stream.getvalue()
    assert json.loads((tmp_path / "result.json").read_text())["drops"] == [2, 3]


def test_the_weight_decay_is_that_of_the_share_asked_for(tmp_path: Path) -> None:
    """Whole images of each class make five per cent of one; a list is the share that it is."""
    data, stream = tiny_subject.labelled([0] * 20 + [1] * 20, [0, 1]), StringIO()
    context = tiny_subject.context(tmp_path, Screen(Console(file=stream, width=200)))
    parts = SemiSupervised(fractions=(0.01, 0.02, 0.1))._parts(data, context)
    assert [(len(part.rows), part.decay) for part in parts] == [(2, 5e-4), (2, 1e-4), (4, 1e-4)]
    assert SemiSupervised(weight_decay=0.0)._parts(data, context)[0].decay == 0
    assert stream.getvalue().splitlines() == [  # once, and nothing of ten per cent, which are ten per cent
        "1% means 2 of 40 images (5 %) here: 1 of each class",
        "2% means 2 of 40 images (5 %) here: 1 of each class",
    ]
    listed = tmp_path / "one.txt"
    listed.write_text(f"{data.train.name_of(0)}\n{data.train.name_of(39)}\n")
    assert SemiSupervised(lists=(listed,))._parts(data, context)[0].decay == 1e-4


def test_parts_of_the_same_images_are_told(tmp_path: Path) -> None:
    data, stream = tiny_subject.labelled([0] * 4 + [1] * 4, [0, 1]), StringIO()
    context = tiny_subject.context(tmp_path, Screen(Console(file=stream, width=200)))
    SemiSupervised(fractions=(0.5, 0.9, 1.0))._parts(data, context)
    assert stream.getvalue().splitlines() == [
        "90% means 8 of 8 images (100 %) here: 4 of each class",
        "! 90% and 100% hold the same 8 images",
    ]


def test_settings_of_its_views_add_up_and_leave_the_others_alone() -> None:
    protocol = _settings(SemiSupervised, ["view.flip=0", "view.grey=0.1"])
    assert isinstance(protocol, SemiSupervised)
    assert (protocol.view.flip, protocol.view.grey, protocol.view.crop_scale) == (0, 0.1, (0.08, 1.0))


def test_at_least_one_of_each_class_and_never_more_than_the_smallest_has(tmp_path: Path) -> None:
    stream = StringIO()
    context = tiny_subject.context(tmp_path, Screen(Console(file=stream, width=200)))
    data = tiny_subject.labelled([0] * 40 + [1] * 3 + [4] * 20, [0, 1, 4])
    protocol = SemiSupervised(fractions=(0.001, 0.5), epochs=1)
    parts = protocol._parts(data, context)
    assert data.train.labels is not None
    assert [data.train.labels[part.rows].tolist() for part in parts] == [[0, 1, 4], [0] * 3 + [1] * 3 + [4] * 3]
    said = stream.getvalue()
    assert "50% means 9 of 63 images (14.3 %) here: 3 of each class, and the smallest has no more" in said
    assert "0.1% means 3 of 63 images (4.76 %) here: 1 of each class\n" in said
    figures = protocol.run(tiny_subject.subject(), data, context)  # a class number that nobody uses does no harm
    assert set(figures) == {"top1@0.1%", "images@0.1%", "top1@50%", "images@50%"}  # of five classes no top-5
    assert (figures["images@0.1%"], figures["images@50%"]) == (3, 9)
    assert re.search(r"0\.1% *│ *3 *│", stream.getvalue())  # the table, too, tells how many images


def test_folders_are_streamed_and_lists_name_the_images(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2)):
        for label, colour in (("blue", (20, 20, 200)), ("red", (200, 20, 20))):
            folder = tmp_path / "set" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                size = (int(random.integers(30, 50)), 36, 3)
                pixels = np.clip(random.normal(colour, 20, size), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{label}{number}.png")
    data = LabelledData(open_source(tmp_path / "set"), open_source(tmp_path / "set", "test"), "colours")
    listed = tmp_path / "some.txt"
    listed.write_text("".join(f"{colour}{n}.png\n" for colour in ("red", "blue") for n in range(4)))
    protocol = SemiSupervised(lists=(listed,), epochs=2, workers=0)
    context = tiny_subject.context(tmp_path / "out")
    figures = protocol.run(tiny_subject.subject(), data, context)
    assert set(figures) == {"top1@some", "images@some"}
    rows = load_file(context.out / "predictions.safetensors")["rows_some"].tolist()
    assert sorted(data.train.name_of(row).rpartition("/")[2] for row in rows) == sorted(listed.read_text().split())
    listed.write_text("red0.png\nyellow.png\n")
    with pytest.raises(UserError, match=r"1 of the 2 .*yellow"):
        rows_of_list(listed, data.train)
    listed.write_text("red0.png\nred1.png\n")
    with pytest.raises(UserError, match="one class only"):
        protocol.run(tiny_subject.subject(), data, context)
    with pytest.raises(UserError, match="cannot read the list"):
        rows_of_list(tmp_path / "none.txt", data.train)


def test_divergence_and_missing_labels_are_errors(tmp_path: Path) -> None:
    data, context = tiny_subject.synthetic(100, 20), tiny_subject.context(tmp_path)
    with pytest.raises(UserError, match="diverged"):
        SemiSupervised(fractions=(0.5,), epochs=2, backbone_lr=1e30).run(tiny_subject.subject(), data, context)
    data.test.labels = None
    with pytest.raises(UserError, match="20 of 20 test images"):
        SemiSupervised().run(tiny_subject.subject(), data, context)


def test_a_list_is_by_whole_names_or_by_base_names(tmp_path: Path) -> None:
    """A left-out a/1.png must not turn into b/1.png, which then has its base name alone."""
    names = ["a/2.png", "b/1.png"]
    source = ArraySource(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), name="some", names=names)
    path = tmp_path / "list.txt"
    path.write_text("a/1.png\na/2.png\n")
    assert rows_of_list(path, source, some_left_out=True) == [0]
    with pytest.raises(UserError, match="1 of the 2 images named"):
        rows_of_list(path, source)
    path.write_text("x/1.png\n2.png\n")
    assert rows_of_list(path, source) == [0, 1]
