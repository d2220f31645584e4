"""A run goes on from its latest checkpoint: what has to be as it was, what may be another, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interclr import dist
from interclr.config import Settings
from interclr.engine.dataset import TrainingData
from interclr.engine.resume import changed_settings, own_bank, settings_of, start_of_inter
from interclr.engine.step import Plan, TrainStep
from interclr.learner import Learner
from interclr.run import checkpoint
from interclr.screen import Screen
from interclr.types import UserError

FORMAT = 1  # of the checkpoint, and what every one of it has
PARTS = (
    *("learner", "optimiser", "scaler", "averages", "clusters_started", "seconds", "measured", "unreadable", "data"),
    "settings",
)


@dataclass(frozen=True)
class Restored:
    state: checkpoint.State
    settings: Settings  # as given, but with the inter branch beginning when it does
    changes: list[str] | None  # between sittings, of what decides the result; None where nobody knows


def restore(
    step_once: TrainStep, settings: Settings, folder: Path, data: TrainingData, screen: Screen
) -> Restored | None:
    """Learner, optimiser and scaler as the latest checkpoint has them, and what else it holds; None: there is none."""
    found = checkpoint.load_latest(folder / "checkpoint", PARTS)
    if found is None:
        screen.warn(f"nothing to resume in {folder}: starting from the beginning")
        return None
    state, path, complaints = found
    for complaint in complaints:
        screen.warn(complaint)
    if state["format"] != FORMAT:
        raise UserError(f"{path} has checkpoint format {state['format']}, this version reads {FORMAT}")
    if state["data"] != data.source.fingerprint():
        raise UserError(
            f"the data are not those {path.name} was trained on: {_what_changed(state, settings, len(data.source))}, "
            "and indices may point to other images. Restore the data, or start a new run"
        )
    if state["step"] > step_once.plan.total:
        raise UserError(
            f"{path.name} is at step {state['step']}, beyond the {step_once.plan.total} steps of these settings"
        )
    settings = _with_start_of_inter(state, settings, step_once.plan, screen)
    step_once.learner.inter = settings.branch
    changes = _changes(state, settings, screen)
    try:
        _load(step_once, state)
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())[:300]
        raise UserError(f"{path.name} does not fit these settings (resume with those of the run): {text}") from error
    before = state.get("changes")  # which checkpoints of before do not tell
    return Restored(state, settings, [*(before or []), *changes] if changes else before)


def _what_changed(state: checkpoint.State, settings: Settings, images: int) -> str:
    """Of the images since ``state`` was saved: another place, another number, or other names and labels."""
    before, now = settings_of(state["settings"]).data.source, settings.data.source
    was = state.get("images", images)  # which checkpoints of before do not tell
    other = [f"{now} is not {before}"] if before != now else []
    other += [f"there were {was:,} images and are {images:,} now"] if was != images else []
    return ", ".join(other) or f"names of the images of {now}, or labels that are read of them, have changed"


def _with_start_of_inter(state: checkpoint.State, settings: Settings, plan: Plan, screen: Screen) -> Settings:
    """A branch that has begun did so when it did; one that should have begins with the next epoch."""
    if state["clusters_started"]:
        kept = start_of_inter(state["settings"], settings)
        if kept is None:
            return settings
        screen.say(f"the inter branch has begun: inter.warmup_epochs stays {kept.warmup_epochs}")
        return settings.model_copy(update={"inter": kept})
    inter, first = settings.branch, -(-state["step"] // plan.steps_per_epoch)
    if inter is None or int(inter.warmup_epochs) >= first:
        return settings
    if first >= plan.epochs:
        raise UserError(
            f"inter.warmup_epochs: the run has reached its last epoch without an inter branch, which cannot begin "
            f"at {inter.warmup_epochs} any more: resume from an earlier checkpoint, or with more epochs"
        )
    screen.warn(f"inter.warmup_epochs: the run is past {inter.warmup_epochs}, so the branch begins at {first}")
    return settings.model_copy(update={"inter": inter.model_copy(update={"warmup_epochs": first})})


def _changes(state: checkpoint.State, settings: Settings, screen: Screen) -> list[str]:
    """What decides the result and is not as in the run so far, said aloud."""
    found, started = [], state["clusters_started"]
    before, now = own_bank(settings_of(state["settings"])), own_bank(settings)
    if not started and before is not None and now is not None and before != now:
        screen.warn(
            f"the bank, at work from the first step on, had ω and numbers {before} and now has {now}: the "
            "result will differ from that of a run with these settings"
        )
        found.append(f"ω and numbers of the bank: {before} → {now}")
    changed, processes = changed_settings(state["settings"], settings), state.get("processes", dist.world())
    changed += [f"processes: {processes} → {dist.world()}"] if processes != dist.world() else []
    for change in changed:
        if not started and change.startswith("inter"):
            screen.say(f"the inter branch has not begun and will be as set now, {change}")
        else:
            screen.warn(f"not as in the run so far, {change}: the result will differ")
            found.append(change)
    return found


def _load(step_once: TrainStep, state: checkpoint.State) -> None:
    learner, optimiser = step_once.learner, step_once.optimiser
    fresh = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimiser.param_groups]
    started = state["clusters_started"]
    if started and learner.inter is None:
        raise ValueError("the inter branch of this run has begun and cannot be taken away: resume with its settings")
    if started and any(key.startswith("slow.") for key in state["learner"]) != (learner.slow is not None):
        raise ValueError(
            "inter.target_view cannot be given to a branch that has begun, nor taken from it, where the method has no "
            "momentum encoder: the copy that sees it begins with the branch (a run from before that copy cannot go on)"
        )
    learner.load_state_dict(state["learner"] if started else _before_inter(learner, state["learner"]))
    if not started and learner.bank is not None:
        learner.bank.rebuild()
    optimiser.load_state_dict(state["optimiser"])
    for group, own in zip(optimiser.param_groups, fresh, strict=True):
        group.update(own)  # a changed weight decay or momentum counts; the state is the run's
    step_once.scaler.load_state_dict(state["scaler"])


def _before_inter(learner: Learner, saved: dict[str, Any]) -> dict[str, Any]:
    """A state in which the inter branch has not begun: by now it may be another one, or be new, or gone.

    The method's own state is the run's, and with it the features that NPID keeps in a bank; the rest of a bank is
    as it is made, which is what it would be at this step of a run that had these settings from its first step.
    """
    own = {key: value for key, value in learner.state_dict().items() if not key.startswith("intra.")}
    method = {key: value for key, value in saved.items() if key.startswith("intra.")}
    features = {key: saved[key] for key in ("bank.features",) if learner.intra.uses_bank}
    return own | method | features
