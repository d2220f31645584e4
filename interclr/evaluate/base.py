"""The seam for evaluations: a protocol is one file with one class of settings whose ``run`` returns named figures."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from interclr.data.folder import folders_and_others, strays
from interclr.data.reading import Unreadable
from interclr.data.source import FileSource, Source
from interclr.data.stream import in_order
from interclr.data.views import centre_crop
from interclr.features import embed_all
from interclr.models import Backbone
from interclr.run import checkpoint
from interclr.run.files import save_tensors, write_text
from interclr.run.folder import command_line, environment
from interclr.screen import Screen
from interclr.types import Config, Images, UserError

if TYPE_CHECKING:
    from interclr.evaluate.requested import Requested

Triple = tuple[float, float, float]
T = TypeVar("T")
BATCH = 256


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated: a backbone and how its input is prepared."""

    backbone: Backbone  # maps (B, 3, S, S) to (B, features); ``backbone.network`` is torchvision's or timm's module
    name: str
    image_size: int
    mean: Triple
    std: Triple


@dataclass(frozen=True, slots=True)
class LabelledData:
    """A training and a test set with one label per image."""

    train: Source
    test: Source
    name: str
    left_out: int = 0  # images that could not be read and are no part of these

    @property
    def classes(self) -> int:
        assert self.train.labels is not None
        assert self.test.labels is not None
        return int(max(self.train.labels.max(), self.test.labels.max())) + 1


@dataclass(frozen=True, slots=True)
class Context:
    """Where and how an evaluation runs."""

    out: Path  # this protocol's own folder; exists
    device: torch.device
    screen: Screen
    seed: int = 0
    autocast: torch.dtype | None = None
    left_out: int = 0  # images that could not be read
    sizes: tuple[int, int] = (0, 0)  # images to train and to test on
    data_path: str | None = None  # of images that are not the run's own, in full
    written: list[Path] = field(default_factory=list)  # results so far


class Evaluation(Config, ABC):
    """Settings of a protocol are its fields; defaults are the paper's protocol."""

    name: str
    weeks_on_a_cpu: ClassVar[bool] = False

    @property
    def reads_images(self) -> bool:
        """Those that cannot be read are then left out, of the images it is given and of all that is counted."""
        return True

    def continues(self, data: LabelledData) -> bool:
        """Whether it keeps checkpoints, so that the same command goes on after an interruption."""
        return False

    def open(self, images: Requested) -> tuple[LabelledData, Evaluation]:
        """What to measure on, and these settings with what those tell: by default labelled images, and as they are."""
        return images.labelled(), self

    @classmethod
    def qualifier(cls, figure: str, figures: Mapping[str, float]) -> str:
        """What a figure says nothing without, such as k-NN's k, for a table where it stands beside other protocols'."""
        return ""

    @abstractmethod
    def run(self, subject: Subject, data: LabelledData, context: Context) -> dict[str, float]:
        """Named figures; raw results, predictions and the plot go to ``context.out``.

        A protocol that does not ``write_result`` itself has its figures written and shown.
        """

    def write_result(self, subject: Subject, data: str, context: Context, raw: dict[str, Any]) -> None:
        """``result.json``: what was measured on what, by which settings, and everything in ``raw``."""
        told: dict[str, Any] = {"protocol": self.name, "subject": subject.name, "data": data, "seed": context.seed}
        told |= {} if context.data_path is None else {"data_path": context.data_path}
        told |= {"train_images": context.sizes[0], "test_images": context.sizes[1]} if any(context.sizes) else {}
        told |= {"unreadable_left_out": context.left_out} if context.left_out else {}
        told |= {"command": command_line(), "date": datetime.now(UTC).isoformat(timespec="seconds"), **environment()}
        write_json(context.out / "result.json", told | {"settings": self.model_dump(mode="json")} | raw)
        context.written.append(context.out / "result.json")


def check_labels(data: LabelledData) -> None:
    """Single labels are needed in both splits; a class that the training split lacks cannot be learnt."""
    for source, split in ((data.train, "training"), (data.test, "test")):
        if source.labels is None or bool((source.labels < 0).any()):
            missing = len(source) if source.labels is None else int((source.labels < 0).sum())
            raise UserError(
                f"{missing} of {len(source)} {split} images of {data.name} have no label{_why_none(source, data)}: "
                "choose --data with labels"
            )
    assert data.train.labels is not None
    assert data.test.labels is not None
    unseen = sorted(set(data.test.labels.tolist()) - set(data.train.labels.tolist()))
    if unseen:
        names = [data.train.classes[c] if data.train.classes else str(c) for c in unseen[:5]]
        raise UserError(f"{len(unseen)} classes of the test split have no training image: {', '.join(names)}")
    if len(data.train.labels.unique()) < 2:
        raise UserError(f"all training images of {data.name} are of one class: there is nothing to tell apart")


def _why_none(source: Source, data: LabelledData) -> str:
    """What keeps the images of a folder from having labels, where it seems to have classes."""
    if source.labels is not None or not isinstance(source, FileSource) or not Path(source.name).is_dir():
        return ""
    names = source.names.to_list()
    if outside := strays(names):
        more = f" and {len(outside) - 1} more lie" if len(outside) > 1 else " lies"
        return f", since {outside[0]}{more} outside the class folders"
    folders, others = folders_and_others(names)
    if source is data.test and data.train.labels is not None and len(folders) == 1 and not others:
        return f", since they are all of {folders.pop()}, a class that is missing in the training split"
    return ""


class BrokenImages(UserError):
    """Images that cannot be read: their rows hold a neighbour's pixels, and would be measured by their own label.

    The session leaves them out and begins again.
    """


def refuse_broken(met: Unreadable) -> None:
    if met.reasons:
        raise BrokenImages(f"{len(met.reasons)} images cannot be read, the first is {met.first}")


def kept_state(path: Path, read: Callable[[Path], T], screen: Screen) -> T | None:
    """What an interrupted protocol left to go on from; None where there is nothing, or, said aloud, nothing readable.

    The work is then done again: a damaged file costs time, not the result.
    """
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged file fails in many ways
        screen.warn(f"{path} cannot be read ({checkpoint.reason(error)}): training starts again")
        return None


def add_weights(digest: hashlib._Hash, network: nn.Module) -> None:
    for name, tensor in network.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().float().numpy().tobytes())


def preparation(subject: Subject, context: Context) -> str:
    """How images come to a network, and in which numbers it computes: another is another result."""
    return repr((subject.mean, subject.std, context.autocast, context.device.type))


def features_of(subject: Subject, source: Source, context: Context) -> Tensor:
    """Frozen features (N, F) of every image, centre-cropped; kept beside the results and reused."""
    weights = hashlib.sha256()
    add_weights(weights, subject.backbone)
    weights.update(preparation(subject, context).encode())
    key = f"{weights.hexdigest()[:16]}-{source.content()[:16]}-{subject.image_size}"
    cached = context.out.parent / "features" / f"{key}.safetensors"
    with suppress(SafetensorError, KeyError, OSError):  # none yet, or one that was cut off: they are made again
        return load_file(cached)["features"].to(context.device)
    met = Unreadable()
    features = embed_source(subject, source, context, met)
    refuse_broken(met)
    with suppress(UserError):  # no room or permission: then they are not kept
        save_tensors(cached, {"features": features})
    return features


def embed_source(
    subject: Subject, source: Source, context: Context, unreadable: Unreadable, keep_on: torch.device | None = None
) -> Tensor:
    """Features (N, F) of every image, centre-cropped, in order, on ``keep_on`` or where the network is.

    The row of an unreadable image holds its neighbour's features; ``unreadable`` tells which rows not to trust.
    """

    def transform(batch: Images) -> Tensor:
        return centre_crop(batch, subject.image_size, subject.mean, subject.std)

    backbone = subject.backbone.to(context.device)
    with context.screen.working(f"embedding {len(source):,} images of {source.name}") as progress:
        features = embed_all(
            backbone,
            in_order(source, context.device, BATCH, unreadable=unreadable),
            transform,
            autocast=context.autocast,
            progress=lambda done: progress(done, len(source)),
            total=len(source),
            keep_on=keep_on,
        )
    return features


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")
