"""The page of the CIFAR-10 results, on records with known figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cifar10_pages import cells, page_of, record
from cifar10_scripts import ROOT, page, results
from scipy import stats

from interclr.types import UserError

PLAIN, INTER = {0: 84.5, 1: 84.1, 2: 84.9, 3: 85.0}, {0: 85.6, 1: 85.9, 2: 85.7}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("page")
    low = {"low-shot": {"top1@1": 40.0, "top1@1_std": 2.0, "mAP@1": 30.0}, "semi-supervised": {"top1@1%": 55.0}}
    records = [record("mocov2", seed, knn) for seed, knn in PLAIN.items()]
    records += [record("mocov2-interclr", seed, knn) for seed, knn in INTER.items()]
    for made, linear in zip(records, (88.0, 88.5, 89.0, 87.0, 88.1, 88.2, 89.3), strict=True):
        made["figures"]["evaluate"] = {"linear": {"top1": linear}, **low}
    records += [record("byol", 0, 88.0), record("byol-interclr", 0, 88.5)]
    records += [record("mocov2", 0, 80.0, "choices"), record("mocov2-interclr", 0, 79.0, "choices")]
    records[-1]["figures"] |= {"purity": 0.61, "positives_right": 0.52}
    records[-1]["from"] = {"run": "mocov2", "epoch": 25, "step": 4375}
    records[-1]["settings"]["inter"] = {"clusters": 9, "warmup_epochs": 25}
    fast = [record("fast", 0, 82.0, "choices"), record("fast-interclr", 0, 82.5, "choices")]
    for made in fast:
        made["settings"]["optimiser"] = {"base_lr": 0.12}
    records += [*fast, record("unplanned", 1, 81.0, "choices"), record("npidv2", 1, 0, error="out of\nmemory | really")]
    return folder, page_of(folder, records)


def test_means_and_deviations_over_seeds(written: tuple[Path, str]) -> None:
    _, text = written
    _, row, *_ = cells(text, "mocov2")  # what was asked for stands before it
    plain, linear = list(PLAIN.values()), [88.0, 88.5, 89.0, 87.0]
    assert row[1:3] == ["4", f"{np.mean(plain):.2f} ± {np.std(plain, ddof=1):.2f}"]
    assert row[3] == f"{np.mean(linear):.2f} ± {np.std(linear, ddof=1):.2f}"
    assert cells(text, "byol")[1][1:4] == ["1", "88.00", "–"]


def test_what_the_branch_brings_comes_first_with_its_interval(written: tuple[Path, str]) -> None:
    folder, text = written
    short = text.partition("## In short")[2].partition("##")[0]
    (head,), (mocov2,), (byol,), (npid,) = (
        cells(short, first) for first in ("with the branch minus without", "mocov2", "byol", "npidv2")
    )
    told = dict(zip(head, mocov2, strict=True))
    knn = [INTER[seed] - PLAIN[seed] for seed in (0, 1, 2)]
    low, high = stats.t.interval(0.95, 2, np.mean(knn), stats.sem(knn))
    assert low < 0 < high
    assert told["k-NN"] == f"{np.mean(knn):+.2f} [{low:+.2f}, {high:+.2f}]"
    assert told["1 % fine-tuned"] == "+0.00 [+0.00, +0.00]"
    assert told["10 % fine-tuned"] == "not run yet"
    assert byol[1:3] == ["1", "+0.50"]  # one seed has no interval
    assert npid[1:] == ["0", *["not run yet"] * 5]
    assert "Reached in **1 of 2** (mocov2 k-NN)." in short  # beyond two standard errors, not by Student's t
    assert "Goal, by k-NN: +1.5. Reached in 0 of 1.\n" in short
    assert "compared): above zero. Reached in 0 of 1; not in mocov2 1 % fine-tuned." in short
    assert "Of 2 comparisons 0.1 would be bold by chance alone." in short
    assert "(Benjamini and Hochberg, 5 %) none stays." in short
    assert (folder / "docs" / "images" / "cifar10-short.png").read_bytes().startswith(b"\x89PNG")


def test_differences_that_leave_zero_out_are_bold_and_counted_against_chance(tmp_path: Path) -> None:
    gains = {"mocov2": (2.0, 2.1, 1.9), "byol": (-0.5, -0.6, -0.4), "npidv2": (0.3, 0.4, 0.1)}
    records = [record(name, seed, 80.0) for name in gains for seed in (0, 1, 2)]
    records += [record(f"{name}-interclr", seed, 80 + gain) for name in gains for seed, gain in enumerate(gains[name])]
    short = page_of(tmp_path, records).partition("## In short")[2].partition("##")[0]
    (mocov2,), (byol,), (npid,) = (cells(short, name) for name in gains)
    assert mocov2[2] == "**+2.00 [+1.75, +2.25]**"
    assert byol[2] == "**-0.50 [-0.75, -0.25]**"
    assert npid[2] == "+0.27 [-0.11, +0.65]"
    chances = sorted(stats.ttest_1samp(values, 0).pvalue for values in gains.values())
    assert [p < 0.05 * rank / 3 for rank, p in enumerate(chances, start=1)] == [True, True, False]
    assert "these stay: mocov2-interclr k-NN, byol-interclr k-NN." in short
    assert "Reached in **2 of 3** (npidv2 k-NN, mocov2 k-NN)." in short
    assert "Goal, by k-NN: +1.5. Reached in 1 of 3 (mocov2 k-NN)." in short
    readme = page.in_readme(f"before\n{page.BEGIN}stale\n{page.END}after\n", groups_of(records))
    assert readme.startswith(f"before\n{page.BEGIN}| with the branch |")
    assert readme.endswith(f"{page.END}after\n")
    assert "stale" not in readme
    assert "| mocov2 | 80.0 → 82.0 % | **+2.00 [+1.75, +2.25]** | not run yet | not run yet |" in readme
    with pytest.raises(UserError, match=r"README\.md has no place for figures"):
        page.in_readme("before\nafter\n", groups_of(records))


def groups_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {group.group: group for group in results.arranged(records, {})}


def test_the_other_bars_stand_beside_what_was_found(written: tuple[Path, str]) -> None:
    _, text = written
    asked = text.partition("## Other targets")[2].partition("##")[0]
    found = {row[0]: row[3:] for row in (cells(asked, f"{run}: k-NN")[0] for run in ("mocov2", "mocov2-interclr"))}
    assert found == {"mocov2: k-NN": ["84.62", "reached"], "mocov2-interclr: k-NN": ["85.73", "**missed**"]}
    assert cells(asked, "byol-interclr: k-NN")[0][4] == "too few seeds (1)"
    assert cells(asked, "mocov2-interclr: time of one run alone")[0][3:] == ["–", "not run yet"]


def test_a_try_that_missed_stays_when_another_is_made(tmp_path: Path) -> None:
    records = [record("npidv2", seed, 80.0 + seed) for seed in (0, 1, 2)]
    records += [record("npidv2-at-once", seed, 80.0 + seed - 0.1 * seed) for seed in (0, 1, 2)]
    for made in records[3:]:
        made["settings"]["inter"] = {"clusters": 9}
    text = page_of(tmp_path, records)
    (first,) = cells(text, "npidv2, first try (at-once)")
    assert first[1:3] == ["3", "-0.10 [-0.35, +0.15]"]
    assert cells(text, "npidv2, second try, chosen after the first was known")[0][1:3] == ["0", "not run yet"]
    assert "Reached in **0 of 1**." in text  # the last try that has seeds
    told = page.in_readme(f"{page.BEGIN}{page.END}", groups_of(records))
    assert "| npidv2 * | " in told
    assert "npidv2 with an earlier recipe (npidv2-at-once); today's is not measured" in told


def test_what_is_bold_but_may_be_by_chance_is_named(tmp_path: Path) -> None:
    gains = {"mocov2": (2.0, 2.1, 1.9), "byol": (0.3, 0.4, 0.2), "npidv2": (0.3, 0.9, -0.4)}
    records = [record(name, seed, 80.0) for name in gains for seed in (0, 1, 2)]
    records += [record(f"{name}-interclr", seed, 80 + gain) for name in gains for seed, gain in enumerate(gains[name])]
    assert 0.05 * 2 / 3 < stats.ttest_1samp(gains["byol"], 0).pvalue < 0.05  # the second smallest of three
    told = "these stay: mocov2-interclr k-NN; these do not: byol-interclr k-NN.\n"
    assert told in page_of(tmp_path, records).partition("## In short")[2].partition("##")[0]
    assert told in page.in_readme(f"{page.BEGIN}{page.END}", groups_of(records))


def test_of_a_run_that_lacks_seeds_those_are_planned(tmp_path: Path) -> None:
    records = [record(name, 0, 80.0, "choices") for name in ("mocov2", "mocov2-interclr")]
    text = page_of(tmp_path, records, choices={"seeds": [0, 1, 2]}).partition("## Planned, and without")[2]
    assert cells(text, "choices")[0][1] == "mocov2 (seed 1, 2), mocov2-interclr (seed 1, 2)"
    text = page_of(tmp_path, [], choices={"seeds": [0, 1, 2], "superseded": True}).partition("## Planned, and without")[
        2
    ]
    assert not cells(text, "choices")


def test_what_cannot_be_compared_is_left_out(tmp_path: Path) -> None:
    records = [record(name, seed, 80.0) for name in ("mocov2", "mocov2-interclr") for seed in (0, 1, 2)]
    for made in records:
        made["figures"]["evaluate"] = {"semi-supervised": {"top1@1%": 60.0 + made["seed"]}}
    apart = {"main": {"apart": {"mocov2@0": ["semi-supervised"], "mocov2@1": ["semi-supervised"]}}}
    (row,) = cells(page_of(tmp_path, records, **apart).partition("## In short")[2].partition("##")[0], "mocov2")
    assert row[1:] == ["3", "+0.00 [+0.00, +0.00]", "not run yet", "not run yet", "+0.00", "not run yet"]


def test_what_is_gained_along_the_way_is_told_over_the_same_epochs(tmp_path: Path) -> None:
    records = [record(name, seed, 80.0 + seed) for name in ("mocov2", "mocov2-interclr") for seed in (0, 1)]
    for made in records:
        made["epochs"] = [{"epoch": epoch, "knn": 60.0 + epoch / 10} for epoch in (50, 100, 150, 200)]
    for made in records[2:]:
        made["settings"]["inter"] = {"clusters": 9, "warmup_epochs": 100}
        for row, more in zip(made["epochs"], (0, 0, 0.5 + made["seed"], 0.25), strict=True):
            row["knn"] += more
    text = page_of(tmp_path, records)
    (row,) = (row for row in cells(text, "main") if row[1] == "mocov2-interclr" and len(row) == 5)
    assert row[2:] == ["200", "100", "150: +0.50, +1.50; 200: +0.25, +0.25"]


def test_a_run_that_was_cut_off_stands_beside_the_plain_one(tmp_path: Path) -> None:
    plain = record("mocov2", 0, 80.0, "choices")
    cut = record("mocov2-interclr", 0, 0.0, "choices", error="cut off at epoch 120", cut_off=True)
    cut["epochs"] = [{"epoch": 100, "knn": 75.5}, {"epoch": 120, "loss": 1.0}]
    (row,) = cells(page_of(tmp_path, [plain, cut]).partition("## Runs that failed")[2].partition("##")[0], "choices")
    assert row[4] == "cut off at epoch 120; +0.50 beside mocov2 there"


def test_planned_runs_without_a_record_are_named_and_a_group_says_what_it_is_about(written: tuple[Path, str]) -> None:
    _, text = written
    section = text.partition("## Planned, and without")[2].partition("## ")[0]
    assert cells(section, "main")[0][1] == "npidv2, npidv2-interclr"
    assert not cells(section, "choices")
    assert "About choices.\n\nMeasured on" in text.partition("## choices")[2]


def test_the_page_says_what_was_measured_how(written: tuple[Path, str]) -> None:
    _, text = written
    assert (
        "Measured on the test set, at the last epoch of 200. k-NN in percent, k = 200, T = 0.1. Seeds: 4 or 3" in text
    )
    assert "Measured on 5,000 held-out training images, not the test set" in text
    assert cells(text, "mocov2: difference")[0][1:] == ["+0.00 ± 0.00", "+0.00 ± 0.00"]
    assert cells(text, "MoCo v2")[0][1:] == ["83.8", "89.9", "92.94"]


def test_what_the_branch_gained_is_told_over_the_same_run_without_it(written: tuple[Path, str]) -> None:
    folder, text = written
    section = text.partition("## choices")[2]
    (head,) = cells(section, "run")

    def told(run: str) -> dict[str, str]:
        (row,) = cells(section, run)
        return dict(zip(head, row, strict=True))

    assert (told("mocov2")["gained by the branch"], told("mocov2")["over"]) == ("", "")
    child = told("mocov2-interclr")
    assert (child["gained by the branch"], child["over"]) == ("-1.00", "mocov2")
    assert (child["purity"], child["positives right"], child["note"]) == (
        "0.61",
        "0.52",
        "continues mocov2 from epoch 25",
    )
    fast = told("fast-interclr")
    assert (fast["gained by the branch"], fast["over"]) == (
        "+0.50",
        "fast †",
    )  # not the slow one, and nothing is shared
    assert told("unplanned")["k-NN"] == "81.00"
    assert "out of memory \\| really" in text.partition("## Runs that failed")[2]
    for name in ("cifar10-main.png", "cifar10-choices.png"):
        assert f"(images/{name})" in text
        assert (folder / "docs" / "images" / name).read_bytes().startswith(b"\x89PNG")


def test_texts_have_their_figures_from_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record("mocov2", seed, 80.0 + seed, "choices") for seed in (0, 1, 2)]
    records += [record("mocov2-interclr", seed, 80.5 + 2 * seed, "choices") for seed in (0, 1, 2)]
    records += [record("mocov2", 0, 70.0)]
    for made in records:
        made["figures"]["evaluate"] = {"low-shot": {"mAP": made["figures"]["knn"] - 10, "top1@4": 33.0}}
    about = "A {k-NN: mocov2}, {k-NN: mocov2@1}, {k-NN: mocov2-interclr − mocov2}, {mAP gained: mocov2-interclr@0}, "
    about += "{k-NN at 100: mocov2@2}, {k-NN: main/mocov2}, {4 per class: mocov2-interclr@2 − mocov2@2} end."
    text = page_of(tmp_path, records, choices={"about": about})
    assert "A 81.00, 81.00, +1.50 ± 0.58, +0.50, 77.00, 70.00, +0.00 end." in text
    for wrong, complaint in (
        ("{k-NN: nothing}", "{k-NN: nothing}: no finished run nothing"),
        ("{top: mocov2}", "no measure 'top'; there are k-NN"),
        ("{linear: mocov2}", "no record has it"),
        ("{k-NN at 150: mocov2}", "no record has it"),
        ("{mAP at 100: mocov2}", "only k-NN is known at an epoch"),
        ("{k-NN gained: mocov2-interclr − mocov2}", "what is gained is a difference already"),
    ):
        with pytest.raises(AssertionError):
            page_of(tmp_path, records, choices={"about": wrong})
        assert complaint in capsys.readouterr().err


def test_runs_that_left_no_record_are_listed_with_what_is_known(tmp_path: Path) -> None:
    lost = {"lost": {"mocov2-interclr@3": "cut off at epoch 7"}}
    (row,) = cells(page_of(tmp_path, [record("mocov2", 0, 80.0)], choices=lost).partition("## Runs that")[2], "choices")
    assert row[1:] == ["mocov2-interclr", "3", "–", "cut off at epoch 7", "no record"]
    records = [record("mocov2", 0, 80.0), record("mocov2-interclr", 3, 81.0, "choices")]
    section = page_of(tmp_path, records, choices=lost).partition("## Runs that")[2].partition("## Words")[0]
    (row,) = cells(section, "choices")
    assert row[-2:] == ["cut off at epoch 7", "finished by a later try"]


def test_whether_pairs_share_their_first_half_is_told(tmp_path: Path) -> None:
    records = [record(name, seed, 88.0, "main") for name in ("mocov2", "mocov2-interclr") for seed in (0, 1)]
    for each in records[2:]:
        each["from"] = {"run": "mocov2", "epoch": 100, "step": 5, "again": False}
        each["settings"]["inter"] = {"clusters": 9, "warmup_epochs": 100}
    text = page_of(tmp_path, records)
    assert "trained again for its checkpoint" not in text
    assert "mocov2-interclr (seed 0, 1) continue the plain run of their seed: the pairs share its first half." in text
    for each in records[2:]:
        each["from"]["again"] = True
    records[3]["epochs"][1] = {"epoch": 100, "knn": 80.0}
    text = page_of(tmp_path, records)
    told = "continue the plain run's first half trained again for its checkpoint, which came out"
    assert f"mocov2-interclr (seed 0) {told} as before" in text
    assert f"mocov2-interclr (seed 1) {told} otherwise" in text


def test_a_failure_stays_listed_when_a_later_try_succeeds(tmp_path: Path) -> None:
    finished = record("mocov2", 0, 80.0, "choices")
    finished["failed_before"] = [{"date": "2026-01-02T03:04:05", "commit": "abc", "error": "no memory"}]
    row, *_ = cells(page_of(tmp_path, [finished]).partition("## Runs that failed")[2], "choices")
    assert row[1:] == ["mocov2", "0", "2026-01-02", "no memory", "finished by a later try"]


def test_a_run_not_measured_to_the_end_is_listed_and_not_averaged(tmp_path: Path) -> None:
    records = [record("mocov2", seed, 80.0 + seed) for seed in (0, 1, 2)]
    records[2]["unmeasured"] = ["linear", "low-shot"]
    text, _, rest = page_of(tmp_path, records).partition("## Runs not measured to the end")
    assert cells(text.partition("## With and without")[2], "mocov2")[0][1:3] == ["2", "80.00, 81.00"]
    row, *_ = cells(rest, "main")
    assert row[1:3] == ["mocov2", "2"]
    assert row[3].startswith("k-NN 82.00 %")
    assert row[3].endswith("to be measured: linear, low-shot")


def test_plots_are_the_same_bytes_when_drawn_again(written: tuple[Path, str]) -> None:
    folder, text = written
    pictures = sorted((folder / "docs" / "images").glob("*.png"))
    before = [path.read_bytes() for path in pictures]
    assert page_of(folder, []) == text
    assert [path.read_bytes() for path in pictures] == before


def test_a_page_without_records_names_the_groups_that_wait(tmp_path: Path) -> None:
    text = page_of(tmp_path, [])
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Planned, and without a finished record yet"
    ]
    assert cells(text, "choices")[0][1] == "mocov2, mocov2-interclr"


@pytest.mark.skipif(not list((ROOT / "results" / "cifar10").glob("**/*.json")), reason="no records yet")
def test_the_page_is_what_the_records_say() -> None:
    assert page.main(["--check"]) == 0, "run benchmarks/cifar10_page.py"
    for page_name in ("results.md", "results-choices.md"):
        for line in (ROOT / "docs" / page_name).read_text().splitlines():
            if line.startswith("!["):
                assert (ROOT / "docs" / line.rpartition("(")[2].rstrip(")")).exists()
