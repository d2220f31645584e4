"""A backbone for other libraries: torchvision's and timm's names, safetensors, ONNX, and Detectron2's pickle.

Every format but ONNX holds the weights alone, without a classifier; the file name gets the format's suffix where it has
none. Numbers are copied bit for bit. A stem for small images is exported as it is, with a note on how to rebuild it.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from interclr.models import Backbone
from interclr.models.backbones import NarrowResNet
from interclr.run.files import replacing, write_bytes
from interclr.types import UserError

Format = Literal["torchvision", "timm", "safetensors", "onnx", "detectron2"]
SUFFIXES = {"onnx": (".onnx",), "detectron2": (".pkl",), "safetensors": (".safetensors",)}
WEIGHTS = (".safetensors", ".pth", ".pt")  # torchvision and timm read either
RESNET = re.compile(
    r"(conv1|bn1|layer[1-4]\.\d+\.(conv[123]|bn[123]|downsample\.[01]))"
    r"\.(weight|bias|running_mean|running_var|num_batches_tracked)"
)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and what its reader must know."""

    path: Path
    tensors: int
    note: str


def export(backbone: Backbone, path: str | Path, format: Format = "torchvision", image_size: int = 224) -> Exported:
    """Write ``backbone`` to ``path``. ``image_size`` matters to ONNX only, whose graph has one size and any batch.

    ``torchvision`` and ``timm`` write safetensors, or a plain state dict where the path ends in ``.pth``.
    ``safetensors`` takes any backbone under its network's own names. ``detectron2`` takes ResNets, and so
    does ``timm`` unless the network is timm's own.
    """
    if format not in get_args(Format):
        raise UserError(f"there is no export format {format!r}: choose {', '.join(get_args(Format))}")
    if Path(path).is_dir():
        raise UserError(f"{path} is a folder: name the file to write")
    path = _with_suffix(Path(path), format)
    network = backbone.network
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
    stem = _joined(shape_note(network), stem_note(network))
    if format in ("torchvision", "detectron2") or (format == "timm" and not _is_of(network, "timm")):
        _require_batch_norm(network, format)
    if format == "onnx":
        return Exported(path, len(state), _onnx(backbone, path, image_size))
    if format == "detectron2":
        _require_resnet(state, format)
        write_bytes(path, detectron2_pickle(state))
        note = (
            "in Detectron2 set MODEL.WEIGHTS to this file, INPUT.FORMAT to RGB, MODEL.PIXEL_MEAN and PIXEL_STD to the "
            "training's mean and std times 255, and MODEL.RESNETS.STRIDE_IN_1X1 to False."
        )
        return Exported(path, len(state), _joined(note, stem, input_note(backbone)))
    if format == "timm" and not _is_of(network, "timm"):
        _require_resnet(state, format)
    if format == "torchvision" and not _is_torchvision(network):
        _require_resnet(state, format)
    note = _joined("load with strict=False: there is no classifier.", stem, input_note(backbone))
    if path.suffix == ".safetensors":
        about = {"format": "pt", "features": str(backbone.features), "note": note} | backbone.description()
        write_bytes(path, to_safetensors(state, about))
    else:
        stream = io.BytesIO()
        torch.save(state, stream)
        write_bytes(path, stream.getvalue())
    return Exported(path, len(state), note)


def _joined(*notes: str) -> str:
    return " ".join(filter(None, notes))


def input_note(backbone: Backbone) -> str:
    """What the network was trained on; empty where nobody knows."""
    if backbone.mean is None or backbone.std is None:
        return ""
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (backbone.mean, backbone.std))
    side = f" of {backbone.image_size} pixels" if backbone.image_size is not None else ""
    return f"Trained on views{side}: values from 0 to 1, minus ({mean}), over ({std})."


def shape_note(network: nn.Module) -> str:
    """Of a ResNet that nobody else has a name for."""
    if not isinstance(network, NarrowResNet):
        return ""
    stages = (network.layer1, network.layer2, network.layer3, network.layer4)
    blocks = "-".join(str(len(stage)) for stage in stages if isinstance(stage, nn.Sequential))
    return (
        f"No other library has this network, a ResNet of {blocks} basic blocks from {network.conv1.out_channels} "
        "channels: do not load it into one of another shape. interclr.load of the run, or of a .safetensors, "
        "and ONNX rebuild it; for torchvision's ResNet-18 train with model.backbone=resnet18 model.stem=standard."
    )


def _require_batch_norm(network: nn.Module, format: str) -> None:
    if any(isinstance(module, nn.GroupNorm) for module in network.modules()):
        raise UserError(
            f"{format}'s ResNets have BatchNorm, and this backbone has GroupNorm under the same names: they would load "
            "it and compute something else. Export it as safetensors or onnx"
        )


def stem_note(network: nn.Module) -> str:
    """How to rebuild a ResNet's stem that is not the usual 7×7 one; empty where there is nothing to say."""
    conv, pool = getattr(network, "conv1", None), getattr(network, "maxpool", None)
    if not isinstance(conv, nn.Conv2d) or (conv.kernel_size == (7, 7) and not isinstance(pool, nn.Identity)):
        return ""
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    without = " and no max-pool" if isinstance(pool, nn.Identity) else ""
    return (
        f"The stem is for small images, a {kernel}×{kernel} convolution of stride {stride}{without}: before loading, "
        f"set conv1 = Conv2d(3, {conv.out_channels}, {kernel}, {stride}, {conv.padding[0]}, bias=False)"
        + (" and maxpool = Identity()." if without else ".")
    )


def detectron2_name(name: str) -> str:
    """``layer1.0.bn2.weight`` → ``res2.0.conv2.norm.weight``; ``downsample`` is ``shortcut``; the rest is ``stem``."""
    if not name.startswith("layer"):
        name = f"stem.{name}"
    name = re.sub(r"^layer(\d)", lambda match: f"res{int(match[1]) + 1}", name)
    name = name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
    return re.sub(r"\bbn(\d)\b", r"conv\1.norm", name)


def detectron2_pickle(state: dict[str, Tensor]) -> bytes:
    """The bytes of the ``.pkl`` that Detectron2's checkpointer reads: plain NumPy arrays under its own names."""
    model = {detectron2_name(name): tensor.numpy() for name, tensor in state.items()}
    stream = io.BytesIO()
    _ArrayPickler(stream, protocol=4).dump({"model": model, "__author__": "interclr", "matching_heuristics": True})
    return stream.getvalue()


class _ArrayPickler(pickle.Pickler):
    """Arrays as ``numpy.ndarray(shape, dtype, bytearray)``: NumPy 2's own pickles do not load under NumPy before 1.26,
    where Detectron2 often lives; these do, and they name nothing but ``numpy.ndarray`` and ``bytearray``."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            array: NDArray[Any] = np.ascontiguousarray(value).reshape(value.shape)
            order = array.astype(array.dtype.newbyteorder("<"), copy=False)
            return np.ndarray, (value.shape, order.dtype.str, bytearray(order.tobytes()))
        return NotImplemented


def _onnx(backbone: Backbone, path: Path, image_size: int) -> str:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"export to ONNX needs {' and '.join(missing)}: pip install 'interclr[onnx]'")
    device = next(backbone.parameters()).device
    training = backbone.training
    images = torch.zeros(2, 3, image_size, image_size, device=device)
    backbone.eval()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch to itself
            program = torch.onnx.export(
                backbone,
                (images,),
                input_names=["images"],
                output_names=["features"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                verbose=False,
            )
        assert program is not None
        program.model.metadata_props.update(backbone.description())
        with replacing(path) as temporary:
            program.save(str(temporary), external_data=False)
    finally:
        backbone.train(training)
    told = f"Input 'images' (batch, 3, {image_size}, {image_size}), normalised as in training; output 'features'."
    return _joined(told, input_note(backbone))


def _with_suffix(path: Path, format: str) -> Path:
    allowed = SUFFIXES.get(format, WEIGHTS)
    if path.suffix.lower() in allowed:
        return path
    if path.suffix.lower() in (*WEIGHTS, ".onnx", ".pkl"):
        raise UserError(f"{path}: {format} files end in {' or '.join(allowed)}")
    return path.with_name(path.name + allowed[0])


def _require_resnet(state: dict[str, Tensor], format: str) -> None:
    strange = next((name for name in state if not RESNET.fullmatch(name)), None)
    if strange is not None or "layer1.0.conv1.weight" not in state:
        what = f"it has {strange!r}" if strange is not None else "it has no stages"
        raise UserError(f"{format} names are known for plain ResNets only, and this backbone is none ({what})")


def _is_of(network: nn.Module, library: str) -> bool:
    return type(network).__module__.split(".")[0] == library


def _is_torchvision(network: nn.Module) -> bool:
    return any(base.__module__.split(".")[0] == "torchvision" for base in type(network).__mro__)
