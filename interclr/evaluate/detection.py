"""Detection: Faster R-CNN R50-C4 fine-tuned on boxes in VOC's format, AP by the rules of VOC and of COCO.

Data order, flips, scales and the sampling of anchors and regions are functions of (seed, iteration), so a run that was
interrupted goes on from its checkpoint exactly as if it had not been. On the CPU that is bit for bit; on CUDA RoIAlign
adds its gradients in no fixed order, so that two runs agree closely but not in the last bit.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from interclr.data.builtin import data_root
from interclr.data.decode import decode, read_bytes
from interclr.data.parallel import ordered_map
from interclr.data.source import FileSource, UnreadableImage
from interclr.evaluate.average_precision import THRESHOLDS, Found, Truth, coco_rules, summary, voc_rules
from interclr.evaluate.base import Context, Evaluation, LabelledData, Subject, add_weights, kept_state, write_json
from interclr.evaluate.detection_pictures import draw_curves, draw_detections
from interclr.evaluate.faster_rcnn import build, parameter_groups
from interclr.evaluate.requested import Requested
from interclr.evaluate.voc_boxes import BoxedImage, BoxedSet, find_splits, read_boxes
from interclr.optim import Decay, Rate, Unit, set_learning_rate
from interclr.run.files import load_state, save_state
from interclr.types import UserError

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Target = dict[str, Tensor]
WARMUP_FROM = 0.001  # of the rate
CURVE_POINTS = 200
RULES = "AP, AP50, AP75: VOC's, as Detectron2's PascalVOCDetectionEvaluator; coco_*: COCO's, as pycocotools"


class Detection(Evaluation):
    """Defaults: VOC07+12 ``trainval`` → VOC07 ``test``, the schedule and scales of the paper (MoCo's).

    Images without a box are left out of training unless ``keep_empty``, as Detectron2 leaves them out; they are tested
    on. Difficult boxes are trained on unless told otherwise, again as there, and never counted in testing.
    """

    name: Literal["detection"] = "detection"
    data: Path | None = None  # VOC's layout; None: VOCdevkit in the folder of the built-in sets
    train: tuple[str, ...] = ()  # lists such as 'VOC2007/trainval'; none: see ``find_splits``
    test: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()  # none: those of the training annotations
    iterations: Positive = 24_000
    batch: Positive = 16
    lr: Rate = 0.02
    warmup: Natural = 100
    drops: tuple[Fraction, ...] = (18 / 24, 22 / 24)  # ÷10 at these parts of the iterations
    momentum: Unit = 0.9
    weight_decay: Decay = 1e-4
    short_sides: Annotated[tuple[Positive, ...], Field(min_length=1)] = tuple(range(480, 801, 32))
    test_short_side: Positive = 800
    long_side: Positive = 1333
    flip: bool = True
    anchors: Annotated[tuple[Positive, ...], Field(min_length=1)] = (32, 64, 128, 256, 512)
    regions: Positive = 512  # per image for the box head
    test_proposals: Positive = 1000
    extra_norm: bool = True  # BatchNorm after the box head
    precise_norm: Natural = 200  # batches that settle the BatchNorm statistics after training (MoCo's PRECISE_BN)
    keep_empty: bool = False
    difficult_in_training: bool = True
    eleven_points: bool = True  # VOC07's rule; False: the area under the curve
    checkpoint_every: Positive = 1000
    weeks_on_a_cpu: ClassVar[bool] = True

    def open(self, images: Requested) -> tuple[LabelledData, Evaluation]:
        """Where the annotations are found; voc07 and voc0712 name the years to train on."""
        if self.data is not None:
            return images.named_by_settings(self.data), self
        images.refuse_held_out()
        train, name = images.split("train"), images.name
        if train.labels is not None or not isinstance(train, FileSource):
            raise UserError(f"{name} has no boxes: detection needs a VOC devkit (JPEGImages, Annotations, ImageSets)")
        found: dict[str, Any] = {"data": train.folder if name in ("voc07", "voc0712") else Path(name)}
        if name == "voc07":
            found |= {"train": ("VOC2007/trainval",), "test": ("VOC2007/test",)}
        return LabelledData(train, train, name), self.model_copy(update=found)

    def continues(self, data: LabelledData) -> bool:
        return True

    def run(self, subject: Subject, data: LabelledData | None, context: Context) -> dict[str, float]:
        """``data`` is not looked at: boxes are read from the folder that the field ``data`` names."""
        learn, judge = self._read(context)
        with torch.random.fork_rng(_devices(context)):
            torch.manual_seed(context.seed)
            model = build(
                subject,
                len(learn.classes),
                anchors=self.anchors,
                regions=self.regions,
                test_proposals=self.test_proposals,
                short_sides=self.short_sides,
                long_side=self.long_side,
                extra_norm=self.extra_norm,
                half=context.autocast is not None,
            ).to(context.device)
            plan = self._plan(model, learn, context)
            losses = self._fit(model, learn, plan, context)
            self._settle_norms(model, learn, context)
        found = self._detect(model, judge, context)
        return self._score(found, judge, learn, losses, subject, context)

    def _read(self, context: Context) -> tuple[BoxedSet, BoxedSet]:
        folder = self.data.expanduser() if self.data is not None else _default_folder()
        train, test = find_splits(folder, self.train, self.test)
        with context.screen.working("reading annotations") as progress:
            learn = read_boxes(train, self.classes or None, progress)
            judge = read_boxes(test, learn.classes, progress)
        shared = {image.path for image in learn.images} & {image.path for image in judge.images}
        if shared:
            raise UserError(f"{len(shared)} images are in both the training and the test lists, as {min(shared)}")
        for boxed, what in ((learn, "training"), (judge, "test")):
            for count, words in (
                (boxed.clipped, "boxes reach outside their image and were clipped"),
                (boxed.dropped, "boxes have no area inside their image and were dropped"),
                (boxed.resized, "annotations state another size than their image has"),
            ):
                if count:
                    context.screen.warn(f"{count} {what} {words}")
        if not self.difficult_in_training:
            learn = replace(learn, images=tuple(map(_without_difficult, learn.images)))
        if not self.keep_empty:
            learn = replace(learn, images=tuple(image for image in learn.images if len(image.boxes)))
        if learn.boxes == 0:
            raise UserError(f"no box is left to train on in {folder}")
        return learn, judge

    def _plan(self, model: nn.Module, learn: BoxedSet, context: Context) -> str:
        """What must be the same for a checkpoint to be gone on from: settings, data, starting weights, seed."""
        ignored = {"data", "train", "test", "checkpoint_every", "test_short_side", "test_proposals", "eleven_points"}
        settings = self.model_dump(mode="json", exclude=ignored | {"precise_norm"})
        digest = hashlib.sha256(json.dumps([settings, context.seed, str(context.autocast)]).encode())
        digest.update(learn.fingerprint().encode())
        add_weights(digest, model)
        return digest.hexdigest()

    def _fit(self, model: nn.Module, learn: BoxedSet, plan: str, context: Context) -> list[float]:
        optimiser = torch.optim.SGD(parameter_groups(model, self.weight_decay), lr=self.lr, momentum=self.momentum)
        file = context.out / "checkpoint.pt"
        first, losses = _resume(file, model, optimiser, plan, context)
        model.train()
        with context.screen.working(f"training on {len(learn.images):,} images") as progress:
            for iteration, (images, targets) in self._batches(learn, first, self.iterations, context):
                set_learning_rate(optimiser, self.rate(iteration))
                losses.append(train_step(model, optimiser, images, targets))
                if not math.isfinite(losses[-1]):
                    raise UserError(
                        f"the loss became {losses[-1]} at iteration {iteration}: lower lr (now {self.lr:g}; it suits a "
                        f"batch of 16, this is {self.batch}) or lengthen warmup (now {self.warmup})"
                    )
                done = iteration + 1
                if done % self.checkpoint_every == 0 or done == self.iterations:
                    _save(file, model, optimiser, plan, done, losses)
                progress(done, self.iterations)
        return losses

    def rate(self, iteration: int) -> float:
        """Linear warm-up, then ÷10 at each of ``drops``."""
        rate = self.lr * 0.1 ** sum(iteration >= round(drop * self.iterations) for drop in self.drops)
        if iteration < self.warmup:
            rate *= WARMUP_FROM + (1 - WARMUP_FROM) * iteration / self.warmup
        return rate

    def _batches(
        self, learn: BoxedSet, first: int, last: int, context: Context
    ) -> Iterator[tuple[int, tuple[list[Tensor], list[Target]]]]:
        """Threads decode ahead; torch's generators are set anew for each iteration."""
        batches = ordered_map(lambda i: self._batch(learn, first + i, context.seed), max(0, last - first))
        for iteration, (images, targets) in enumerate(batches, first):
            torch.manual_seed(int(_random(context.seed, iteration, 1).integers(2**62)))
            moved = [{name: value.to(context.device) for name, value in target.items()} for target in targets]
            yield iteration, ([_floats(image, context) for image in images], moved)

    def _batch(self, learn: BoxedSet, iteration: int, seed: int) -> tuple[list[Tensor], list[Target]]:
        """The images of an iteration: one endless sequence of permutations, whatever the batch."""
        random, count = _random(seed, iteration, 0), len(learn.images)
        images, targets = [], []
        for place in range(iteration * self.batch, (iteration + 1) * self.batch):
            image = learn.images[_permutation(seed, place // count, count)[place % count]]
            pixels, boxes = _pixels(image), torch.from_numpy(image.boxes.copy())
            if self.flip and random.random() < 0.5:
                pixels = pixels.flip(-1)
                boxes[:, [0, 2]] = image.width - boxes[:, [2, 0]]
            images.append(pixels)
            targets.append({"boxes": boxes, "labels": torch.from_numpy(image.labels) + 1})  # 0 is the background
        return images, targets

    @torch.no_grad()
    def _settle_norms(self, model: nn.Module, learn: BoxedSet, context: Context) -> None:
        """BatchNorm statistics as the plain mean over ``precise_norm`` batches, not as a trailing average."""
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        if not norms or not self.precise_norm:
            return
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        last = self.iterations + self.precise_norm
        with context.screen.working("settling BatchNorm") as progress:
            for iteration, (images, targets) in self._batches(learn, self.iterations, last, context):
                model(images, targets)
                progress(iteration + 1 - self.iterations, self.precise_norm)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum

    @torch.no_grad()
    def _detect(self, model: Any, judge: BoxedSet, context: Context) -> list[Found]:
        """One image at a time, so that no image's padding depends on its neighbours."""
        model.eval()
        model.transform.min_size = (self.test_short_side,)
        found = []
        count = len(judge.images)
        with context.screen.working(f"detecting in {count:,} images") as progress:
            for pixels in ordered_map(lambda i: _pixels(judge.images[i]), count):
                output = model([_floats(pixels, context)])[0]
                boxes, labels, scores = (output[name].cpu() for name in ("boxes", "labels", "scores"))
                found.append(Found(boxes.numpy(), labels.numpy() - 1, scores.numpy()))
                progress(len(found), count)
        return found

    def _score(
        self,
        found: list[Found],
        judge: BoxedSet,
        learn: BoxedSet,
        losses: list[float],
        subject: Subject,
        context: Context,
    ) -> dict[str, float]:
        truth, classes = truth_of(judge), judge.classes
        voc = voc_rules(truth, found, len(classes), eleven_points=self.eleven_points)
        coco = coco_rules(truth, found, len(classes))
        if np.isnan(voc).all():
            raise UserError("no test image has a box that is not difficult: there is nothing to measure")
        figures = summary(voc) | {f"coco_{name}": value for name, value in summary(coco).items()}
        curve = _thinned(losses)
        write_json(context.out / "predictions.json", predictions(judge, found))
        self.write_result(
            subject,
            str(self.data or _default_folder()),
            context,
            {
                "figures": figures,
                "rules": RULES,
                "thresholds": THRESHOLDS.tolist(),
                "classes": {
                    name: {"voc": _percent(voc[:, label]), "coco": _percent(coco[:, label])}
                    for label, name in enumerate(classes)
                },
                "training": _counts(learn),
                "test": _counts(judge),
                "losses": curve,
            },
        )
        draw_curves(context.out / "precision_recall", truth, found, classes, voc[0].tolist(), curve)
        draw_detections(context.out / "detections.png", judge, found)
        rows = [
            (rule, *(f"{figures[prefix + name]:.2f}" for name in ("AP", "AP50", "AP75")))
            for rule, prefix in (("VOC (the paper's)", ""), ("COCO", "coco_"))
        ]
        context.screen.table(f"Detection with {subject.name}", rows, ("rules", "AP", "AP50", "AP75"))
        return figures


def train_step(
    model: nn.Module, optimiser: torch.optim.Optimizer, images: list[Tensor], targets: list[Target]
) -> float:
    terms: dict[str, Tensor] = model(images, targets)
    loss = torch.stack(list(terms.values())).sum()
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()
    return float(loss.detach())


def truth_of(data: BoxedSet) -> list[Truth]:
    return [Truth(image.boxes, image.labels, image.difficult) for image in data.images]


def predictions(data: BoxedSet, found: Sequence[Found]) -> dict[str, Any]:
    """COCO's list of results, with the images and categories its numbers stand for. Boxes are x, y, width, height."""
    results = []
    for number, guess in enumerate(found, 1):
        for box, label, score in zip(guess.boxes.tolist(), guess.labels.tolist(), guess.scores.tolist(), strict=True):
            extent = [round(value, 3) for value in (box[0], box[1], box[2] - box[0], box[3] - box[1])]
            results.append({"image_id": number, "category_id": label + 1, "bbox": extent, "score": round(score, 6)})
    return {
        "images": [
            {"id": number, "file_name": image.name, "width": image.width, "height": image.height}
            for number, image in enumerate(data.images, 1)
        ],
        "categories": [{"id": label + 1, "name": name} for label, name in enumerate(data.classes)],
        "annotations": results,
    }


def _default_folder() -> Path:
    root = data_root()
    return root / "voc" if (root / "voc").is_dir() else root


def _without_difficult(image: BoxedImage) -> BoxedImage:
    kept = ~image.difficult
    return replace(image, boxes=image.boxes[kept], labels=image.labels[kept], difficult=image.difficult[kept])


def _devices(context: Context) -> list[torch.device]:
    return [context.device] if context.device.type == "cuda" else []


def _random(seed: int, iteration: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng((seed, iteration, purpose))


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> list[int]:
    return [int(i) for i in _random(seed, epoch, 2).permutation(count)]


def _pixels(image: BoxedImage) -> Tensor:
    try:
        return decode(read_bytes(str(image.path), str(image.path)), str(image.path))
    except UnreadableImage as failure:
        raise UserError(f"cannot read the image {failure}") from None


def _floats(pixels: Tensor, context: Context) -> Tensor:
    return pixels.to(context.device, non_blocking=True).float() / 255


def _save(
    file: Path, model: nn.Module, optimiser: torch.optim.Optimizer, plan: str, done: int, losses: list[float]
) -> None:
    state = {"plan": plan, "done": done, "losses": losses}
    save_state(file, {**state, "model": model.state_dict(), "optimiser": optimiser.state_dict()})


def _resume(
    file: Path, model: nn.Module, optimiser: torch.optim.Optimizer, plan: str, context: Context
) -> tuple[int, list[float]]:
    """Go on from a checkpoint of the same plan; from any other, or one that cannot be read, start again."""
    state = kept_state(file, lambda path: load_state(path, context.device), context.screen)
    if state is None:
        return 0, []
    if state.get("plan") != plan:
        context.screen.warn(f"{file} is of other settings, data or weights: training starts again")
        return 0, []
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    context.screen.say(f"going on from iteration {state['done']:,}")
    return int(state["done"]), [float(loss) for loss in state["losses"]]


def _thinned(losses: Sequence[float]) -> list[tuple[float, float]]:
    """At most ``CURVE_POINTS`` means, each at its middle iteration."""
    parts: list[Any] = np.array_split(np.arange(len(losses)), min(CURVE_POINTS, len(losses)))
    return [(float(part.mean()), float(np.mean([losses[i] for i in part]))) for part in parts]


def _percent(column: Any) -> list[float | None]:
    return [None if math.isnan(value) else 100 * value for value in column.tolist()]


def _counts(data: BoxedSet) -> dict[str, int]:
    return {
        "images": len(data.images),
        "boxes": data.boxes,
        "empty": data.empty,
        "clipped": data.clipped,
        "dropped": data.dropped,
        "resized": data.resized,
    }
