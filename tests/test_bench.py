"""The benches run at small sizes, say what they measured and keep what they have when a later one fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from interclr.bench import branch, suite
from interclr.bench.power import medians, watched
from interclr.bench.stages import FORWARD_BACKWARD, Stages
from interclr.bench.suite import Options, lines_of, run_benches
from interclr.bench.throughput import flops_per_image
from interclr.bench.timing import in_turns, ratios, spread
from interclr.cli import app
from interclr.screen import Screen

CPU = torch.device("cpu")


def test_quick_benches_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    names = ["step", "cifar", "convolutions", "kmeans", "growth", "cpu"]
    words = ["bench", *names, "--quick", "--device", "cpu", "--out", str(out)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["quick"] is True
    assert report["torch"] == torch.__version__
    results = report["results"]
    assert list(results) == names
    assert results["convolutions"] == {"skipped": "these kernels are for Hopper GPUs"}
    step = results["step"][0]
    assert step["ratio"]["low"] <= step["ratio"]["median"] <= step["ratio"]["high"]
    assert len(step["rounds"]["cifar10-mocov2"]) == step["ratio"]["repeats"]
    assert results["cifar"][0]["images_per_second"]["median"] > 0
    assert [row["images"] for row in results["growth"]] == [2_000, 20_000]
    shares = results["cpu"]["shares"]
    assert sum(shares.values()) == pytest.approx(1, abs=0.05)  # medians of parts need not add up exactly
    inside = shares["encoders forward"] + shares["losses forward"] + shares["backward"]
    assert "soft targets forward" in FORWARD_BACKWARD  # an encoder's, too, where there is one
    assert results["cpu"]["outside_forward_backward"] == pytest.approx(1 - inside, abs=0.05)
    low, high = results["cpu"]["outside_range"]
    assert low < results["cpu"]["outside_of_all_steps_together"] < high
    for what, _ in lines_of(report):
        assert what.split(":")[0] in result.output


def test_settings_of_the_branch_are_not_the_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would give it a branch, and the ratio would be that of a thing to itself."""
    made = {}

    def watched(recipe: str, *rest: Any) -> Any:
        here = made[recipe] = real(recipe, *rest)
        return here

    real = branch.prepare
    monkeypatch.setattr(branch, "prepare", watched)
    (result,) = suite.bench_step(Options(CPU, Screen(quiet=True), quick=True))
    assert made["cifar10-mocov2"].settings.inter is None
    assert made["cifar10-mocov2-interclr"].settings.inter.clusters == result["clusters"] == 8


def test_ours_and_the_librarys_convolutions_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or their times would not be comparable. Our kernels' part is played by their twins."""
    pytest.importorskip("triton")
    import small_conv_twin

    from interclr.bench.convolution import _convolutions

    small_conv_twin.use_for_all(monkeypatch)
    pairs = _convolutions(8, CPU)
    assert len(pairs) == 5
    for name, (ours, library) in pairs.items():
        found = [result if isinstance(result, torch.Tensor) else next(t for t in result if t is not None)  # type: ignore[attr-defined]
                 for result in (ours(), library())]  # fmt: skip
        assert found[0].shape == found[1].shape, name
        if "normalising" not in name:
            assert (found[0] - found[1]).float().norm() < 0.01 * found[1].float().norm(), name


def test_lines_of_convolutions() -> None:
    times = {"ours": spread([0.1]), "library": spread([0.2])}
    row = {"name": "forward", "microseconds": times, "ratio": spread([0.5])}
    step = {"milliseconds": {"ours": spread([11.0]), "library": spread([12.0])}, "ratio": spread([0.917])}
    lines = lines_of({"results": {"convolutions": {"images": 4, "rows": [row], "step": step}}})
    assert lines[0][1] == "0.50 [0.50 – 0.50]  (0 → 0 µs)"
    assert lines[1][1] == "0.917 [0.917 – 0.917]  (12.00 → 11.00 ms)"


def test_what_was_measured_is_kept_when_a_later_bench_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def two_then_error(options: Options) -> Any:
        yield {"first": 1}
        yield {"second": 2}
        raise RuntimeError("out of memory")

    monkeypatch.setitem(suite.BENCHES, "step", two_then_error)
    saved: list[str] = []
    with pytest.raises(RuntimeError, match="out of memory"):
        run_benches(["step"], Options(CPU, Screen(quiet=True)), lambda report: saved.append(json.dumps(report)))
    assert json.loads(saved[-1])["results"] == {"step": [{"first": 1}, {"second": 2}]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense", "--quick"], "no bench 'nonsense'; there are step, cifar"),
        (["step", "--device", "cpu"], "add --quick"),
        (["kmeans", "--quick", "--out", "nowhere/bench.json"], "there is no folder nowhere"),
    ],
)
def test_errors_say_what_to_do(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code != 0
    assert said in f"{result.exception}"


def test_rounds_are_compared_pairwise() -> None:
    assert ratios([2.0, 6.0, 3.0], [1.0, 2.0, 3.0]) == {"median": 2.0, "low": 1.0, "high": 3.0, "repeats": 3}
    assert spread([3.0, 1.0, 2.0])["median"] == 2.0
    calls: list[str] = []
    times = in_turns({name: lambda name=name: calls.append(name) for name in "ab"}, 3, 2, CPU)  # type: ignore[misc]
    assert "".join(calls) == "aabb" * 3
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


def test_a_nested_stage_counts_once() -> None:
    stages = Stages()
    with stages.stage("outer"), stages.stage("inner"):
        torch.randn(400, 400) @ torch.randn(400, 400)
    assert stages.seconds["inner"] > 0
    assert stages.seconds["outer"] < stages.seconds["inner"] + 0.05


def test_flops_are_those_of_the_encoders() -> None:
    """0.56 G multiply-adds forward through ResNet-18 at 32 px; two queries with their gradients, two keys without."""
    pixels = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    flops = flops_per_image("cifar10-mocov2", ["data.batch=8", "method.queue=8"], pixels, CPU)
    assert flops == pytest.approx(8.9e9, rel=0.03)


def test_power_is_the_median_of_whole_lines() -> None:
    lines = (
        "690.5, 700.00, 1755, 1980\n693.5, 700.00, 1750, 1980\n[N/A], 700, 1, 1\n710.0, 700.00, 1740, 1980\n700.1, 70"
    )
    assert medians(lines) == {"watts": 693.5, "watts_limit": 700.0, "megahertz": 1750.0, "megahertz_limit": 1980.0}
    assert medians("No devices were found\n") == {}
    with watched(torch.device("cpu")) as found:
        pass
    assert found == {}
