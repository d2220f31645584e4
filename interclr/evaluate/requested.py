"""What is asked for on the command line, and the images that a protocol is given for it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from interclr.data.builtin import images_of_a_run, open_source
from interclr.data.folder import splits_of_folder
from interclr.data.hold_out import a_fifth_of_every_class, split_off
from interclr.data.packed import is_packed
from interclr.data.source import ArraySource, Source
from interclr.data.subset import Subset
from interclr.evaluate.base import LabelledData
from interclr.run import checkpoint
from interclr.run.folder import Run
from interclr.screen import Screen
from interclr.types import UserError

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for on the command line."""

    subject: str
    data: str | None = None  # None: the data of the run
    out: Path | None = None  # None: RUN/evaluate
    root: Path | None = None
    device: torch.device = CPU
    backbone: str | None = None  # of a weights file that does not tell: resnet50
    image_size: int | None = None
    seed: int = 0
    held_out: bool = False  # test on the images that the run held out, not on the test split

    @property
    def run(self) -> Path | None:
        """The folder of the run that is evaluated, or whose checkpoint is."""
        return checkpoint.run_of(Path(self.subject))

    def check_held_out(self) -> None:
        if not self.held_out:
            return
        if self.run is None or self.data is not None:
            raise UserError("--held-out tests on images that a run held out: it needs a run, and no --data")
        if not Run(self.run).settings.data.hold_out:
            raise UserError(f"{self.run} held no images out; train with data.hold_out=N to keep N from the training")


@dataclass(frozen=True, slots=True)
class Requested:
    """The images of a request, for a protocol to open as it needs them."""

    request: Request
    max_side: int  # larger ones are shrunk when they are read
    place: Path  # of the protocol's results
    screen: Screen

    @property
    def name(self) -> str:
        """As for ``open_source``: a folder, a list, a built-in set."""
        if self.request.data is not None:
            return self.request.data
        if self.request.run is None:
            raise UserError("name the labelled images with --data: these weights are not a run that knows its own")
        return Run(self.request.run).settings.data.source

    def split(self, name: str) -> Source:
        root = self.request.root
        if self.request.data is None and self.request.run is not None:
            root = root or Run(self.request.run).settings.data.root
        with images_of_a_run() if self.request.data is None else nullcontext():
            return open_source(self.name, name, root, self.max_side)

    def trained_on(self) -> tuple[Source, Source | None]:
        """The training split without what the run held out of it, and that."""
        train = self.split("train")
        if self.request.run is not None and self.request.data is None:
            count = Run(self.request.run).settings.data.hold_out
            return split_off(train, count) if count else (train, None)
        return train, None

    def labelled(self) -> LabelledData:
        """Images to train and to test on, with one label each where they have labels."""
        if self.request.held_out:
            train, held = self.trained_on()
            assert held is not None, "see Request.check_held_out"
            return LabelledData(self._labelled(train), self._labelled(held), held.name)
        return LabelledData(*self._train_and_test(self.split("train")), self.name)

    def named_by_settings(self, path: Path) -> LabelledData:
        """Nothing, under its name: the protocol opens the images itself, and others are not looked at."""
        self.refuse_held_out()
        nothing = ArraySource(torch.empty(0, 3, 1, 1, dtype=torch.uint8), name=str(path))
        return LabelledData(nothing, nothing, str(path))

    def refuse_held_out(self) -> None:
        if self.request.held_out:
            raise UserError("boxes, or a VOC devkit, have splits of their own: measure them without --held-out")

    def _train_and_test(self, train: Source) -> tuple[Source, Source]:
        """The set's own test split; without one a fifth of every class, fixed for all time and said aloud."""
        place = Path(self.name)
        if not place.is_file() and not is_packed(place):
            try:
                return self._labelled(train), self._labelled(self.split("test"))
            except UserError:
                if not place.is_dir() or splits_of_folder(place):  # there is one, and it is of no use
                    raise
        if train.labels is None or bool((train.labels < 0).all()):
            return train, train  # check_labels says what is missing
        train = self._labelled(train)
        assert train.labels is not None
        tested_on = a_fifth_of_every_class(train.labels)
        chosen, others = tested_on.nonzero().flatten().tolist(), (~tested_on).nonzero().flatten().tolist()
        if not chosen:
            raise UserError(f"{self.name} has no test split, and with one image of every class none can be lent to it")
        classes, tested = len(train.labels.unique()), len(train.labels[chosen].unique())
        if 1 == tested < classes:
            raise UserError(
                f"{self.name} has no test split, and only one of its {classes} classes has a second image to be tested "
                "on: any answer would look right. Add images to the other classes"
            )
        never = f"; {classes - tested} of {classes} classes have a single image and are never tested"
        self.screen.say_once(
            f"no test split: {len(chosen)} of {len(train)} images, a fifth of every class, are tested on"
            + (never if tested < classes else "")
        )
        return Subset(train, others), Subset(train, chosen)

    def _labelled(self, source: Source) -> Source:
        """The images with a label, where only some have one."""
        if source.labels is None or bool((source.labels < 0).all()):
            return source
        known = (source.labels >= 0).nonzero().flatten()
        if len(known) == len(source):
            return source
        without = f"{len(source) - len(known):,} of {len(source):,} images of {source.name}"
        self.screen.say_once(f"{without} have no label: left out")
        return Subset(source, known.tolist())
