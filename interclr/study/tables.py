"""What came out of a study: raw JSON, a table of mean ± spread over seeds, and which label-free figure follows k-NN."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
from scipy.stats import rankdata, spearmanr  # type: ignore[import-untyped]

from interclr.config import Settings
from interclr.evaluate.base import write_json
from interclr.run.files import write_text
from interclr.run.folder import Run
from interclr.study.plan import Cell, what_is_computed
from interclr.study.schema import Study
from interclr.study.worker import ERROR, PROCESS, state_of

Summary = dict[str, dict[str, Any]]  # figure → mean, std, n
YARDSTICK = "knn"
LABELS = {
    "knn": "k-NN, %",
    "rank_me": "RankMe",
    "uniformity": "uniformity",
    "alignment": "alignment",
    "cluster_entropy": "cluster entropy",
    "nmi": "NMI",
    "purity": "purity",
    "positives_right": "positives right",
    "negatives_wrong": "negatives wrong",
    "milliseconds_per_step": "ms a step",
    "seconds_per_epoch": "s an epoch",
    "memory_megabytes": "memory, MB",
    "seconds": "s in all",
}
COLUMNS = ("knn", "rank_me", "uniformity", "alignment", "cluster_entropy", "nmi", "seconds")
COST_COLUMNS = ("milliseconds_per_step", "seconds_per_epoch", "memory_megabytes", "knn", "seconds")
# Figures that need no labels, and whether more of it is better.
LABEL_FREE = {"rank_me": True, "uniformity": False, "alignment": False, "cluster_entropy": True}
FEWEST = 3  # cells for which a rank correlation says anything
MOST_IN_ALL_ORDERS = 8  # cells: 40,320 orders; scipy's approximation gives 0 for three that are ranked perfectly
SMALLEST_P = 0.001  # that is printed


def gather(name: str, study: Study, cells: Sequence[Cell], folder: Callable[[Cell], Path], recipe: str) -> Any:
    """The document ``study.json`` holds, from the run folders as they are now."""
    entries: list[dict[str, Any]] = []
    first: dict[str, str] = {}  # by what is computed, the cell that does so first
    for config in study.cells:
        own = [cell for cell in cells if cell.name == config.name]
        runs = [_run(cell, folder(cell)) for cell in own]
        summary = summarise([run["figures"] for run in runs])
        same = first.setdefault(json.dumps([_computed(cell, folder(cell)) for cell in own]), config.name)
        x = next((cell.x for cell in own), None)
        same_as = None if same == config.name else same
        entries.append({"name": config.name, "x": x, "same_as": same_as, "summary": summary, "runs": runs})
    free = label_free({entry["name"]: entry["summary"] for entry in entries if entry["same_as"] is None})
    document = {
        "study": name,
        "title": study.title,
        "recipe": recipe,
        "finished": all(run["state"] == "finished" for entry in entries for run in entry["runs"]),
        "definition": study.model_dump(mode="json"),
        "cells": entries,
        "label_free": free,
    }
    return _plain(document | {"table": _table(study, entries)})


def _computed(cell: Cell, folder: Path) -> dict[str, Any]:
    """A finished run knows what ``auto`` was, so that a number and an ``auto`` that came to it are seen to be equal."""
    settings = Run(folder).settings if state_of(folder) == "finished" else cell.settings
    return what_is_computed(settings) | {"device": cell.settings.engine.device}


def _run(cell: Cell, folder: Path) -> dict[str, Any]:
    state = state_of(folder)
    entry: dict[str, Any] = {
        "seed": cell.seed,
        "folder": f"cells/{folder.name}",
        "state": state,
        "error": json.loads((folder / ERROR).read_text())["error"] if state == "failed" else None,
        "overrides": list(cell.overrides),
        "figures": {},
    }
    if state == "finished":
        run = Run(folder)
        records, result = run.metrics, run.result
        entry["settings"] = run.settings.model_dump(mode="json")
        entry["result"] = result
        entry["curve"] = [record for record in records if record.get("event") in ("start", "monitor")]
        entry["figures"] = _figures(result, records, folder, run.settings)
    return entry


def _figures(
    result: dict[str, Any], records: list[dict[str, Any]], folder: Path, settings: Settings
) -> dict[str, float]:
    found = {name: result[name] for name in LABELS if isinstance(result.get(name), int | float)}
    training = [record for record in records if "images_per_second" in record]
    # The last interval may be of a step or two; in a run that is shorter than two, all are.
    training = [record for record in training if record["step"] % settings.engine.log_every == 0] or training
    batch = int(settings.data.batch)
    if training:
        found["alignment"] = training[-1].get("alignment", math.nan)
        settled = training[1:] if len(training) > 2 else training  # the first interval warms up
        found["milliseconds_per_step"] = 1000 * batch / median(record["images_per_second"] for record in settled)
    else:
        found["milliseconds_per_step"] = 1000 * result["seconds"] / max(result["steps"], 1)
    found["seconds_per_epoch"] = result["seconds"] / result["epochs"]
    memory = result.get("peak_memory_bytes")
    if memory is None and (folder / PROCESS).exists():
        memory = json.loads((folder / PROCESS).read_text())["peak_resident_bytes"]
    if memory is not None:
        found["memory_megabytes"] = memory / 2**20
    return {name: float(value) for name, value in found.items()}


def summarise(figures: Sequence[dict[str, float]]) -> Summary:
    """Mean, sample standard deviation (None for one seed) and number of seeds of every figure that is a number."""
    summary: Summary = {}
    for name in LABELS:
        values = [each[name] for each in figures if name in each and math.isfinite(each[name])]
        if values:
            summary[name] = {"mean": mean(values), "std": stdev(values) if len(values) > 1 else None, "n": len(values)}
    return summary


def label_free(cells: dict[str, Summary]) -> dict[str, dict[str, Any]]:
    """How each label-free figure ranks the cells (means over seeds) against k-NN, and what choosing by it would cost.

    ``spearman`` is signed so that 1 means: the better the figure, the better k-NN (less is better for uniformity and
    alignment); where there is none, ``unranked`` says why. ``lost`` is the k-NN of the best cell less that of the cell
    the figure would choose.
    """
    found: dict[str, dict[str, Any]] = {}
    for figure, more_is_better in LABEL_FREE.items():
        names = [name for name, summary in cells.items() if figure in summary]
        if not names:
            continue
        sign = 1 if more_is_better else -1
        values = {name: sign * cells[name][figure]["mean"] for name in names}
        entry: dict[str, Any] = {"cells": len(names), "better": "more" if more_is_better else "less"}
        entry["chooses"] = max(names, key=lambda name: values[name])
        both = [name for name in names if YARDSTICK in cells[name]]
        ranked, knn = [values[name] for name in both], [cells[name][YARDSTICK]["mean"] for name in both]
        entry["unranked"] = _unranked(figure, ranked, knn)
        entry["spearman"], entry["p_value"] = (None, None) if entry["unranked"] else _spearman(ranked, knn)
        if both:
            best = max(cells[name][YARDSTICK]["mean"] for name in cells if YARDSTICK in cells[name])
            chosen = max(both, key=lambda name: values[name])
            entry["knn_of_choice"], entry["lost"] = (
                cells[chosen][YARDSTICK]["mean"],
                best - cells[chosen][YARDSTICK]["mean"],
            )
        found[figure] = entry
    return found


def _unranked(figure: str, values: list[float], knn: list[float]) -> str | None:
    """Why there is no rank correlation; None where there is one."""
    if len(values) < FEWEST:
        return "fewer than three cells"
    equal = [name for name, of in ((YARDSTICK, knn), (figure, values)) if len(set(of)) < 2]
    return f"{LABELS[equal[0]].removesuffix(', %')} is equal in all cells" if equal else None


def _spearman(left: list[float], right: list[float]) -> tuple[float, float]:
    """Rank correlation, and the share of random orders that are ranked as well or as badly (two-sided)."""
    correlation = spearmanr(left, right)
    few = len(left) <= MOST_IN_ALL_ORDERS
    return float(correlation.statistic), _share_of_orders(left, right) if few else float(correlation.pvalue)


def _share_of_orders(left: list[float], right: list[float]) -> float:
    """Over all orders. Twice the ranks are integers, also of ties, so equal correlations are seen to be equal."""
    ranks, others = ((2 * rankdata(of) - len(of) - 1).astype(int) for of in (left, right))  # their means are 0
    products = abs(np.array(list(permutations(ranks))) @ others)
    return float((products >= abs(ranks @ others)).mean())


def _table(study: Study, entries: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = COST_COLUMNS if study.figure == "table" else COLUMNS
    columns = [name for name in wanted if any(name in entry["summary"] for entry in entries)]
    header = ["cell", *[LABELS[name] for name in columns], "seeds"]
    header += ["the paper"] * bool(study.paper.values or study.paper.best)
    rows = []
    for entry in entries:
        label = entry["name"]
        if entry["x"] is not None and _number(entry["x"]) != label:
            label = f"{label} = {_number(entry['x'])}"
        wanted_seeds, done, failed = _seeds(entry)
        seeds = str(done) if done == wanted_seeds else f"{done} of {wanted_seeds}"
        row = [label, *(spread(entry["summary"].get(name)) for name in columns)]
        row.append(seeds + (f", {failed} failed" if failed else ""))
        if study.paper.values or study.paper.best:
            row.append(study.paper.values.get(entry["name"], "best" if entry["name"] == study.paper.best else ""))
        rows.append(row)
    return {"header": header, "columns": columns, "rows": rows, "notes": _notes(entries)}


def _seeds(entry: dict[str, Any]) -> tuple[int, int, int]:
    """Wanted, finished, failed."""
    states = [run["state"] for run in entry["runs"]]
    return len(states), states.count("finished"), states.count("failed")


def _notes(entries: list[dict[str, Any]]) -> list[str]:
    """On few images several multiples come to one number, for instance."""
    same = [f"{entry['name']} is the same as {entry['same_as']}" for entry in entries if entry["same_as"] is not None]
    return [f"Here {', '.join(same)}: they compute the same and are counted once."] if same else []


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1000 else f"{value:g}"


def spread(summary: dict[str, Any] | None) -> str:
    """``61.2 ± 0.4``, with as many digits as the size of the number deserves."""
    if summary is None:
        return "–"
    value, std = summary["mean"], summary["std"]
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def write_study(out: Path, document: dict[str, Any]) -> None:
    """``study.json``, ``table.md`` and ``table.csv``."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "study.json", document)
    write_text(out / "table.md", markdown(document))
    write_text(out / "table.csv", as_csv(document))


def markdown(document: dict[str, Any]) -> str:
    study, table = document["definition"], document["table"]
    results = [run["result"] for cell in document["cells"] for run in cell["runs"] if run["state"] == "finished"]
    lines = [f"# {document['title']}", ""]
    if results:
        first = results[0]
        lines += [
            f"Recipe `{document['recipe']}`, {first['images']:,} images of {first['data']}, {first['epochs']} epochs, "
            f"k-NN with k={first['knn_k']}, T={first['knn_temperature']}. Mean ± standard deviation over seeds.",
            *_how(document, results),
            "",
        ]
    lines += [_row(table["header"]), "|---" * len(table["header"]) + "|", *(_row(row) for row in table["rows"]), ""]
    lines += [*table["notes"], ""] if table["notes"] else []
    if study["paper"]["note"]:
        lines += [f"The paper: {study['paper']['note']}.", ""]
    errors = [(cell["name"], run) for cell in document["cells"] for run in cell["runs"] if run["error"]]
    lines += [f"- failed: {name}, seed {run['seed']}: {' '.join(run['error'].split())}" for name, run in errors]
    lines += [""] * bool(errors)
    if document["label_free"]:
        lines += _markdown_label_free(document["label_free"])
    return "\n".join(lines).rstrip() + "\n"


def _how(document: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    """What all cells were run with beyond the recipe, and by which version."""
    each = [run["overrides"] for cell in document["cells"] for run in cell["runs"]]
    common = [override for override in each[0] if all(override in others for others in each)]
    commits = sorted({str(result["commit"])[:7] for result in results if result.get("commit")})
    lines = [f"All cells: `{shlex.join(common)}`."] if common else []
    about = f"torch {' and '.join(sorted({str(result['torch']) for result in results}))}"
    return [*lines, f"{about}, commit {' and '.join(commits)}." if commits else f"{about}."]


def _markdown_label_free(found: dict[str, dict[str, Any]]) -> list[str]:
    with_labels = any("lost" in entry for entry in found.values())
    lines = ["## Choosing without labels", ""]
    header = ["figure", "better is", "chooses"]
    header += ["Spearman with k-NN", "p", "cells", "k-NN of the choice, %", "k-NN lost"] if with_labels else ["cells"]
    lines += [_row(header), "|---" * len(header) + "|"]
    for figure, entry in found.items():
        row = [LABELS[figure], entry["better"], entry["chooses"]]
        if with_labels:
            rank = f"– ({entry['unranked']})" if entry["unranked"] else f"{entry['spearman']:+.2f}"
            row += [rank, _p(entry["p_value"]), str(entry["cells"])]
            row += [_or_dash(entry.get("knn_of_choice"), ".1f"), _or_dash(entry.get("lost"), ".1f")]
        else:
            row.append(str(entry["cells"]))
        lines.append(_row(row))
    notes = [
        "Over the cells' means; +1: the better the figure, the better k-NN.",
        f"p: how often cells in random order are ranked as well or as badly, exact up to {MOST_IN_ALL_ORDERS} cells.",
        "It does not know of the spread over seeds.",
    ]
    return [*lines, "", *(notes if with_labels else [])]


def _p(value: float | None) -> str:
    return f"< {SMALLEST_P}" if value is not None and value < SMALLEST_P else _or_dash(value, ".2g")


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def as_csv(document: dict[str, Any]) -> str:
    """One line a cell: how many seeds, and mean, std and n of every figure there is."""
    names = [name for name in LABELS if any(name in cell["summary"] for cell in document["cells"])]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    seeds = ["seeds_wanted", "seeds_finished", "seeds_failed"]
    writer.writerow(["cell", "x", *seeds, *(f"{name}_{part}" for name in names for part in ("mean", "std", "n"))])
    for cell in document["cells"]:
        summaries = [cell["summary"].get(name, {"n": 0}) for name in names]
        figures = [summary.get(part) for summary in summaries for part in ("mean", "std", "n")]
        writer.writerow([cell["name"], cell["x"], *_seeds(cell), *figures])
    return stream.getvalue()


def _plain(value: Any) -> Any:
    """NaN and infinity are not JSON: null."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
