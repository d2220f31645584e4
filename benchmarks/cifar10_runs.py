"""What the CIFAR-10 pages tell of the runs themselves: time and memory, repeats, and those that did not end."""

from __future__ import annotations

from cifar10_plan import Group
from cifar10_record import Record, failures_of, line_of
from cifar10_results import KNN, Results, at_epoch, either, field, made_again, one_line, rows_of


def again_section(records: list[Record]) -> list[str]:
    """How far the same settings and seed end apart: what a difference of runs that share no more has in it."""
    table = []
    for each in made_again([*records, *parents_again(records)]).values():
        found = [(KNN(record) or 0.0, record) for record in each]
        shown = "; ".join(
            f"{record['group']}/{record['name']} {value:.2f}{'' if _exact(record) else ' (not deterministic)'}"
            for value, record in found
        )
        spread = max(value for value, _ in found) - min(value for value, _ in found)
        table.append((str(each[0]["seed"]), shown, f"{spread:.2f}"))
    if not table:
        return []
    return [
        "## Runs made again",
        "",
        "The same settings and seed, trained more than once, ended this far apart: rounding grows. Deterministic runs",
        "repeat themselves on the same commit.",
        "",
        *rows_of(("seed", "k-NN", "apart"), sorted(table, key=lambda row: -float(row[2]))),
    ]


def parents_again(records: list[Record]) -> list[Record]:
    """Parents that were trained again for a run that continues them, and have no record of their own but their end."""
    found = {}
    for record in records:
        start = record["from"] or {}
        for parent in records:
            same = all(parent[key] == record[key] for key in ("group", "seed")) and parent["name"] == start.get("run")
            if same and "ended" in start:
                name = f"{parent['name']}, again"
                found[record["group"], name, record["seed"]] = parent | {
                    "name": name,
                    "figures": {"knn": start["ended"]},
                }
    return list(found.values())


def _exact(record: Record) -> bool:
    return bool(record["settings"].get("engine", {}).get("deterministic"))


def cost_section(groups: list[Results]) -> list[str]:
    table = []
    for results in groups:
        for run, by_seed in results.runs.items():
            records = list(by_seed.values())
            where = either(f"{record['machine']}, torch {record['versions']['torch']}" for record in records)
            table.append(
                (
                    *(results.group, run, str(len(records)), _range(results, run, "seconds")),
                    *(either(sharing(record) for record in records), where),
                    either(commit_of(record) for record in records),
                )
            )
    return [
        "## Time",
        "",
        "Training with its k-NN measurements, without the protocols afterwards; of other groups the records tell. Up",
        "to as many runs as `at a time` says shared the machine, with MPS side by side, so times are ranges over the",
        "seeds and say nothing of what the branch costs: for that see [performance.md](performance.md). The seconds of",
        "a run that continues another include that one's up to there.",
        "",
        *rows_of(("group", "run", "seeds", "seconds", "at a time", "machine", "commit"), table),
    ]


def _range(results: Results, run: str, name: str) -> str:
    """The least and the most over the seeds: what a time depends on is not chance."""
    values = list(results.values(run, field(name)).values())
    if not values:
        return "–"
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} – {high}"


def sharing(record: Record) -> str:
    return f"{record['jobs']}{', MPS' if record.get('mps') else ''}"


def commit_of(record: Record) -> str:
    name, *changes = (record["commit"] or "?").split(maxsplit=1)
    return " ".join((name[:7], *changes))


def _since(record: Record) -> str:
    return "" if "error" in record or record.get("unmeasured") else "finished by a later try"


def beside_plain(record: Record, records: list[Record]) -> str:
    """How a run that was cut off stood to the plain run of its group and seed, when it was last measured."""
    measured = [row for row in record.get("epochs", ()) if "knn" in row]
    plain = next(
        (
            other
            for other in records
            if all(other[key] == record[key] for key in ("group", "seed"))
            and other["settings"]["inter"] is None
            and "error" not in other
        ),
        None,
    )
    if "error" not in record or not measured or plain is None:
        return ""
    epoch, knn = measured[-1]["epoch"], measured[-1]["knn"]
    there = at_epoch(epoch)(plain)
    return "" if there is None else f"; {knn - there:+.2f} beside {plain['name']} there"


def unmeasured_section(records: list[Record]) -> list[str]:
    """Trained, but their protocols were cut off: a table's mean of other seeds for every column would mislead."""
    table = [
        (record["group"], record["name"], str(record["seed"]), line_of(record))
        for record in records
        if "error" not in record and record.get("unmeasured")
    ]
    if not table:
        return []
    return ["## Runs not measured to the end", "", *rows_of(("group", "run", "seed", "so far"), table)]


def failed_section(records: list[Record], plan: dict[str, Group]) -> list[str]:
    table = [
        (record["group"], record["name"], str(record["seed"]), failure["date"][:10], told, _since(record))
        for record in records
        for failure in failures_of(record)
        for told in [one_line(failure["error"], 300) + beside_plain(record, records)]
    ]
    since = {f"{record['group']}/{record['name']}@{record['seed']}": _since(record) for record in records}
    table += [
        (name, *run.split("@"), "–", one_line(known, 300), since.get(f"{name}/{run}", "no record"))
        for name, group in plan.items()
        for run, known in group.lost.items()
    ]
    if not table:
        return []
    return [
        "## Runs that failed or were cut off",
        "",
        "Of those without a record nothing but the text is left: it was read off a log, and no file here has it.",
        "",
        *rows_of(("group", "run", "seed", "date", "error", "since"), table),
    ]
