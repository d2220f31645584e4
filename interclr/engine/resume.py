"""Which settings may change between the sittings of a run, and which would make it another run."""

from __future__ import annotations

from typing import Any

import yaml

from interclr.config import CARRIED_OUT, Settings, flat, settings_from
from interclr.engine.build import bank_kind
from interclr.learner import InterConfig
from interclr.types import UserError

# What may be another in the next sitting. The data themselves are compared by their fingerprint.
FREE = (*CARRIED_OUT, "data.source", "monitor.")
# What a step number or a stored tensor stands for.
FIXED = ("seed", "data.batch", "engine.accumulate", "model.", "method.name", "optimiser.name")


def compared(settings: Settings) -> dict[str, Any]:
    """Every setting by its dotted name, but those that say only where and how."""
    return {key: value for key, value in flat(settings.model_dump(mode="json")).items() if not key.startswith(FREE)}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def settings_of(saved: str) -> Settings:
    return settings_from(yaml.safe_load(saved))


def changed_settings(saved: str, now: Settings) -> list[str]:
    """``key: old → new`` for every setting that changes the result. Raises where the run could not be continued."""
    before, after = compared(settings_of(saved)), compared(now)
    _fold_view(before, after)
    _fold_view(after, before)
    lines = {key: f"{key}: {before.get(key)} → {after.get(key)}" for key in differing(before, after)}
    fatal = [line for key, line in lines.items() if key.startswith(FIXED)]
    if _head(before) != _head(after):  # weights of its own, there from the first step on
        fatal.append(f"inter.head: {_head(before)} → {_head(after)}")
    if fatal:
        raise UserError(
            f"--resume cannot change {'; '.join(fatal)}. Resume with the run's own value, or start a new run"
        )
    return list(lines.values())


def _fold_view(without: dict[str, Any], given: dict[str, Any]) -> None:
    """Of a view that only one of the two has, one line and not one for each of its settings."""
    view = "inter.target_view"
    if without.get(view, 0) is None and view not in given:
        parts = [key for key in given if key.startswith(f"{view}.")]
        for key in parts:
            del given[key]
        if parts:
            given[view] = "a view of its own"


def _head(flat: dict[str, Any]) -> str:
    return str(flat.get("inter.head", "shared")) if flat.get("inter.intra_weight", 1) < 1 else "shared"


def own_bank(settings: Settings) -> tuple[float, str] | None:
    """ω and number format of a bank that is at work before the inter branch begins (NPID's); None: there is none."""
    momentum = getattr(settings.method, "bank_momentum", None)
    return None if momentum is None else bank_kind(settings.branch, momentum)


def start_of_inter(saved: str, now: Settings) -> InterConfig | None:
    """The inter branch as it is now but with its start of before, for a run in which it has begun; None: no difference.

    A later start, as ``auto`` may mean by now, would switch the branch off and let its bank grow stale.
    """
    before = settings_of(saved).inter
    if before is None or now.inter is None or before.warmup_epochs == now.inter.warmup_epochs:
        return None
    return now.inter.model_copy(update={"warmup_epochs": before.warmup_epochs})
