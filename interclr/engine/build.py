"""From settled settings to a learner, its device and its step."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from interclr import dist
from interclr.bank import MemoryBank
from interclr.config import Settings
from interclr.data.view_parameters import View
from interclr.data.views import Views
from interclr.engine.step import Plan, TrainStep
from interclr.intra.base import Margin
from interclr.learner import InterConfig, Learner
from interclr.models import Backbone
from interclr.optim import REFERENCE_BATCH
from interclr.types import UserError


def choose_device(wanted: str) -> torch.device:
    """``auto`` takes the GPU when there is one; a GPU asked for that is not there is an error, not a slow run."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UserError(f"engine.device: {wanted!r} is not a device; use auto, cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"engine.device: {wanted!r} is not supported; use auto, cpu, cuda or cuda:0")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("engine.device: a GPU was asked for but torch sees none; use engine.device=cpu or auto")
        number = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
        if number >= torch.cuda.device_count():
            raise UserError(f"engine.device: cuda:{number} asked for, but there are {torch.cuda.device_count()} GPU(s)")
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    return device


def set_determinism(deterministic: bool) -> None:
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic


def build_backbone(settings: Settings) -> Backbone:
    backbone = settings.model.build()
    if settings.data.image_size != "auto":
        backbone.check_takes(settings.data.image_size)
    return backbone


def build_learner(settings: Settings, images: int) -> Learner:
    """Everything random in the weights follows from the seed; the same on every rank."""
    torch.manual_seed(settings.seed)
    inter = settings.branch
    backbone = build_backbone(settings)
    intra = settings.method.build(backbone, separate_head=inter is not None and inter.head == "separate")
    intra.margin = Margin(settings.margin, settings.margin_kind)
    if settings.model.norm == "sync" and dist.world() > 1:
        if settings.engine.device == "cpu":
            raise UserError(
                "model.norm=sync works on GPUs only; on CPUs use model.norm=group, or batch with one process"
            )
        intra.synchronise_norm()
    if inter is None and not intra.uses_bank:
        return Learner(intra)
    momentum, numbers = bank_kind(inter, intra.bank_momentum)
    dtype = torch.bfloat16 if numbers == "bfloat16" else torch.float32
    clusters = int(inter.clusters) if inter is not None else 0
    generator = torch.Generator().manual_seed(settings.seed)
    try:
        bank = MemoryBank(images, intra.dim, clusters, momentum, dtype, generator)
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):  # torch has no class of its own for memory that is not there
            raise
        size = images * intra.dim * dtype.itemsize / 1e9
        raise UserError(
            f"the memory bank of {images:,} images × {intra.dim} numbers takes {size:,.1f} GB, more than there is: "
            "use inter.bank_dtype=bfloat16 (with a branch), a smaller method.dim or fewer images"
        ) from error
    if inter is None:
        return Learner(intra, bank)
    return Learner(intra, bank, inter.labels.build(), inter.sampler.build(), inter)


def bank_kind(inter: InterConfig | None, momentum: float) -> tuple[float, str]:
    """ω and number format of the bank, where ``momentum`` suits the method."""
    if inter is None:
        return momentum, "float32"
    return inter.bank_momentum or momentum, inter.bank_dtype


def build_views(settings: Settings, kinds: Sequence[View], device: torch.device) -> Views:
    """On a GPU in half precision the views are what the encoder reads, made by products of half precision too."""
    half = device.type == "cuda" and settings.engine.precision in ("bf16", "fp16")
    return Views(
        kinds,
        int(settings.data.image_size),
        settings.data.mean,
        settings.data.std,
        dtype=(torch.bfloat16 if settings.engine.precision == "bf16" else torch.float16) if half else torch.float32,
        product=torch.float16 if half else None,
        compiled=settings.engine.mode in ("compile", "graph"),
    )


def peak_rate(settings: Settings) -> float:
    """base_lr · effective batch / 256."""
    return settings.optimiser.base_lr * int(settings.data.batch) * settings.engine.accumulate / REFERENCE_BATCH


def build_plan(settings: Settings, images: int) -> Plan:
    return Plan(
        epochs=int(settings.schedule.epochs),
        steps_per_epoch=images // int(settings.data.batch),
        accumulate=settings.engine.accumulate,
        warmup_epochs=settings.schedule.warmup_epochs,
        peak_rate=peak_rate(settings),
        seed=settings.seed,
    )


def build_step(settings: Settings, images: int, device: torch.device) -> TrainStep:
    """The step with its learner and optimiser; ``engine.mode`` is no longer ``auto``."""
    engine = settings.engine
    learner = build_learner(settings, images)
    try:
        learner = learner.to(device)
    except torch.OutOfMemoryError as error:
        size = sum(tensor.numel() * tensor.itemsize for tensor in learner.state_dict().values()) / 1e9
        raise UserError(
            f"networks and memory bank take {size:,.1f} GB, more than {device} has free: use a smaller network, "
            "inter.bank_dtype=bfloat16 (with a branch) or a smaller method.dim"
        ) from error
    if engine.channels_last:
        learner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plan, kinds = build_plan(settings, images), settings.views[: learner.intra.views_needed]
    target = None if settings.branch is None else settings.branch.target_view
    optimiser = settings.optimiser.build(learner.intra.encoder, plan.peak_rate)
    return TrainStep(
        learner,
        build_views(settings, kinds, device),
        optimiser,
        plan,
        device,
        engine.precision,
        engine.channels_last,
        str(engine.mode),
        None if target is None else build_views(settings, [target], device),
    )
