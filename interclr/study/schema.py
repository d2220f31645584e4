"""What a study is: cells of overrides over a recipe, each trained with several seeds. Built-in ones are YAML data."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from interclr.config import explain
from interclr.types import Config, UserError

ALL = ("cost", "labels", "sampling", "margin-intra", "margin-inter", "lambda", "clusters", "negatives")
Factor = Annotated[float, Field(gt=0)]


class CellConfig(Config):
    """One setting of what the study varies. ``relative``: a key as a multiple of what the recipe has.

    Where the recipe says ``auto`` the multiple is of the number that auto means for the data at hand, so that a study
    written for ImageNet's 10,000 clusters makes sense on 200 images. A factor of 1 keeps the recipe's value where an
    override would lose it (``inter.sampler.name=hard`` replaces the whole sampler).
    """

    name: str
    x: float | None = None  # place on the axis; None: the value of the only relative key, if there is one
    overrides: tuple[str, ...] = ()
    relative: dict[str, Factor] = Field(default_factory=dict)


class Paper(Config):
    """What the paper saw, for orientation: other data, another network, another yardstick."""

    note: str = ""
    best: str | None = None  # the cell the paper found best
    values: dict[str, str] = Field(default_factory=dict)  # by cell, as printed in the paper


class Study(Config):
    title: str
    cells: Annotated[tuple[CellConfig, ...], Field(min_length=1)]
    axis: str = ""  # label of the axis along which the cells lie
    scale: Literal["linear", "log"] = "linear"
    figure: Literal["curve", "bars", "over-epochs", "table"] = "bars"
    recipe: str = "synthetic-mocov2-interclr"
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0, 1, 2)
    overrides: tuple[str, ...] = ()  # of every cell
    relative: dict[str, Factor] = Field(default_factory=dict)  # of every cell
    needs_negatives: bool = False  # a method without negatives computes the same in every cell
    own_process: bool = False  # a process for each cell, one at a time: for time and memory
    paper: Paper = Paper()

    @model_validator(mode="after")
    def _fits_together(self) -> Study:
        names = [cell.name for cell in self.cells]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"cells: two are called {twice[0]!r}; names tell them apart")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)} names one twice")
        if self.paper.best is not None and self.paper.best not in names:
            raise ValueError(f"paper.best: there is no cell {self.paper.best!r}; cells are {', '.join(names)}")
        return self


def study_names() -> list[str]:
    return list(ALL)


def open_studies(name: str) -> dict[str, Study]:
    """A built-in study by name, ``all`` of them, or a YAML file: by name, in the order they are run."""
    if name == "all":
        return {each: _built_in(each) for each in ALL}
    if name in ALL:
        return {name: _built_in(name)}
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        try:
            return {path.stem: read_study(path.read_text(), name)}
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
    close = difflib.get_close_matches(name, [*ALL, "all"], 2, 0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(ALL)} and all"
    raise UserError(f"no study {name!r}: {hint} (or give a .yaml file)")


def _built_in(name: str) -> Study:
    return read_study((resources.files("interclr.study") / "studies" / f"{name}.yaml").read_text(), name)


def read_study(text: str, where: str) -> Study:
    try:
        tree: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{where}: a study is a mapping of keys to values, with title and cells at least")
    try:
        return Study.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, Study)}") from error


def parse_seeds(text: str) -> tuple[int, ...]:
    """``3`` means seeds 0, 1, 2; ``0,7`` or ``7,`` means those."""
    try:
        seeds = tuple(int(part) for part in text.split(",") if part) if "," in text else tuple(range(int(text)))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0:
        raise UserError(f"--seeds {text}: give how many (3), or which ones (0,1,7)")
    return seeds
