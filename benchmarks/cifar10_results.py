"""The records of the CIFAR-10 runs by group, run and seed, and how their figures are written."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from cifar10_plan import Group
from cifar10_record import Record
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.stats import t as student  # type: ignore[import-untyped]

from interclr.config import GONE
from interclr.evaluate.plots import STYLE
from interclr.learner import InterConfig
from interclr.types import UserError

INTER = "-interclr"
NO_NEGATIVES = ("byol", "simsiam")  # so their branch's sampler and margin change nothing, unless it is given some
OF_PAIRS = ("sampler", "margin", "margin_kind")
DEFAULTS = InterConfig().model_dump(mode="json")
Measure = Callable[[Record], float | None]


class Gain(NamedTuple):
    """What the inter branch brought one run."""

    seed: int
    value: float
    over: Record  # the run without it
    shared: bool  # whether that is its very own first part, epoch for epoch, or has the seed and the settings only
    again: bool = False  # whether it is that run trained again, of which only the end is known


@dataclass(frozen=True)
class Results:
    """The finished records of one group, by run and seed, runs in the order of the plan."""

    group: str
    baseline: str  # the plan's first run, finished or not
    runs: dict[str, dict[int, Record]]
    plain: tuple[Record, ...] = ()  # all finished runs without a branch, of whatever group

    @property
    def records(self) -> list[Record]:
        return [record for by_seed in self.runs.values() for record in by_seed.values()]

    def values(self, run: str, measure: Measure) -> dict[int, float]:
        found = {seed: measure(record) for seed, record in self.runs.get(run, {}).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def cell(self, run: str, measure: Measure, form: str = ".2f") -> str:
        return spread(list(self.values(run, measure).values()), form)

    def differences(self, run: str, baseline: str, measure: Measure) -> list[float]:
        """``run`` minus ``baseline`` for every seed that both have."""
        mine, other = self.values(run, measure), self.values(baseline, measure)
        return [mine[seed] - other[seed] for seed in sorted(mine.keys() & other.keys())]

    def gains(self, run: str, measure: Measure) -> list[Gain]:
        """What the branch brought ``run``, for every seed that has a run without it to compare with."""
        found = []
        for record in self.runs.get(run, {}).values():
            over, shared = self.counterpart(record)
            if over is None:
                continue
            ended = (record["from"] or {}).get("ended")
            again = measure is KNN and ended is not None
            mine, other = measure(record), ended if again else measure(over)
            if mine is not None and other is not None:
                found.append(Gain(record["seed"], mine - other, over, shared or again, again))
        return found

    def counterpart(self, record: Record) -> tuple[Record | None, bool]:
        """The run that is ``record`` without its branch, and whether ``record`` really began as that very run.

        Its own parent first, in whatever group that has its record; else one of the same settings and seed, in this
        group if there is one.
        """
        branch, work = inter_and_work({0: record})
        if branch is None:
            return None, False
        alike = [
            other
            for other in self.plain
            if (other["seed"], other["measured_on"]) == (record["seed"], record["measured_on"])
            and inter_and_work({0: other}) == (None, work)
        ]
        alike.sort(key=lambda other: (not begins_as(record, other), other["group"] != self.group))
        return (alike[0], begins_as(record, alike[0])) if alike else (None, False)

    def is_control(self, run: str) -> bool:
        """Whether it says nothing of the method: it trains with labels, or relates no images."""
        return any(any(control_of(record)) for record in self.runs[run].values())

    def by_draw(self, run: str, baseline: str) -> list[float]:
        """``run`` minus ``baseline`` in low-shot mAP for every draw of images, as means over common seeds."""
        mine, other = (
            {seed: found for seed, record in self.runs.get(name, {}).items() if (found := draws_of(record))}
            for name in (run, baseline)
        )
        differences = [
            [own - plain for own, plain in zip(mine[seed], other[seed], strict=False)]
            for seed in sorted(mine.keys() & other.keys())
        ]
        return [statistics.mean(each) for each in zip(*differences, strict=False)]

    @property
    def pairs(self) -> dict[str, str]:
        """Runs named after another, as X-interclr after X, and that other."""
        return {run: plain for run in self.runs for plain in self.runs if run.startswith(f"{plain}-")}


def control_of(record: Record) -> tuple[list[str], bool]:
    """What of it is a control's; older records lack both."""
    return record.get("classes", []), record.get("own_target", False)


def start_of(record: Record) -> int:
    """The epoch after which its inter branch begins."""
    return int((record["settings"]["inter"] or {}).get("warmup_epochs") or 0)


def begins_as(record: Record, plain: Record) -> bool:
    """Whether the epochs of ``record`` before its branch began are those of ``plain``."""
    start = start_of(record)
    mine, other = ([row for row in each["epochs"] if row["epoch"] <= start] for each in (record, plain))
    return start > 0 and mine == other


def without_gone(branch: Record) -> Record:
    """Without the settings that are no longer there, where they did nothing."""
    gone = {key.removeprefix("inter."): nothing for key, nothing in GONE.items()}
    return {key: value for key, value in branch.items() if key not in gone or gone[key] != value}


def completed(record: Record) -> Record:
    """Its settings; where they are of before a setting of the branch, with what that is by default."""
    settings: Record = record["settings"]
    branch = settings["inter"]
    return settings if branch is None else settings | {"inter": DEFAULTS | without_gone(branch)}


def inter_and_work(by_seed: dict[int, Record]) -> tuple[Any, Any]:
    """The settings of a run's inter branch, and all others that change what is computed."""
    settings = completed(next(iter(by_seed.values())))
    branch, method = settings["inter"], dict(settings["method"])
    if branch is not None and (
        branch["loss"] == "soft" or (branch["loss"] == "own" and method["name"] in NO_NEGATIVES)
    ):
        branch = {key: value for key, value in branch.items() if key not in OF_PAIRS}
    if method["name"] == "npidv2":
        # A branch that begins at once fills the bank; older records do not say how it starts.
        filled = branch is not None and branch.get("warmup_epochs") == 0
        method["bank_start"] = "features" if filled else method.get("bank_start", "random")
    data = [settings["data"].get(key) for key in ("batch", "hold_out", "image_size")]
    return branch, [method, data, *(settings[key] for key in ("model", "optimiser", "schedule", "views"))]


def arranged(records: list[Record], plan: dict[str, Group]) -> list[Results]:
    """Finished records in the order of the plan; what the plan no longer has comes last."""
    groups: list[Results] = []
    plain = tuple(record for record in records if record["settings"]["inter"] is None)
    for group in dict.fromkeys([*plan, *(record["group"] for record in records)]):
        mine = [record for record in records if record["group"] == group]
        planned = plan[group].runs if group in plan else {}
        runs: dict[str, dict[int, Record]] = {}
        for name in dict.fromkeys([*planned, *(record["name"] for record in mine)]):
            by_seed = {record["seed"]: record for record in mine if record["name"] == name}
            kinds = ([inter_and_work({0: record}), control_of(record)] for record in by_seed.values())
            if len({json.dumps(kind, sort_keys=True) for kind in kinds}) > 1:
                raise UserError(
                    f"{group}/{name}: its seeds have different settings, perhaps because the recipe changed between "
                    "them; make them again, or give the older ones another name"
                )
            if by_seed:
                runs[name] = dict(sorted(by_seed.items()))
        if runs:
            groups.append(Results(group, next(iter(planned or runs)), runs, plain))
    return groups


def made_again(records: list[Record]) -> dict[str, list[Record]]:
    """Runs of the same settings and seed that stand in the records more than once, and ended differently."""
    found: dict[str, list[Record]] = {}
    for record in records:
        key = [inter_and_work({0: record}), record["seed"], record["measured_on"], control_of(record)]
        found.setdefault(json.dumps(key, sort_keys=True), []).append(record)
    return {key: each for key, each in found.items() if len({KNN(record) for record in each}) > 1}


# Figures of a record.


def at_epoch(epoch: int) -> Measure:
    """k-NN measured while training."""
    return lambda record: next((row["knn"] for row in record["epochs"] if row["epoch"] == epoch and "knn" in row), None)


def in_last_epoch(name: str) -> Measure:
    """The mean of a term that every step logs."""
    return lambda record: record["epochs"][-1].get(name) if record["epochs"] else None


def figure(name: str) -> Measure:
    return lambda record: record["figures"].get(name)


def protocol(name: str, key: str) -> Measure:
    return lambda record: record["figures"].get("evaluate", {}).get(name, {}).get(key)


def field(name: str, scale: float = 1.0) -> Measure:
    return lambda record: None if record[name] is None else record[name] / scale


def draws_of(record: Record) -> list[float]:
    """Low-shot mAP of each draw, the same images for all runs; records of before do not tell."""
    return list(record["figures"].get("evaluate", {}).get("low-shot", {}).get("mAP_of_draws", []))


KNN, LINEAR, LOW_SHOT = figure("knn"), protocol("linear", "top1"), protocol("low-shot", "mAP")
LEFT_OUT = protocol("knn", "leave_one_out")  # k-NN of every training image among the others


# Numbers as text.


FEW = 3  # seeds, from which on there is an error; fewer are shown one by one


def spread(values: Sequence[float], form: str) -> str:
    """Mean ± standard deviation; fewer than three one by one."""
    if not values:
        return "–"
    if len(values) < FEW:
        return ", ".join(f"{value:{form}}" for value in values)
    return f"{statistics.mean(values):{form}} ± {statistics.stdev(values):{form}}"


def standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) >= FEW else None


def change(values: Sequence[float]) -> str:
    """Mean ± standard error of paired differences; fewer than three one by one."""
    if not values:
        return "–"
    error = standard_error(values)
    if error is None:
        return ", ".join(f"{value:+.2f}" for value in values)
    return f"{statistics.mean(values):+.2f} ± {error:.2f}"


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the mean lies with 95 %, were differences normal (Student's t)."""
    error = standard_error(values)
    if error is None:
        return None
    reach = float(student.ppf(0.975, len(values) - 1)) * error
    return statistics.mean(values) - reach, statistics.mean(values) + reach


def bracketed(values: Sequence[float]) -> str:
    """Mean and 95 % interval of paired differences; fewer than three one by one."""
    found = interval(values)
    if found is None:
        return change(values)
    return f"{statistics.mean(values):+.2f} [{found[0]:+.2f}, {found[1]:+.2f}]"


def direction(values: Sequence[float]) -> int:
    """1 or −1 where the 95 % interval leaves zero out: what the pages call clear."""
    found = interval(values)
    return 0 if found is None else (found[0] > 0) - (found[1] < 0)


def emphasised(values: Sequence[float]) -> str:
    """Bracketed, and bold where that is clear."""
    return f"**{bracketed(values)}**" if direction(values) else bracketed(values)


def without_empty(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Without the columns in which no row says anything."""
    told = [at for at in range(len(header)) if not rows or any(row[at] not in ("", "–") for row in rows)]
    return [header[at] for at in told], [[row[at] for at in told] for row in rows]


def rows_of(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def one_line(text: str, length: int) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= length else f"… {text[-length:]}"


def either(values: Iterable[Any]) -> str:
    return " or ".join(str(value) for value in dict.fromkeys(values))


# Plots.


@contextmanager
def drawing(
    path: Path, columns: int = 1, rows: int = 1, width: float = 6.4, height: float = 4.2
) -> Iterator[list[Axes]]:
    """A PNG that is the same file whenever the same is drawn."""
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(width * columns, height * rows), layout="constrained")
        FigureCanvasAgg(drawn)
        yield list(drawn.subplots(rows, columns, squeeze=False).flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=120, metadata={"Software": None})
