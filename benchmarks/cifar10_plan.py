"""What a plan of runs (benchmarks/cifar10.yaml) says, and what is wrong with one before anything is trained."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator
from with_classes import PART

from interclr.config import explain, load_settings
from interclr.evaluate import PROTOCOLS
from interclr.types import Config, UserError

ROOT = Path(__file__).resolve().parent.parent
CLI = ["-m", "interclr.cli"]  # what Python is started with
PLAN = ROOT / "benchmarks" / "cifar10.yaml"
RECORDS = ROOT / "results" / "cifar10"
Node = TypeVar("Node", bound=Config)


class From(Config):
    run: str
    epoch: Annotated[int, Field(ge=1)]


class Entry(Config):
    recipe: str
    overrides: tuple[str, ...] = ()
    note: str = ""
    start: From | None = Field(None, alias="from")
    # A control that trains with labels: what of its pairs is right (benchmarks/with_classes.py).
    classes: tuple[Annotated[str, Field(pattern=f"^({PART})$")], ...] = ()
    # A control that relates no images: its soft targets are learnt by the method's own loss (with_own_target.py).
    own_target: bool = False

    @model_validator(mode="after")
    def _is_one_control(self) -> Entry:
        if self.own_target and self.classes:
            raise ValueError("classes and own_target are two controls, each with a program of its own: give one")
        return self

    @property
    def control(self) -> list[str]:
        """The program that a control is trained by, and its words; none for what is none."""
        if self.own_target:
            return ["benchmarks/with_own_target.py"]
        return ["benchmarks/with_classes.py", ",".join(self.classes)] if self.classes else []


class Group(Config):
    about: str = ""  # stands above the group's table: what was asked, and found; figures: see cifar10_about.py
    short: str = ""  # the first group's: what a reader should take along, above everything
    choices: str = ""  # the first group's: what all choices came to, above those
    page: Literal["results", "choices", "time"] = "results"  # time: nothing but how long it took
    superseded: bool = False  # by a later group that asks the same: it stands behind all others
    apart: dict[str, tuple[str, ...]] = Field(
        {}
    )  # RUN@SEED and protocols whose figures are not comparable with others'
    lost: dict[str, str] = Field({})  # RUN@SEED that left no record, and what is known of it
    runs: Annotated[dict[str, Entry], Field(min_length=1)]
    common: tuple[str, ...] = ()
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    evaluate: tuple[str, ...] = ()


def read_plan(path: Path) -> dict[str, Group]:
    try:
        tree: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict) or not all(isinstance(group, dict) for group in tree.values()):
        raise UserError(f"{path}: a plan is a mapping of groups, each with runs")
    return {str(name): _group(group, f"{path.name}: {name}") for name, group in tree.items()}


def _group(tree: dict[str, Any], where: str) -> Group:
    runs = tree.get("runs")
    if isinstance(runs, dict):
        tree = tree | {"runs": {name: _checked(Entry, run, f"{where}.runs.{name}") for name, run in runs.items()}}
    group = _checked(Group, tree, where)
    for name, entry in group.runs.items():
        if not re.fullmatch(r"[\w.-]+", name):
            raise UserError(f"{where}.runs: {name!r} names a file: letters, digits, dot, dash and underscore only")
        line = [name]
        while entry.start is not None:
            line.append(entry.start.run)
            if entry.start.run not in group.runs:
                raise UserError(f"{where}.runs.{line[-2]}.from: there is no run {entry.start.run!r} in the group")
            if entry.start.run in line[:-1]:
                raise UserError(f"{where}.runs.{name}.from: continues itself, by way of {' → '.join(line)}")
            entry = group.runs[entry.start.run]
    for protocol in group.evaluate:
        if protocol.split()[:1] not in [[known] for known in PROTOCOLS]:
            raise UserError(f"{where}.evaluate: no protocol {protocol!r}; there are: {', '.join(PROTOCOLS)}")
    return group


def _checked(model: type[Node], tree: Any, where: str) -> Node:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, model)}") from error


@dataclass(frozen=True)
class Job:
    """A run of the plan with one seed."""

    group: str
    name: str
    seed: int
    entry: Entry
    overrides: tuple[str, ...]  # the group's, the run's own and the command line's
    evaluate: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.name}-s{self.seed}"

    @property
    def parent(self) -> str | None:
        return None if self.entry.start is None else f"{self.entry.start.run}-s{self.seed}"

    @property
    def key(self) -> str:
        return f"{self.group}/{self.title}"

    @property
    def parent_key(self) -> str | None:
        return None if self.parent is None else f"{self.group}/{self.parent}"

    @property
    def held_out(self) -> bool:
        """Whether it is measured on images held out of the training: then the test set is not looked at by anything."""
        return load_settings(self.entry.recipe, self.overrides).data.hold_out > 0

    @property
    def program(self) -> list[str]:
        """What Python is started with, before ``pretrain`` and its arguments."""
        script, *words = self.entry.control or [""]
        return [str(ROOT / script), *words] if script else CLI

    def portable(self) -> list[str]:
        """The overrides without what is true of one machine only."""
        absolute = ("data.root=", "data.source=/", 'data.source="/')
        return [override for override in self.overrides if not override.startswith(absolute)]


def jobs_of(plan: dict[str, Group], group: str, names: list[str], seeds: list[int], extra: list[str]) -> list[Job]:
    """Seeds outermost, else in the order of the plan, but parents before their children. All settings are checked."""
    if group not in plan:
        raise UserError(f"no group {group!r}; there are: {', '.join(plan)}")
    chosen = plan[group]
    unknown = [name for name in names if name not in chosen.runs]
    if unknown:
        raise UserError(f"no run {unknown[0]!r} in {group}; there are: {', '.join(chosen.runs)}")
    order: list[str] = []
    for name in chosen.runs:
        line = [name] if not names or name in names else []
        while line and (start := chosen.runs[line[0]].start) is not None:
            line.insert(0, start.run)
        order += [each for each in line if each not in order]
    jobs = [
        Job(group, name, seed, entry, (*chosen.common, *entry.overrides, *extra), chosen.evaluate)
        for seed in seeds or chosen.seeds
        for name, entry in ((name, chosen.runs[name]) for name in order)
    ]
    by_title = {job.title: job for job in jobs}
    for job in jobs:
        _check(job, None if job.parent is None else by_title[job.parent])
    return jobs


def _check(job: Job, parent: Job | None) -> None:
    """What would only come to light after hours of training."""
    where = f"{job.group}.runs.{job.name}"
    try:
        load_settings(job.entry.recipe, job.overrides)
        before = None if parent is None else load_settings(parent.entry.recipe, parent.overrides)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if before is None:
        return
    assert job.entry.start is not None
    epoch, every, epochs = job.entry.start.epoch, before.checkpoint.every_epochs, before.schedule.epochs
    if every == "auto" or epochs == "auto" or epoch % every or epoch >= epochs:
        kept = False
    else:
        kept = before.checkpoint.keep > math.ceil(epochs / every) - epoch // every  # the last one is always written
    if not kept:
        raise UserError(
            f"{where}.from: {job.entry.start.run} will not keep its checkpoint of epoch {epoch}: "
            "give it schedule.epochs, checkpoint.every_epochs and a large enough checkpoint.keep"
        )
