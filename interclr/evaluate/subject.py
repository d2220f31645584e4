"""What to evaluate, by one word: a run, one of its checkpoints, torchvision's or timm's weights, a file of weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from interclr.config import IMAGENET_MEAN, IMAGENET_STD
from interclr.evaluate.base import Subject
from interclr.models import Backbone, BackboneConfig, described
from interclr.run import checkpoint
from interclr.run.folder import Run, know_images, load
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


def open_subject(spec: str, backbone: str | None = None, image_size: int | None = None) -> Subject:
    """``spec``: a run folder, a checkpoint of one, ``torchvision/NAME[@WEIGHTS]``, ``timm/NAME`` or a weights file.

    ``backbone`` names the architecture of a weights file that does not tell it (those written here do); ``image_size``
    is for weights that are not a run's. Size and normalisation are otherwise what the weights were trained with, as far
    as a run, a library or the file knows, and ImageNet's where nobody does.
    """
    path, name = Path(spec), spec
    if spec.startswith("torchvision/"):
        name = spec if "@" in spec else f"{spec} (random weights)"
        network = _torchvision(spec.removeprefix("torchvision/"))
    elif spec.startswith("timm/"):
        network = _timm(spec.removeprefix("timm/"))
    elif path.exists() and checkpoint.run_of(path) is not None:
        network, image_size = load(path), None
    elif path.is_file():
        network = _network_of(path, backbone)
        _load_names(network.network, _read_weights(path), spec)
    else:
        raise UserError(
            f"there is no run or weights file {spec!r}: give a run folder, torchvision/resnet50@IMAGENET1K_V2, "
            "timm/NAME or a .safetensors or .pth file"
        )
    size = image_size or network.image_size or IMAGENET_SIZE
    network.eval().check_takes(size)
    return Subject(network, name, size, network.mean or IMAGENET_MEAN, network.std or IMAGENET_STD)


def _network_of(path: Path, named: str | None) -> Backbone:
    """The network that a file of weights says it is of, or that lies in a run folder beside it, or the one named."""
    metadata: dict[str, str] = {}
    with suppress(SafetensorError, OSError), safe_open(path, "pt") as file:  # another kind: _read_weights will tell
        metadata = file.metadata() or {}
    found = described(metadata)
    if found is None and path.name == "backbone.safetensors" and (path.parent / "resolved.yaml").exists():
        settings = Run(path.parent).settings
        found = settings.model.build()
        know_images(found, settings)
    if found is None:
        return BackboneConfig(backbone=named or "resnet50").build()
    if named is not None and found.config is not None and found.config.backbone != named:
        raise UserError(f"{path} is of a {found.config.backbone}, not of a {named}: leave --backbone out")
    return found


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
        prepare = found.transforms()
        network.image_size = prepare.crop_size[0]
        network.mean, network.std = tuple(prepare.mean), tuple(prepare.std)
        inner: Any = network.network
        if hasattr(inner, "transform_input"):
            inner.transform_input = True  # as torchvision does with these weights
    return network


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
    backbone = Backbone(network, int(features))
    prepare: Any = timm.data.resolve_model_data_config(network)  # type: ignore[attr-defined,no-untyped-call]
    backbone.image_size = prepare["input_size"][-1]
    backbone.mean, backbone.std = tuple(prepare["mean"]), tuple(prepare["std"])
    return backbone


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors only: nothing in the file is executed."""
    if path.suffix.lower() == ".onnx":
        raise UserError(f"{path}: ONNX files are written, not read: give the run folder or its .safetensors export")
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
            f"shape, the first is {missing[0]}; name the architecture with --backbone. One with a stem or width of its "
            "own is known only to its run folder and to a .safetensors export: name one of those instead"
        )
    network.load_state_dict({key: state[key] for key in wanted})
