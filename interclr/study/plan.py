"""From a study to the settings of every cell and seed: what will be trained, and the name under which it is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interclr.config import CARRIED_OUT, Settings, joined, load_recipe, merge, quoted, settings_from
from interclr.engine.build import choose_device
from interclr.engine.dataset import Facts, median_side, open_training_source
from interclr.engine.settle import settle
from interclr.study.schema import CellConfig, Study
from interclr.types import UserError

AUTO = "auto"
LEAST = {"inter.clusters": 2}


@dataclass(frozen=True, slots=True)
class Cell:
    """One training run of a study."""

    name: str
    seed: int
    settings: Settings
    x: float | None = None
    overrides: tuple[str, ...] = ()  # over the recipe, whole: what ``interclr pretrain`` would be given
    key: str = field(default="")  # hash of the settings: the folder under ``cells/``


@dataclass(slots=True)
class _Base:
    """The recipe with the user's overrides; settled, which means opening the data, only where a multiple needs it."""

    settings: Settings
    _settled: tuple[dict[str, Any], int] | None = None

    def value(self, key: str, factor: float) -> Any:
        """``factor`` times the recipe's value; ``auto`` stays auto at a factor of 1."""
        base = _get(self.settings.model_dump(mode="json"), key)
        if base in (None, AUTO):
            return AUTO if factor == 1 else self._multiple(key, self.number(key), factor, *self._settle())
        return self._multiple(key, base, factor)

    def number(self, key: str) -> Any:
        """What ``auto`` means for the data at hand."""
        return _get(self._settle()[0], key)

    def _multiple(self, key: str, base: Any, factor: float, tree: Any = None, images: int | None = None) -> Any:
        if isinstance(base, bool) or not isinstance(base, int | float):
            raise UserError(f"relative: {key} is {base!r} in the recipe, which has no multiples")
        if isinstance(base, float):
            return base * factor
        value = max(LEAST.get(key, 1), round(base * factor))
        return value if images is None else min(value, _most(key, tree, images))

    def _settle(self) -> tuple[dict[str, Any], int]:
        if self._settled is None:
            data = self.settings.data
            source = open_training_source(data)
            facts = Facts(
                len(source) - data.hold_out, median_side(source), choose_device(self.settings.engine.device).type
            )
            settings = self.settings
            if settings.inter is None:
                settings = settings_from(merge(settings.model_dump(mode="json"), {"inter": {}}))
            self._settled = settle(settings, facts)[0].model_dump(mode="json"), facts.images
        return self._settled


def default_recipe(study: Study, data: str | None) -> str:
    """A user's own images want the recipe that follows them, not the embedded set's sizes and views."""
    own = data is not None and Path(data).expanduser().exists()
    return "folder" if own and study.recipe == Study.model_fields["recipe"].default else study.recipe


def plan(
    study: Study,
    recipe: str | None = None,
    epochs: int | None = None,
    seeds: Sequence[int] | None = None,
    data: str | None = None,
    overrides: Sequence[str] = (),
) -> list[Cell]:
    """Every (cell, seed) with checked settings, seeds of a cell together.

    The recipe, then the study's overrides, then the cell's, then the user's; a user cannot set what the cells vary.
    """
    chosen = recipe or default_recipe(study, data)
    given = [] if data is None else [f"data.source={quoted(data)}"]
    given += [f"schedule.epochs={epochs}"] * (epochs is not None)
    given += overrides
    tree = load_recipe(chosen)
    base = _Base(settings_from(_apply(tree, given)))
    cells = []
    for cell in study.cells:
        _check_free(cell, given)
        multiples = {key: base.value(key, factor) for key, factor in (study.relative | cell.relative).items()}
        every = (*study.overrides, *cell.overrides, *given, *(f"{key}={value}" for key, value in multiples.items()))
        x = cell.x
        if x is None and len(cell.relative) == 1:
            key = next(iter(cell.relative))
            x = float(base.number(key) if multiples[key] == AUTO else multiples[key])
        for seed in study.seeds if seeds is None else seeds:
            try:
                settings = settings_from(_apply(tree, [*every, f"seed={seed}"]))
            except UserError as error:
                raise UserError(f"cell {cell.name!r}: {error}") from error
            cells.append(Cell(cell.name, seed, settings, x, (*every, f"seed={seed}"), key_of(settings)))
    return cells


def key_of(settings: Settings) -> str:
    """Equal for runs that compute the same. Of the device only the kind counts: what ``auto`` becomes depends on it."""
    tree = what_is_computed(settings)
    tree["engine"]["device"] = choose_device(settings.engine.device).type
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]


def what_is_computed(settings: Settings) -> dict[str, Any]:
    """The settings without how and where they are carried out."""
    tree = settings.model_dump(mode="json")
    for path in CARRIED_OUT:
        section, _, name = path.partition(".")
        if name:
            del tree[section][name]
        else:
            del tree[section]
    return tree


def _apply(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    return merge(tree, joined(overrides))


def _check_free(cell: CellConfig, given: Sequence[str]) -> None:
    varied = {text.partition("=")[0] for text in cell.overrides}
    for key in (text.partition("=")[0] for text in given):
        if key in varied or any(own.startswith(f"{key}.") for own in varied):
            raise UserError(f"{key} is what this study varies: leave it out, or write a study of your own")


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _most(key: str, tree: dict[str, Any], images: int) -> int:
    """A multiple beyond what the data hold would not be what is used, and the axis would lie."""
    if key == "inter.clusters":
        return max(2, images // 2)
    if key == "inter.sampler.negatives":
        return max(1, int(images * float(_get(tree, "inter.sampler.pool_fraction") or 1.0)))
    return images
