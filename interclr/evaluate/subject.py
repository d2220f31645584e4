"""What to evaluate, by one word: a run, one of its checkpoints, torchvision's or timm's weights, a file of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from interclr.config import IMAGENET_MEAN, IMAGENET_STD
from interclr.evaluate.base import Subject
from interclr.models import Backbone, BackboneConfig
from interclr.run import checkpoint
from interclr.run.folder import Run, load
from interclr.types import UserError

IMAGENET_SIZE = 224
# Under which published checkpoints keep a backbone, in the order in which they are tried: MoCo's, mmselfsup's, …
ENCODERS = (
    "",
    "encoder_q.",
    "encoder.",
    "backbone.",
    "network.",
    "backbone.network.",
    "online_encoder.",
    "base_encoder.",
)
PREFIXES = tuple(f"{outer}{encoder}" for outer in ("", "module.", "model.") for encoder in ENCODERS)


def open_subject(spec: str, backbone: str = "resnet50", image_size: int | None = None) -> Subject:
    """``spec``: a run folder, a checkpoint of one, ``torchvision/NAME[@WEIGHTS]``, ``timm/NAME`` or a weights file.

    ``backbone`` names the architecture of a weights file; ``image_size`` is for weights that are not a run's.
    """
    path = Path(spec)
    size = image_size or IMAGENET_SIZE
    if spec.startswith("torchvision/"):
        name = spec if "@" in spec else f"{spec} (random weights)"
        return Subject(_torchvision(spec.removeprefix("torchvision/")), name, size, IMAGENET_MEAN, IMAGENET_STD)
    if spec.startswith("timm/"):
        return Subject(_timm(spec.removeprefix("timm/")), spec, size, IMAGENET_MEAN, IMAGENET_STD)
    if path.exists() and (folder := checkpoint.run_of(path)) is not None:
        return _of_run(folder, load(path), str(path))
    if path.is_file():
        network = BackboneConfig(backbone=backbone).build()
        _load_names(network.network, _read_weights(path), spec)
        return Subject(network.eval(), spec, size, IMAGENET_MEAN, IMAGENET_STD)
    raise UserError(
        f"there is no run or weights file {spec!r}: give a run folder, torchvision/resnet50@IMAGENET1K_V2, timm/NAME "
        "or a .safetensors or .pth file"
    )


def _of_run(folder: Path, network: Backbone, name: str) -> Subject:
    data = Run(folder).settings.data
    return Subject(network, name, int(data.image_size), data.mean, data.std)


def _torchvision(spec: str) -> Backbone:
    """``resnet50`` has random weights, always the same; ``resnet50@IMAGENET1K_V2`` torchvision's supervised ones."""
    name, _, weights = spec.partition("@")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = BackboneConfig(backbone=name).build()
    if weights:
        try:
            found = torchvision.models.get_model_weights(name)[weights]
        except KeyError as error:
            known = ", ".join(entry.name for entry in torchvision.models.get_model_weights(name))
            raise UserError(f"torchvision has no weights {weights!r} for {name}; it has {known}") from error
        try:
            state = found.get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:
            raise UserError(f"torchvision's weights {spec} are not here and cannot be fetched: {error}") from error
        _load_names(network.network, state, spec)
    return network.eval()


def _timm(name: str) -> Backbone:
    try:
        import timm
    except ImportError as error:
        raise UserError("timm is not installed: pip install 'interclr[timm]'") from error
    try:
        network = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # timm raises whatever its hub client raises
        raise UserError(f"timm/{name} cannot be made or fetched: {error}") from error
    features: Any = network.num_features
    return Backbone(network, int(features)).eval()


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors only: nothing in the file is executed."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, ModuleNotFoundError, KeyError) as error:
        raise UserError(f"{path} cannot be read as weights: {' '.join(str(error).split())[:200]}") from error
    except Exception as error:  # pickle's errors have no common class
        raise UserError(f"{path} holds more than tensors and is not loaded: {type(error).__name__}") from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} is not a state dict of tensors")
    return state


def _load_names(network: nn.Module, state: dict[str, Tensor], spec: str) -> None:
    """Load by torchvision's names, after one of the usual prefixes; heads, queues and other networks are ignored."""
    wanted = network.state_dict()
    found = (prefix for prefix in PREFIXES if all(prefix + key in state for key in wanted))
    prefix = next(found, "")
    state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    missing = [key for key in wanted if key not in state or state[key].shape != wanted[key].shape]
    if missing:
        raise UserError(
            f"{spec} does not fit this backbone: {len(missing)} of {len(wanted)} tensors are missing or of another "
            f"shape, the first is {missing[0]}; name the architecture with --backbone"
        )
    network.load_state_dict({key: state[key] for key in wanted})
