"""Writes the tables of measured figures in docs/performance.md from the raw reports in results/speed.

python benchmarks/speed_table.py            rewrite the tables
python benchmarks/speed_table.py --check    fail if they are not what the reports say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from interclr.bench.suite import lines_of

ROOT = Path(__file__).resolve().parent.parent
PAGE, REPORTS = ROOT / "docs" / "performance.md", ROOT / "results" / "speed"


def measured() -> str:
    rows = ["| what | median [range] | machine, torch, date, commit | raw |", "|---|---|---|---|"]
    for path in sorted(REPORTS.glob("*.json")):
        report = json.loads(path.read_text())
        if "results" not in report:
            continue  # another kind of report, with a section of its own
        commit = (report["commit"] or "?").split()[0][:7]
        where = f"{report['machine']}, {report['torch'].split('+')[0]}, {report['date'][:10]}, {commit}"
        rows += [f"| {what.strip()} | {figure} | {where} | {path.name} |" for what, figure in lines_of(report)]
    return "\n".join(rows) + "\n"


def candidates() -> str:
    report = json.loads((REPORTS / "candidates.json").read_text())
    rows = [
        "| draw | M | outside the exact pool | pool share ± sd (predicted) | Δ cosine | Δ loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in report["draws"].items():
        share = f"{row['pool_share_mean']:.4f} ± {row['pool_share_sd']:.4f}"
        share += f" ({row['predicted_sd_without_replacement']:.4f})"
        changes = [f"{row[k]['difference']:+.1e} ± {row[k]['standard_error']:.1e}" for k in ("cosine", "loss")]
        cells = [name, f"{row['candidates']:,}", f"{100 * row['outside_share']:.2f} %", share, *changes]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def peers() -> str:
    ours = json.loads((REPORTS / "cifar.json").read_text())
    theirs = json.loads((REPORTS / "lightly.json").read_text())
    rate = theirs["images_per_second_median"]
    low, high = theirs["images_per_second_range"]
    precision, version = theirs["trainer"]["precision"], theirs["versions"]["lightly"]
    rows = ["| what | images/s [range] | ÷ lightly | of the floor | of this GPU's own rate |", "|---|---|---|---|---|"]
    rows.append(
        f"| lightly {version}, its own MoCo benchmark, {precision} | {rate:,.0f} [{low:,.0f} – {high:,.0f}] | 1 | | |"
    )
    for row in ours["results"]["cifar"]:
        values = row["images_per_second"]
        kind = ", deterministic" if row["deterministic"] else ""
        figure = f"{values['median']:,.0f} [{values['low']:,.0f} – {values['high']:,.0f}]"
        share = f"{100 * row['share_of_floor']:.1f} % | {100 * row['share_of_measured_rate']:.1f} %"
        rows.append(
            f"| {row['recipe']}{kind}, {row['precision']} | {figure} | {values['median'] / rate:.1f} | {share} |"
        )
    return "\n".join(rows) + "\n"


def filled(text: str, section: str, table: str) -> str:
    begin, end = f"<!-- {section}: begin -->\n", f"<!-- {section}: end -->\n"
    before, rest = text.split(begin)
    return before + begin + table + end + rest.split(end)[1]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the tables of docs/performance.md from results/speed.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is another")
    given = parser.parse_args(words)
    text = PAGE.read_text()
    wanted = text
    for section, table in (("measured", measured), ("candidates", candidates), ("peers", peers)):
        wanted = filled(wanted, section, table())
    if given.check:
        return int(text != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
