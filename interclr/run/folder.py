"""A run folder: what a training leaves behind, and how others read it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch import Tensor, nn

try:
    import fcntl
except ImportError:  # not on this system: there nothing is locked
    fcntl = None  # type: ignore[assignment]

from interclr import dist
from interclr.config import Settings, load_settings
from interclr.data.views import centre_crop
from interclr.features import embed_all
from interclr.models import Backbone, described
from interclr.run import checkpoint
from interclr.run.files import check_writable, save_tensors, write_text
from interclr.types import Images, UserError

LOCK_ATTEMPTS, LOCK_PAUSE = 21, 0.5  # seconds between them


@dataclass(frozen=True, slots=True)
class Run:
    """A folder: ``resolved.yaml``, ``metrics.jsonl``, ``checkpoint/``, ``backbone.safetensors``, ``result.json``."""

    folder: Path

    @property
    def settings(self) -> Settings:
        return load_settings(str(self.folder / "resolved.yaml"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def result(self) -> dict[str, Any]:
        """The final figures; empty while the run is unfinished."""
        path = self.folder / "result.json"
        try:
            return dict(json.loads(path.read_text())) if path.exists() else {}
        except (ValueError, TypeError):  # cut off by a crash: the checkpoint has all of it
            return {}

    def unreadable(self, state: checkpoint.State) -> dict[str, str]:
        """Images that the run could not read: of a checkpoint, and of all its processes once it is finished."""
        return dict(state["unreadable"]) | dict(self.result.get("unreadable", {}))

    @property
    def finished(self) -> bool:
        return bool(self.result.get("finished"))

    def backbone(self) -> Backbone:
        return load(self.folder)


def run_in(path: str | Path) -> Run:
    """The run in a folder, finished or not; an error where there is none."""
    folder = Path(path)
    if not (folder / "resolved.yaml").is_file():
        raise UserError(f"{folder} is not a run folder: it has no resolved.yaml")
    return Run(folder)


def load(path: str | Path) -> Backbone:
    """The pre-trained backbone of a run folder, of one of its checkpoints, or of a .safetensors that was exported.

    In eval mode on the CPU. Nothing in the files is executed.
    """
    path = Path(path)
    if path.suffix == ".safetensors" and path.is_file():
        return _load_described(path)
    folder = checkpoint.run_of(path)
    if folder is None or not (folder / "resolved.yaml").exists():
        raise UserError(
            f"{path} is neither a run folder (it has no resolved.yaml), nor a checkpoint of one, nor a .safetensors "
            "that interclr has written"
        )
    backbone = Run(folder).settings.model.build()
    weights = folder / "backbone.safetensors"
    if path != folder:
        try:
            state = checkpoint.backbone_of(checkpoint.load(path))
        except Exception as error:  # a file may be damaged in any way
            raise UserError(f"{path} cannot be read: {checkpoint.reason(error)}") from None
    elif weights.exists():
        try:
            state = load_bytes(weights.read_bytes())  # by its path it could not be where that is not UTF-8
        except SafetensorError as error:
            raise UserError(f"{weights} is damaged ({error}): remove it, and the newest checkpoint serves") from None
    else:
        found = checkpoint.load_latest(folder / "checkpoint")
        if found is None:
            raise UserError(f"{folder} has no checkpoint yet")
        state = checkpoint.backbone_of(found[0])
    _fill(backbone, state, f"the weights in {path} are not those of the network in its resolved.yaml")
    know_images(backbone, Run(folder).settings)
    return backbone.eval()


def _load_described(path: Path) -> Backbone:
    """A file of weights that says what network they are of."""
    try:
        with safe_open(path, "pt") as file:
            backbone = described(file.metadata() or {})
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    if backbone is None:
        raise UserError(f"{path} does not say what network it is of: interclr has not written it")
    _fill(backbone, state, f"the weights in {path} are not those of the network that it names")
    return backbone.eval()


def _fill(backbone: Backbone, state: dict[str, Tensor], otherwise: str) -> None:
    """Load the network's own names, as files have them, or a backbone's, as checkpoints and older files do."""
    own = state.keys() == backbone.network.state_dict().keys()
    try:
        (backbone.network if own else backbone).load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{otherwise}: {' '.join(str(error).split())[:200]}") from None


def know_images(backbone: Backbone, settings: Settings) -> None:
    """Let it carry along how its images are to be prepared."""
    data = settings.data
    backbone.mean, backbone.std = data.mean, data.std
    backbone.image_size = None if data.image_size == "auto" else data.image_size


@torch.no_grad()
def embed(backbone: nn.Module, images: Tensor, size: int | None = None, settings: Settings | None = None) -> Tensor:
    """Features (N, F) of uint8 images (N, 3, H, W), their middle scaled to ``size``.

    Size and normalisation are by default those of the run that the backbone was loaded from, also where it is wrapped
    (``torch.compile``, ``DataParallel``), or what ``settings`` say; otherwise the images' own shorter side, normalised
    as for ImageNet. Images go to the device of the backbone, in its precision.
    """
    data = (settings or Settings()).data
    mean, std = data.mean, data.std
    known = None if settings is None or data.image_size == "auto" else data.image_size
    inside = next((module for module in backbone.modules() if isinstance(module, Backbone)), None)
    if settings is None and inside is not None:
        mean, std, known = inside.mean or mean, inside.std or std, inside.image_size
    if not isinstance(images, Tensor):
        raise UserError(f"embed takes one tensor of uint8 images (N, 3, H, W), not {type(images).__name__}")
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3 or not len(images):
        raise UserError(f"embed takes uint8 images (N, 3, H, W), not {tuple(images.shape)} of {images.dtype}")
    side = size or known or min(images.shape[2:])
    weight = next(backbone.parameters(), images.new_empty((), dtype=torch.float32))
    batches = (Images(torch.arange(len(part)), part).to(weight.device) for part in images.split(256))
    return embed_all(backbone, batches, lambda batch: centre_crop(batch, side, mean, std).to(weight.dtype))


def command_line() -> str:
    """What was typed, or what is typed in place of a path to this package; under ``torchrun`` with its processes."""
    program = Path(sys.argv[0])
    package = Path(__file__).resolve().parent.parent
    own = program.name == "interclr" or program.resolve() in (package / "cli.py", package / "__main__.py")
    if not dist.launched():
        return shlex.join(["interclr", *sys.argv[1:]] if own else sys.argv)
    world, here = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    nodes = ["--nnodes", str(int(world) // int(here))] if here not in ("", world) else []
    launcher = ["torchrun", *nodes, "--nproc-per-node", here or world]
    return shlex.join([*launcher, *(["-m", "interclr.cli"] if own else sys.argv[:1]), *sys.argv[1:]])


def save_backbone(path: Path, backbone: Backbone) -> None:
    """By the network's own names, torchvision's or timm's: under others ``strict=False`` would load nothing there."""
    save_tensors(path, backbone.network.state_dict(), backbone.description())


def new_folder(name: str) -> Path:
    """Where a run goes that was not told: ``runs/NAME-TIME``."""
    if dist.launched():
        raise UserError("several processes need one run folder: add --out DIR")
    return Path("runs") / f"{Path(name).stem}-{datetime.now():%Y%m%d-%H%M%S}"


def prepare_folder(folder: Path, resume: bool) -> None:
    """Make the folder and make sure it can be written before anything long starts."""
    found = checkpoint.find(folder / "checkpoint")
    if not resume and found:
        raise UserError(
            f"{folder} already holds a run: add --resume (resume=True) to go on with it, or choose another --out"
        )
    for name in ("result.json", "backbone.safetensors"):
        if not found and (folder / name).exists():  # all that is left of a run, or somebody else's
            raise UserError(f"{folder} holds a {name} and no checkpoint to go on from: choose another --out")
    check_writable(folder)


@contextmanager
def left_as_found(folder: Path) -> Iterator[None]:
    """Where what follows fails before there is a run, the folders that were made for it go again."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # up to the first that holds something
            for place in new:
                place.rmdir()
        raise


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """While this lasts no other process can train in ``folder``: two would mix into one run.

    A lock that ends with the process, however it ends. Its workers hold it a moment longer, so it is waited for. Its
    file goes where no run has come of it.
    """
    if fcntl is None:
        yield
        return
    file = _locked(folder)
    try:
        yield
    except BaseException:
        if not (folder / "resolved.yaml").exists():
            with suppress(OSError):
                (folder / ".lock").unlink()  # still ours: who waits for it will see that it is gone
        raise
    finally:
        _unlock(file)


def _locked(folder: Path) -> int:
    """The open file of the lock, which must be the one that lies there: its holder may have taken it away."""
    for attempt in reversed(range(LOCK_ATTEMPTS)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / ".lock", os.O_RDONLY | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror or error}; choose another --out") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.stat(folder / ".lock")):
                return file
        except (BlockingIOError, FileNotFoundError):
            time.sleep(LOCK_PAUSE if attempt else 0)
        except OSError:  # a file system without locks
            return file
        os.close(file)
    raise UserError(f"another process is training in {folder}: wait for it or stop it, or choose another --out")


def _unlock(file: int) -> None:
    with suppress(OSError):  # said, not only closed: workers that are left have it open, too
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


def restore_settings(folder: Path) -> None:
    """Write ``resolved.yaml`` again from the newest checkpoint where it has been lost."""
    path = folder / "resolved.yaml"
    if path.is_file() and path.stat().st_size:
        return
    found = checkpoint.load_latest(folder / "checkpoint")
    if found is not None:
        write_text(path, str(found[0]["settings"]))


def forget_result(folder: Path) -> None:
    """What an earlier attempt, or the run before it went on, left behind does not speak for it any more."""
    for stale in ("result.json", "backbone.safetensors"):
        (folder / stale).unlink(missing_ok=True)


def environment() -> dict[str, str | None]:
    """What the figures depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
        "machine": gpu or f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the package's own checkout, marked where it has uncommitted changes; None for an installed one."""
    here = Path(__file__).resolve().parent.parent.parent
    if not (here / ".git").exists():
        return os.environ.get("INTERCLR_COMMIT")  # for a copy of a checkout without its history
    try:
        head = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        changes = subprocess.run(
            ["git", "-C", here, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + (" with changes" if changes.stdout.strip() else "") if head.returncode == 0 else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a metrics file; a line torn by a crash is left out."""
    records: list[dict[str, Any]] = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
