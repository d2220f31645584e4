"""Images per second of lightly 1.6.0 on its own CIFAR-10 benchmark, MoCo or BYOL, and of ours beside it.

    python benchmarks/lightly_cifar10.py --precision bf16 --root DATA --out lightly.json --ours cifar.json

``--ours`` first runs ``interclr bench cifar``, on the same images, and says how many times faster it is.

The settings are those of ``docs/source/getting_started/benchmarks/cifar10_benchmark.py`` of lightly-ai/lightly since
July 2023 (pull request 1325: BYOL's own views; the file at the tag 1.6.0 itself was not at hand), built of lightly's
classes: ResNet-18 with a 3×3 stem without ReLU; for MoCo BatchNorm in 8 parts, shuffled keys, both directions and a
memory bank; momentum encoders moved before each step; SGD under a cosine of 200 epochs; PNG files in class folders;
loader processes anew every epoch, memory not pinned, last batch dropped; Lightning's trainer, seed 0. Departures:
- k-NN validation (``BenchmarkModule``), checkpoints, logger and progress bar are off: training alone is timed.
- Batch 512 and 16 processes by default, not 128 and 8. From batch 512 on the bank has 8192 entries, not 4096: so says
  the note under their table; 1.6.0 wants its size as a pair. Backbone and head are one module: one update, not two.
- bf16 is Lightning's ``bf16-mixed``: theirs has fp32 only. ``--tuned-loader`` keeps processes alive and pins memory.
- Without a copy of CIFAR-10 the images are smooth noise whose PNG files are of CIFAR's size.
The first epoch is not counted. Each other one lasts from the end of the one before to its own; the GPU is waited for.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

try:
    from lightly import loss, transforms
    from lightly.data import LightlyDataset
    from lightly.models import ResNetGenerator, utils
    from lightly.models.modules import heads
    from pytorch_lightning import LightningModule, Trainer, seed_everything

    MISSING = None
except ModuleNotFoundError as error:
    LightningModule, MISSING = object, error.name  # so that --help works without them

VIEWS = {"input_size": 32, "gaussian_blur": 0.0}
ENCODER_MOMENTUM = 0.99
PACKAGES = ("lightly", "pytorch_lightning", "torch", "torchvision", "PIL")
NOTE = "source.json"  # in a folder made here: what its images are


class Pair(LightningModule):
    """What both methods share: an encoder, its momentum copy, the optimiser, the clock at the end of each epoch."""

    def __init__(self, batch: int, head: nn.Module, norm_splits: int = 0) -> None:
        super().__init__()
        self.epoch_ends, self.loss_settings, self.view_settings = list[float](), dict[str, Any](), VIEWS
        self.optimiser_settings = {"lr": 0.06 * batch / 128, "momentum": 0.9, "weight_decay": 5e-4}
        layers = list(ResNetGenerator("resnet-18", num_splits=norm_splits).children())[:-1]
        self.encoder = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
        self.slow_encoder = copy.deepcopy(self.encoder)
        utils.deactivate_requires_grad(self.slow_encoder)

    def training_step(self, batch: tuple[list[Tensor], Tensor, list[str]], _: int) -> Tensor:
        utils.update_momentum(self.encoder, self.slow_encoder, ENCODER_MOMENTUM)
        result = self.loss_of(*batch[0])
        self.log("train_loss_ssl", result)
        return result

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimiser = torch.optim.SGD(trained, **self.optimiser_settings)
        return [optimiser], [torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 200)]

    def on_train_epoch_end(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.epoch_ends.append(time.perf_counter())


class MoCo(Pair):
    def __init__(self, batch: int) -> None:
        super().__init__(batch, heads.MoCoProjectionHead(512, 512, 128), norm_splits=8)
        self.loss_settings = {"temperature": 0.1, "memory_bank_size": (8192 if batch >= 512 else 4096, 128)}
        self.criterion = loss.NTXentLoss(**self.loss_settings)
        self.view_settings = {**VIEWS, "cj_strength": 0.5}
        self.views = transforms.SimCLRTransform(**self.view_settings)

    def loss_of(self, first: Tensor, second: Tensor) -> Tensor:
        return 0.5 * (self.one_direction(first, second) + self.one_direction(second, first))

    def one_direction(self, queries: Tensor, keys: Tensor) -> Tensor:
        shuffled, order = utils.batch_shuffle(keys)
        return self.criterion(self.encoder(queries), utils.batch_unshuffle(self.slow_encoder(shuffled), order))


class BYOL(Pair):
    def __init__(self, batch: int) -> None:
        super().__init__(batch, heads.BYOLProjectionHead(512, 1024, 256))
        self.predictor, self.criterion = heads.BYOLPredictionHead(256, 1024, 256), loss.NegativeCosineSimilarity()
        views = transforms.BYOLView1Transform(**VIEWS), transforms.BYOLView2Transform(**VIEWS)
        self.views = transforms.BYOLTransform(*views)

    def loss_of(self, first: Tensor, second: Tensor) -> Tensor:
        prediction_1, target_1 = self.predictor(self.encoder(first)), self.slow_encoder(first)
        prediction_2, target_2 = self.predictor(self.encoder(second)), self.slow_encoder(second)
        return 0.5 * (self.criterion(prediction_1, target_2) + self.criterion(prediction_2, target_1))


def smooth_noise(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = 255 * torch.rand(1, 3, 4, 4, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=32, mode="bicubic")[0]
    return (smooth + 6 * torch.randn(3, 32, 32, generator=generator)).clamp(0, 255).byte()


def make_folder(folder: Path, count: int, root: Path | None) -> None:
    """Write PNG files into one folder per class, as their benchmark expects them."""
    images = ((smooth_noise(index), index % 10) for index in range(count))
    source = "made here: seeded smooth noise of 32×32 pixels"
    if root is not None:
        from interclr.data.builtin import open_source

        cifar, source = open_source("cifar10", "train", root), "cifar10 train"
        images = ((cifar.read(index), int(cifar.labels[index])) for index in range(min(count, len(cifar))))
    unfinished = folder.with_name(f"{folder.name}.partial")
    for index, (pixels, label) in enumerate(images):
        (unfinished / f"class{label}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(unfinished / f"class{label}" / f"{index:05d}.png")
    (unfinished / NOTE).write_text(json.dumps(source))
    unfinished.rename(folder)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    seed_everything(0)
    model = MoCo(options.batch) if options.method == "moco" else BYOL(options.batch)
    files = LightlyDataset(str(folder), transform=model.views)
    loading = {"batch_size": options.batch, "num_workers": options.workers, "shuffle": True, "drop_last": True}
    loading |= dict.fromkeys(("persistent_workers", "pin_memory"), options.tuned_loader)
    loader = DataLoader(Subset(files, range(min(options.limit, len(files)))), **loading)
    precision = {"fp32": "32-true", "bf16": "bf16-mixed"}[options.precision]
    running = {"accelerator": options.device, "devices": 1, "precision": precision, "max_epochs": options.epochs + 1}
    running |= dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(**running)
    trainer.fit(model, train_dataloaders=loader)
    gpu, note, images = trainer.strategy.root_device.type == "cuda", folder / NOTE, len(loader) * options.batch
    speeds = [round(images / (end - start), 1) for start, end in itertools.pairwise(model.epoch_ends)]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if gpu else "CPU",
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: sys.modules[name].__version__ for name in PACKAGES},
        "data": json.loads(note.read_text()) if note.is_file() else "a folder given by the user",
        "mean_file_bytes": round(statistics.mean(file.stat().st_size for file in folder.rglob("*.png"))),
        "method": options.method,
        "settings": {**model.optimiser_settings, **model.loss_settings, "encoder_momentum": ENCODER_MOMENTUM},
        "views": {type(model.views).__name__: model.view_settings},
        "loader": loading,
        "trainer": running,
        "tf32": {"convolutions": torch.backends.cudnn.allow_tf32, "matmul": torch.get_float32_matmul_precision()},
        "images_per_epoch": images,
        "images_per_second": speeds,
        "images_per_second_median": statistics.median(speeds),
        "images_per_second_range": [min(speeds), max(speeds)],
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if gpu else None,
    }


def measure_ours(report: Path, root: Path | None, quick: bool) -> float:
    """Images per second of our plain MoCo, by ``interclr bench cifar``, which is another process."""
    words = ["bench", "cifar", "--out", str(report), *(["--root", str(root)] if root else []), *["--quick"] * quick]
    if subprocess.run([sys.executable, "-m", "interclr.cli", *words]).returncode:
        sys.exit("interclr bench cifar failed, see above")
    first = json.loads(report.read_text())["results"]["cifar"][0]
    return float(first["images_per_second"]["median"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--method", choices=("moco", "byol"), default="moco")
    add("--precision", choices=("bf16", "fp32"), default="fp32")
    add("--batch", type=int, default=512)
    add("--workers", type=int, default=16, help="loader processes")
    add("--epochs", type=int, default=3, help="epochs that are timed, after one that is not")
    add("--limit", type=int, default=50_000, help="images per epoch at most")
    add("--data", type=Path, help="folder of PNG files in class folders; made, and kept, where it does not exist")
    add("--root", type=Path, help="where interclr finds CIFAR-10, to make the folder from")
    add("--tuned-loader", action="store_true", help="keep loader processes alive and pin memory: theirs does not")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto")
    add("--out", type=Path, required=True, help="JSON file to write")
    add("--ours", type=Path, help="measure interclr as well, before: its JSON file to write (moco only)")
    add("--quick", action="store_true", help="ours in small, to see that it works")
    options = parser.parse_args()
    same = (options.method, options.batch, options.precision, options.limit) == ("moco", 512, "bf16", 50_000)
    if options.ours is not None and not options.quick and not (same and options.root):
        parser.error("--ours goes with moco, --batch 512, --precision bf16 and --root: nothing else can be compared")
    if MISSING is not None:
        parser.exit(2, f"{MISSING} is missing; run: pip install 'interclr[peers]'\n")
    for path in (options.out, options.ours or options.out):
        path.parent.mkdir(parents=True, exist_ok=True)
    ours = None if options.ours is None else measure_ours(options.ours, options.root, options.quick)
    with tempfile.TemporaryDirectory() as place:
        folder = options.data or Path(place) / "images"
        if not folder.exists():
            make_folder(folder, options.limit, options.root)
        result = measure(options, folder)
    options.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    theirs = result["images_per_second_median"]
    print(f"{options.method} {options.precision}: {theirs:,.0f} images/s, see {options.out}")
    if ours is not None:
        ratio = "in small, so not to be compared" if options.quick else f"{ours / theirs:.1f} times as many"
        print(f"ours: {ours:,.0f} images/s, {ratio}, see {options.ours}")


if __name__ == "__main__":
    main()
