"""Linear probes on every stage of a frozen backbone, all trained together from one forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from interclr.data.source import Source
from interclr.evaluate.base import (
    Context,
    Evaluation,
    LabelledData,
    Subject,
    check_labels,
)
from interclr.evaluate.heads import ACCURACIES, TOP, Measured, best_rate
from interclr.evaluate.plots import figure
from interclr.evaluate.probe import Plan, Probe
from interclr.evaluate.stages import Stages
from interclr.run.files import save_tensors
from interclr.types import UserError

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]


SWEEP = (0.001, 0.003, 0.01, 0.03, 0.1)
PRESETS = {
    # The public code of these two normalises the pooled features, which the papers do not say. One fixed rate needs it:
    # without, a network whose features are small learns next to nothing.
    "imagenet": Plan(100, (0.01,), (30, 60, 90), batch_norm=True, augment=True),
    "places205": Plan(14, (0.01,), (3.5, 7, 10.5), batch_norm=True, augment=True),
    "cifar": Plan(100, SWEEP, None, batch_norm=True, augment=False),
    # Under 20,000 images about 9,000 numbers a stage would let noise be learnt by heart: with 4,096 training images a
    # stage that has 53 % with 2,048 numbers has 60 % with 512. It is also quick on a CPU.
    "small": Plan(30, (0.01, 0.03, 0.1, 0.3), None, True, False, dims=512, batch=128, weight_decay=1e-3),
}
SMALL = 20_000


class Linear(Evaluation):
    """``preset`` ``auto``: the paper's for imagenet and places205, ``small`` under 20,000 images, else ``cifar``.

    Whatever else is set replaces the preset's value. With several learning rates each stage's is chosen on a tenth of
    the *training* set held out by class (``select: held-out``), then the chosen heads are trained again on all of it;
    the best stage is chosen by the same tenth. ``select: test`` chooses rate and stage by test accuracy, as papers do,
    which flatters a little. With one rate, as in the paper's presets, nothing is held out and the best stage is that on
    test, as in the paper. A class with one training image lends nothing to the held-out tenth; where no class has
    two, the middle rate is taken. The result says which way it went.
    """

    name: Literal["linear"] = "linear"
    preset: Literal["auto", "imagenet", "places205", "cifar", "small"] = "auto"
    epochs: Count | None = None
    batch: Annotated[int, Field(ge=2)] | None = None
    learning_rates: Annotated[tuple[Rate, ...], Field(min_length=1)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    dims: Count | None = None  # of every stage, about
    batch_norm: bool | None = None  # BatchNorm1d without scale and shift before the heads
    augment: bool | None = None  # random resized crop 0.08–1 and flip; the backbone then runs every epoch
    final: bool = False  # also probe the backbone's output (global average), as is usual on small images
    select: Literal["held-out", "test"] = "held-out"
    cache_gb: Annotated[float, Field(ge=0)] = 16.0  # most memory for features in float16; beyond it, no cache
    save_epochs: Count = 1  # between states from which a run without cache goes on

    @classmethod
    def qualifier(cls, figure: str, figures: Mapping[str, float]) -> str:
        stages = [name.removesuffix("_top1") for name in figures if name.endswith("_top1")]
        return stages[int(figures["best_stage"])]

    def continues(self, data: LabelledData) -> bool:
        """Where features are not kept, which cannot be told beforehand of those that are too large for memory."""
        return self.plan(data).augment

    def plan(self, data: LabelledData) -> Plan:
        return self._preset(data)[1]

    def _preset(self, data: LabelledData) -> tuple[str, Plan]:
        name: str = self.preset
        if name == "auto":
            known = {"imagenet", "places205"} & {data.name}
            name = known.pop() if known else "small" if len(data.train) < SMALL else "cifar"
        fields = ("epochs", "batch", "learning_rates", "weight_decay", "dims", "batch_norm", "augment")
        chosen: dict[str, Any] = {f: getattr(self, f) for f in fields if getattr(self, f) is not None}
        plan = PRESETS[name]
        if plan.drops is not None and self.epochs is not None:  # the same shape over another length
            chosen["drops"] = tuple(drop * self.epochs / plan.epochs for drop in plan.drops)
        return name, replace(plan, **chosen)

    def run(self, subject: Subject, data: LabelledData, context: Context) -> dict[str, float]:
        check_labels(data)
        preset, plan = self._preset(data)
        stages = Stages(subject.backbone, subject.image_size, plan.dims, self.final, context.device)
        probe = Probe(plan, subject, data, context, stages, self)
        rates = torch.tensor(plan.learning_rates).expand(len(stages.parts), -1)
        everything = torch.arange(len(data.train))
        held, kept = held_out(data.train, context.seed)
        searched: Measured | None = None
        selected_on = "test"
        if len(plan.learning_rates) > 1 and self.select == "held-out":
            if len(held):
                heads, _ = probe.fit("search", rates, kept)
                searched = heads.measure(probe.shown(data.train, held))
                choice, selected_on = best_rate(searched), "held-out training images"
            else:
                choice = torch.full((len(rates),), len(plan.learning_rates) // 2)
                context.screen.warn(
                    "no class has two training images to choose a learning rate by: the middle one it is"
                )
                selected_on = "nothing (middle learning rate); the stage on test"
            rates = rates.gather(1, choice[:, None])
        heads, curves = probe.fit("final", rates, everything)
        test = heads.measure(probe.shown(data.test))
        choice = best_rate(test)
        if not bool(test.loss.gather(1, choice[:, None].to(test.loss.device)).isfinite().any()):
            raise UserError("every linear head diverged: give lower learning_rates, or batch_norm: true")
        heads, curves = heads.pick(choice), curves.gather(2, choice.view(1, -1, 1).expand(len(curves), -1, 1))[..., 0]
        figures_of = {
            stage: {
                "top1": float(test.top1[i, choice[i]]),
                **({"top5": float(test.top5[i, choice[i]])} if data.classes > TOP else {}),
                "learning_rate": round(float(heads.rates[i, 0]), 8),  # single precision
                "dims": part.stop - part.start,
                "pooled": list(stages.shapes[stage]),
            }
            for i, (stage, part) in enumerate(stages.parts.items())
        }
        if searched is not None:
            for i, found in enumerate(figures_of.values()):
                found["held_out_top1"] = float(searched.top1[i].max())
        best = max(figures_of, key=lambda stage: figures_of[stage].get("held_out_top1", figures_of[stage]["top1"]))
        position = list(figures_of).index(best)
        kinds = [key for key in ACCURACIES if key in figures_of[best]]
        figures = {
            **{key: figures_of[best][key] for key in kinds},
            "best_stage": float(position),
            **{f"{stage}_{key}": found[key] for stage, found in figures_of.items() for key in kinds},
        }
        self._table(figures_of, best, preset, selected_on, subject, data, context)
        _draw(context.out / "linear", figures_of, best, curves, data)
        part = list(stages.parts.values())[position]
        save_tensors(
            context.out / "predictions.safetensors",
            {"ranked": test.ranked[:, position, choice[position]], "label": test.label},
        )
        save_tensors(
            context.out / "head.safetensors",
            {
                "weight": heads.weight[part].T,
                "bias": heads.bias[position, 0],
                **({"mean": heads.mean[part], "variance": heads.variance[part]} if plan.batch_norm else {}),
            },
        )
        self.write_result(
            subject,
            data.name,
            context,
            {
                "preset": preset,
                "plan": asdict(plan),
                "cached": probe.cache is not None,
                "selected_on": selected_on,
                "best_stage": best,
                "figures": figures,
                "stages": figures_of,
                "training_loss": {stage: curves[:, i].tolist() for i, stage in enumerate(stages.parts)},
            },
        )
        probe.forget()
        return figures

    def _table(
        self,
        figures_of: dict[str, dict[str, Any]],
        best: str,
        preset: str,
        selected_on: str,
        subject: Subject,
        data: LabelledData,
        context: Context,
    ) -> None:
        kinds = [key for key in ACCURACIES if key in figures_of[best]]
        rows = [
            (
                f"{stage} *" if stage == best else stage,
                *(f"{found[key]:.2f}" for key in kinds),
                f"{found['learning_rate']:g}",
                f"{found['dims']:,}",
            )
            for stage, found in figures_of.items()
        ]
        title = f"linear probes of {subject.name} on {data.name} (preset {preset}; * best, chosen on {selected_on})"
        header = ("stage", *(ACCURACIES[key] for key in kinds), "learning rate", "features")
        context.screen.table(title, rows, header)


def held_out(source: Source, seed: int, share: float = 0.1) -> tuple[Tensor, Tensor]:
    """Rows held out and rows kept: of each class a tenth, at least one where it has two, none where it has one."""
    assert source.labels is not None
    generator = torch.Generator().manual_seed(seed)
    held = []
    for value in source.labels.unique().tolist():
        rows = (source.labels == value).nonzero().flatten()
        count = max(round(share * len(rows)), 1) if len(rows) > 1 else 0
        held.append(rows[torch.randperm(len(rows), generator=generator)[:count]])
    chosen = torch.cat(held).sort().values
    kept = torch.ones(len(source), dtype=torch.bool)
    kept[chosen] = False
    return chosen, kept.nonzero().flatten()


def _draw(path: Path, figures_of: dict[str, dict[str, Any]], best: str, curves: Tensor, data: LabelledData) -> None:
    with figure(path, columns=2, width=5.2) as (left, right):
        for i, (stage, found) in enumerate(figures_of.items()):
            label = f"{stage}, rate {found['learning_rate']:g}"
            left.plot(range(1, len(curves) + 1), curves[:, i].tolist(), label=label, color=f"C{i}")
            bar = right.bar([stage], [found["top1"]], color=f"C{i}", alpha=1.0 if stage == best else 0.55)
            right.bar_label(bar, fmt="%.1f", padding=2)
        left.set_xlabel("epoch")
        left.set_ylabel("training loss")
        left.set_title("linear heads, chosen rate of each stage")
        left.legend(fontsize=9)
        right.set_ylabel("test top-1, %")
        right.set_title(f"stages on {data.name}")
        right.margins(y=0.12)
        right.grid(axis="x", visible=False)
