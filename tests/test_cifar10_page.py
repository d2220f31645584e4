"""The page of the CIFAR-10 results, on records with known figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cifar10_scripts import ROOT, page, plan_of, results, study
from scipy import stats

from interclr.types import UserError


def record(name: str, seed: int, knn: float, group: str = "main", **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "group": group,
        "name": name,
        "seed": seed,
        "overrides": [],
        "note": "",
        "from": None,
        "commit": "0123456789abcdef",
        "date": "2026-11-15T12:00:00+00:00",
        "versions": {"torch": "2.11"},
        "machine": "GPU",
        "jobs": 2,
        "settings": {
            "data": {"hold_out": 0 if group == "main" else 5000},
            "schedule": {"epochs": 200},
            "inter": {"clusters": 9} if name.endswith("-interclr") else None,
            "method": {"name": "npidv2" if name.startswith("npidv2") else "mocov2"},
            "optimiser": {"base_lr": 0.06},
            "model": {},
            "views": [],
        },
        "measured_on": "test" if group == "main" else "held-out",
        "figures": {"knn": knn, "knn_k": 200, "knn_temperature": 0.1},
        "seconds": 100.0 + seed,
        "compile_seconds": 20.0,
        "images_per_second": 20_000.0,
        "peak_memory_bytes": 3_500_000_000,
        "epochs": [{"epoch": 0, "knn_before": 30.0}, {"epoch": 100, "knn": knn - 5}, {"epoch": 200, "knn": knn}],
    }
    made |= more
    if "error" in made:
        del made["figures"]
    return made


METHODS = [f"{method}{branch}" for method in ("npidv2", "mocov2", "byol") for branch in ("", "-interclr")]
PLANNED = {"main": METHODS, "choices": ["mocov2", "mocov2-interclr"]}


def page_of(folder: Path, records: list[dict[str, Any]], **more: dict[str, Any]) -> str:
    """Both pages, one behind the other; ``more`` is what the plan says of its groups beyond runs."""
    for made in records:
        path = folder / "records" / made["group"] / f"{made['name']}-s{made['seed']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made))
    runs = {group: {name: {"recipe": "cifar10-byol"} for name in names} for group, names in PLANNED.items()}
    pages = {"main": "results", "choices": "choices"}
    plan = plan_of(
        folder,
        {
            group: {"about": f"About {group}.\n", "runs": named, "page": pages[group]} | more.get(group, {})
            for group, named in runs.items()
        },
    )
    words = ["--plan", str(plan), "--records", str(folder / "records"), "--page", str(folder / "docs" / "results.md")]
    assert page.main(words) == 0
    assert page.main([*words, "--check"]) == 0
    return (folder / "docs" / "results.md").read_text() + (folder / "docs" / "results-choices.md").read_text()


def cells(text: str, first: str) -> list[list[str]]:
    """The rows of all tables that begin with ``first``."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] == first]


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
    assert "That is so in **1 of 2** (mocov2 k-NN)." in short  # beyond two standard errors, not by Student's t
    assert "Hoped for by k-NN: +1.5. That is so in 0 of 1.\n" in short
    assert "Asked for by few labels: more than zero. That is so in 0 of 1; not of mocov2 1 % fine-tuned." in short
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
    assert "That is so in **2 of 3** (npidv2 k-NN, mocov2 k-NN)." in short
    assert "Hoped for by k-NN: +1.5. That is so in 1 of 3 (mocov2 k-NN)." in short
    readme = page.in_readme(f"before\n{page.BEGIN}old\n{page.END}after\n", groups_of(records))
    assert readme.startswith(f"before\n{page.BEGIN}| with the branch |")
    assert readme.endswith(f"{page.END}after\n")
    assert "old" not in readme
    assert "| mocov2 | 80.0 → 82.0 % | **+2.00 [+1.75, +2.25]** | not run yet | not run yet |" in readme
    with pytest.raises(UserError, match=r"README\.md has no place for figures"):
        page.in_readme("before\nafter\n", groups_of(records))


def groups_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {group.group: group for group in results.arranged(records, {})}


def test_the_other_bars_stand_beside_what_was_found(written: tuple[Path, str]) -> None:
    _, text = written
    asked = text.partition("## What else was asked for")[2].partition("##")[0]
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
    assert "That is so in **0 of 1**." in text  # the last try that has seeds


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


def test_settings_tried_one_at_a_time_stand_in_one_table(tmp_path: Path) -> None:
    def tried(name: str, knn: float, **inter: Any) -> dict[str, Any]:
        made = record(name, 0, knn, "choices")
        made["settings"]["inter"] = {"clusters": 9, "sampler": {"name": "semi_hard", "negatives": 8}} | inter
        return made

    other = tried("other-rate", 83.0, clusters=7)
    other["settings"]["optimiser"] = {"base_lr": 0.2}
    records = [
        tried("interclr", 80.0),
        tried("clusters-5", 80.5, clusters=5),
        tried("random", 79.0, sampler={"name": "random", "negatives": 8, "pool_fraction": 1}),
        tried("both", 81.0, clusters=5, margin=0.0),
        tried("random-no-margin", 81.0, sampler={"name": "random", "negatives": 8}, margin=0.0),
        tried("control", 82.0, clusters=4) | {"classes": ["positives"]},
        other,
    ]
    text = page_of(tmp_path, records).partition("## One setting at a time")[2].partition("##")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "choices/" in line]
    assert rows == [
        ["clusters", "5", "9", "choices/clusters-5", "1", "+0.50", "–"],
        ["sampler.name", "random", "semi_hard", "choices/random", "1", "-1.00", "–"],
    ]


def test_a_parent_that_was_trained_again_is_what_a_run_is_compared_with(tmp_path: Path) -> None:
    plain, child = record("mocov2", 0, 80.0, "choices"), record("mocov2-interclr", 0, 81.0, "choices")
    child["from"] = {"run": "mocov2", "epoch": 50, "step": 9, "ended": 80.4}
    text = page_of(tmp_path, [plain, child])
    assert cells(text.partition("## choices")[2], "mocov2-interclr")[0][3:5] == [
        "+0.60",
        "mocov2, trained again for it",
    ]
    again = text.partition("## Runs made again")[2].partition("##")[0]
    assert cells(again, "0")[0][1:] == [
        "choices/mocov2 80.00 (not deterministic); choices/mocov2, again 80.40 (not deterministic)",
        "0.40",
    ]


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


def test_a_run_is_compared_with_its_own_parent_in_whatever_group_that_is(tmp_path: Path) -> None:
    other, own = record("mocov2", 0, 80.0, "choices"), record("plain", 0, 82.0, "elsewhere")
    child = record("mocov2-interclr", 0, 81.0, "choices")
    child["settings"]["inter"] = {"clusters": 9, "warmup_epochs": 100}
    other["epochs"][1] = {"epoch": 100, "knn": 70.0}
    own["epochs"][1] = child["epochs"][1] = {"epoch": 100, "knn": 71.0}
    section = page_of(tmp_path, [other, own, child]).partition("## choices")[2]
    assert cells(section, "mocov2-interclr")[0][3:5] == ["-1.00", "elsewhere/plain"]
    own["epochs"][1] = {"epoch": 100, "knn": 71.1}  # so it is nobody's: the one of this group then, with a mark
    text = page_of(tmp_path, [other, own, child])
    assert cells(text.partition("## choices")[2], "mocov2-interclr")[0][3:5] == ["+1.00", "mocov2 †"]
    again = text.partition("## Runs made again")[2].partition("##")[0]
    assert cells(again, "0")[0][2] == "2.00"
    assert "elsewhere/plain 82.00" in again


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


def test_a_group_measured_by_low_shot_shows_it_beside_k_nn(tmp_path: Path) -> None:
    records = [record("mocov2", seed, 80.0, "choices") for seed in (0, 1)]
    records += [record("mocov2-interclr", seed, 81.0, "choices") for seed in (0, 1)]
    for made, value in zip(records, (60.0, 61.0, 63.0, 62.0), strict=True):
        made["figures"]["evaluate"] = {"low-shot": {"mAP": value}}
    section = page_of(tmp_path, records).partition("## choices")[2]
    (head,), (row,) = cells(section, "run")[:1], cells(section, "mocov2-interclr")[:1]
    at = head.index("low-shot mAP")
    assert row[at : at + 2] == ["63.00, 62.00", "+3.00, +1.00"]
    assert "± s.e. over the draws" not in head  # records of before do not tell of them, and an empty column is left out


def test_a_group_measured_on_its_training_images_shows_it_beside_k_nn(tmp_path: Path) -> None:
    records = [record(name, seed, 80.0, "choices") for name in ("mocov2", "mocov2-interclr") for seed in (0, 1)]
    for made, value in zip(records, (80.0, 81.0, 81.5, 82.0), strict=True):
        made["figures"]["evaluate"] = {"knn": {"top1": 80.0, "leave_one_out": value}}
    section = page_of(tmp_path, records).partition("## choices")[2]
    (head,), (plain,), (row,) = (cells(section, name)[:1] for name in ("run", "mocov2", "mocov2-interclr"))
    at = head.index("k-NN of training images")
    assert plain[at : at + 2] == ["80.00, 81.00", ""]
    assert row[at : at + 2] == ["81.50, 82.00", "+1.50, +1.00"]


DRAWS = ([50.0, 60.0, 70.0], [52.0, 60.0, 70.0], [52.0, 61.0, 73.0], [56.0, 64.0, 74.0])


def test_what_low_shot_gains_is_told_with_its_error_over_the_draws(tmp_path: Path) -> None:
    for group in ("main", "choices"):
        records = [record(name, seed, 80.0, group) for name in ("mocov2", "mocov2-interclr") for seed in (0, 1)]
        for made, draws in zip(records, DRAWS, strict=True):
            made["figures"]["evaluate"] = {"low-shot": {"mAP": sum(draws) / 3, "mAP_of_draws": draws}}
        text = page_of(tmp_path / group, records)
        if group == "main":  # draws gain (2 + 4) / 2, (1 + 4) / 2 and (3 + 4) / 2
            assert "mocov2 +3.00 ± 0.29 (3 draws)" in text
        else:
            head, row = cells(text, "run")[0], cells(text.partition("## choices")[2], "mocov2-interclr")[0]
            assert row[head.index("± s.e. over the draws")] == "0.29"


def test_seeds_of_different_settings_are_not_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record("mocov2", seed, 80.0, "choices") for seed in (0, 1)]
    page_of(tmp_path, records)
    records[1]["settings"]["optimiser"] = {"base_lr": 0.12}
    with pytest.raises(AssertionError):
        page_of(tmp_path, records)
    assert "choices/mocov2: its seeds have different settings" in capsys.readouterr().err


def test_what_seeds_differ_in_is_named(tmp_path: Path) -> None:
    records = [record("mocov2", seed, 80.0, "choices") for seed in (0, 1)]
    for seed, keep in ((0, 3), (1, 12)):
        records[seed]["settings"] |= {"seed": seed, "checkpoint": {"keep": keep}, "engine": {"deterministic": True}}
    assert "differ in" not in page_of(tmp_path, records)  # how many checkpoints are kept changes nothing
    records[1]["settings"]["engine"] = {"deterministic": False}
    assert "The seeds of mocov2 differ in engine.deterministic. What that does to a run" in page_of(tmp_path, records)
    records[1]["settings"]["margin"] = 0.3
    assert "The seeds of mocov2 differ in engine.deterministic, margin.\n" in page_of(tmp_path, records)


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


def test_settings_that_change_nothing_for_a_method_without_negatives_are_not_compared(tmp_path: Path) -> None:
    records = [record("byol-interclr", seed, 80.0, "choices") for seed in (0, 1)]
    for each, negatives in zip(records, (512, 1024), strict=True):
        each["settings"]["method"] = {"name": "byol"}
        each["settings"]["inter"] = {"clusters": 9, "sampler": {"name": "semi_hard", "negatives": negatives}}
    assert cells(page_of(tmp_path, records), "byol-interclr")[0][1] == "2"


def test_with_negatives_their_settings_count_and_without_pairs_no_others_do(tmp_path: Path) -> None:
    def branched(method: str, loss: str) -> list[dict[str, Any]]:
        records = [record(f"{method}-interclr", seed, 80.0, "choices") for seed in (0, 1)]
        for each, negatives in zip(records, (512, 1024), strict=True):
            each["settings"]["method"] = {"name": method}
            each["settings"]["inter"] = {"loss": loss, "sampler": {"name": "semi_hard", "negatives": negatives}}
        return records

    def told_apart(method: str, loss: str) -> bool:
        one, other = (results.inter_and_work({0: each}) for each in branched(method, loss))
        return bool(one != other)

    assert told_apart("byol", "margin_nce")
    assert told_apart("mocov2", "own")
    assert not told_apart("byol", "own")
    assert not told_apart("mocov2", "soft")


def test_records_that_lack_newer_settings_stay_in_a_curve(tmp_path: Path) -> None:
    records = studied("interclr", [81.0], BRANCH) + studied("margin-0", [81.5], BRANCH | {"margin": 0.0, "loss": "own"})
    records += studied("margin-plus-0.3", [80.5], BRANCH | {"margin": 0.3, "soft_temperature": 0.1})
    (group,) = results.arranged(records, {})
    assert [x for x, _ in study.curves(group)["margin"]] == [-0.5, 0.0, 0.3]


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


BRANCH = {"intra_weight": 0.75, "clusters": 700, "margin": -0.5, "sampler": {"name": "semi_hard", "negatives": 1024}}


def studied(name: str, knn: list[float], inter: dict[str, Any] | None) -> list[dict[str, Any]]:
    made = [record(name, seed, value, "study-npidv2") for seed, value in enumerate(knn)]
    for each in made:
        each["settings"]["inter"] = inter
    return made


def test_observations_are_judged_by_paired_differences(tmp_path: Path) -> None:
    records = [
        *studied("plain", [80.0, 80.2, 79.9], None),
        *studied("interclr", [81.0, 81.2, 81.1], BRANCH),
        *studied("labels-offline", [81.0, 81.3, 81.0], BRANCH | {"labels": {"name": "offline"}}),  # behind
        *studied("negatives-random", [82.0, 82.2, 82.1], BRANCH | {"sampler": {"name": "random"}}),  # not behind
        *studied("negatives-hard", [82.1, 82.1, 82.1], BRANCH | {"sampler": {"name": "hard"}}),
        *studied("margin-0", [82.0, 82.3, 82.0], BRANCH | {"margin": 0.0}),  # ahead, which the paper denies
        *studied("margin-plus-0.3", [80.0], BRANCH | {"margin": 0.3}),
        *studied("clusters-90", [80.5], BRANCH | {"clusters": 90}),
        *studied("lambda-0.5", [80.6], BRANCH | {"intra_weight": 0.5}),
        *studied("two-things", [80.5], BRANCH | {"clusters": 90, "margin": 0.0}),
    ]
    text = page_of(tmp_path, records)
    told = {row[1]: row[2:] for row in (line for number in "123" for line in observed(text, number))}
    nothing = ["–", "not run yet"]
    assert told["negatives-random − labels-offline"] == ["3", "+1.00 [+0.75, +1.25]", "reproduced", *nothing]
    assert told["margin-0 − negatives-random"] == ["3", "+0.00 [-0.25, +0.25]", "no difference found", *nothing]
    assert told["margin-0 − negatives-hard"] == ["3", "+0.00 [-0.43, +0.43]", "no difference found", *nothing]
    assert told["interclr − margin-0"] == ["3", "-1.00 [-1.25, -0.75]", "contradicted", *nothing]
    assert told["margin-0 − margin-plus-0.3"] == ["1", "+2.00", "too few seeds", *nothing]
    (row,) = cells(text, "the paper's observations, by k-NN (study-npidv2)")
    assert row[3] == "1 reproduced, 3 no difference found, 1 contradicted, 1 too few seeds"
    assert (tmp_path / "docs" / "images" / "cifar10-study-npidv2-curves.png").exists()
    (group,) = results.arranged(records, {})
    assert study.curves(group) == {  # and not the two points of clusters
        "intra_weight": [(0.5, "lambda-0.5"), (0.75, "interclr"), (1.0, "plain")],
        "margin": [(-0.5, "interclr"), (0.0, "margin-0"), (0.3, "margin-plus-0.3")],
    }


def observed(text: str, number: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0].startswith(f"{number}: ")]


@pytest.mark.skipif(not list((ROOT / "results" / "cifar10").glob("**/*.json")), reason="no records yet")
def test_the_page_is_what_the_records_say() -> None:
    assert page.main(["--check"]) == 0, "run benchmarks/cifar10_page.py"
    for page_name in ("results.md", "results-choices.md"):
        for line in (ROOT / "docs" / page_name).read_text().splitlines():
            if line.startswith("!["):
                assert (ROOT / "docs" / line.rpartition("(")[2].rstrip(")")).exists()
