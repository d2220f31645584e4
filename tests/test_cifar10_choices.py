"""The sections of the CIFAR-10 pages that choose settings, on records with known figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cifar10_pages import cells, page_of, record
from cifar10_scripts import results, study


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
    branched = [record("mocov2-interclr", seed, 85.0) for seed in (0, 1)]
    branched[1]["settings"]["inter"]["target_momentum"] = (
        0.99  # what it is by default: the other is of before there was one
    )
    assert "mocov2-interclr differ" not in page_of(tmp_path, branched)
    branched[1]["settings"]["margin"] = 0.5
    assert "mocov2-interclr differ in margin" in page_of(tmp_path, branched)


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


BRANCH = {"intra_weight": 0.75, "clusters": 700, "margin": -0.5, "sampler": {"name": "semi_hard", "negatives": 1024}}


def studied(name: str, knn: list[float], inter: dict[str, Any] | None) -> list[dict[str, Any]]:
    made = [record(name, seed, value, "study-npidv2") for seed, value in enumerate(knn)]
    for each in made:
        each["settings"]["inter"] = inter
    return made


def test_records_that_lack_newer_settings_stay_in_a_curve(tmp_path: Path) -> None:
    records = studied("interclr", [81.0], BRANCH) + studied("margin-0", [81.5], BRANCH | {"margin": 0.0, "loss": "own"})
    records += studied("margin-plus-0.3", [80.5], BRANCH | {"margin": 0.3, "soft_temperature": 0.1})
    (group,) = results.arranged(records, {})
    assert [x for x, _ in study.curves(group)["margin"]] == [-0.5, 0.0, 0.3]


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


def test_the_observations_of_controls_stand_below(tmp_path: Path) -> None:
    records = [*studied("plain", [80.0, 80.2, 79.9], None), *studied("interclr", [81.0, 81.2, 81.1], BRANCH)]
    assert "most of whose positives are right" not in page_of(tmp_path, records)
    right = [
        *studied("mostly-right-interclr", [83.0, 83.2, 83.1], BRANCH),
        *studied("mostly-right-margin-0", [82.0, 82.3, 82.0], BRANCH | {"margin": 0.0}),
    ]
    for made in right:
        made["classes"] = ["positives=0.6"]
    text = page_of(tmp_path, records + right)
    below = text.partition("most of whose positives are right")[2]
    told = {row[1]: row[2:] for row in (line for number in "123" for line in observed(below, number))}
    nothing = ["–", "not run yet"]  # by low-shot mAP, and no row of what none of the controls is made for
    assert told == {
        "mostly-right-interclr − mostly-right-margin-0": ["3", "+1.00 [+0.75, +1.25]", "reproduced", *nothing]
    }
    assert "a control: positives of 0.6 of all draws right, by labels" in text


def observed(text: str, number: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0].startswith(f"{number}: ")]
