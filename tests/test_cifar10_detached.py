"""The scripts that carry the CIFAR-10 plan out on a GPU, and on a machine that is reached by short commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from cifar10_scripts import ROOT, TINY, plan_of


def test_the_gpu_script_hands_everything_on(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"tiny": {"common": TINY, "runs": {"a": {"recipe": "synthetic-npidv2"}}}})
    words = ["tiny", "b", "--plan", str(plan), "--out", str(tmp_path / "records")]
    environment = os.environ | {"PYTHON": sys.executable, "WORK": str(tmp_path / "work"), "JOBS": "2"}
    script = [str(ROOT / "benchmarks" / "cifar10_gpu.sh"), "60"]
    wrong = subprocess.run([*script, *words], capture_output=True, text=True, env=environment)
    assert (wrong.returncode, "no run 'b' in tiny" in wrong.stderr) == (2, True), wrong.stderr
    over = subprocess.run([script[0], "1", "tiny", *words[2:]], capture_output=True, text=True, env=environment)
    assert over.returncode == 124  # long before the run could end
    assert not (tmp_path / "records" / "tiny").exists()


def detached(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "benchmarks" / "cifar10_detached.sh")
    return subprocess.run([script, *words], capture_output=True, text=True, env=environment, timeout=200)


def test_what_keeps_detached_runs_from_starting_is_told_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "WORK": str(tmp_path / "work"), "INTERCLR_COMMIT": "c0ffee"}
    plan = plan_of(tmp_path, {"tiny": {"common": TINY, "runs": {"a": {"recipe": "synthetic-npidv2"}}}})
    told = detached(environment, "start", "60", "tiny", "b", "--plan", str(plan))
    assert (told.returncode, "no run 'b' in tiny" in told.stdout) == (2, True), told
    assert "started" not in told.stdout
    told = detached(environment | {"INTERCLR_DATA": "no/such/data"}, "start", "60", "tiny", "--plan", str(plan))
    assert (told.returncode, told.stderr) == (2, "INTERCLR_DATA: there is no folder no/such/data\n")
    tools = tmp_path / "tools"  # a machine without pgrep
    tools.mkdir()
    for tool in ("bash", "dirname", "mkdir"):
        where = shutil.which(tool)
        assert where is not None
        (tools / tool).symlink_to(where)
    told = detached(environment | {"PATH": str(tools)}, "start", "60", "tiny", "--plan", str(plan))
    assert (told.returncode, told.stderr.split(" (")[0]) == (2, "pgrep is not installed")


def in_place_of_python(folder: Path, body: str) -> dict[str, str]:
    """An environment in which a shell script takes the place of the runs, which are not what is tested."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return os.environ | {"PYTHON": str(script), "WORK": str(folder / "work"), "INTERCLR_COMMIT": "c0ffee"}


def touched(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_a_second_start_keeps_the_records_and_nothing_else_of_the_first(tmp_path: Path) -> None:
    work, package = tmp_path / "work", touched(tmp_path / "packages" / "one.py").parent
    gone = [touched(work / name) for name in ("path/1/two.py", "path/2/one.py")]
    gone += [touched(work / "tree" / name / "gone.py") for name in ("interclr", "benchmarks")]
    record = touched(work / "tree" / "results" / "cifar10" / "tiny" / "a-s0.json")
    environment = in_place_of_python(tmp_path, "exit 0") | {"PYTHONPATH": str(package)}
    told = detached(environment, "start", "60", "tiny")
    assert told.returncode == 0, told
    assert [str(path) for path in gone if path.exists()] == []
    assert (work / "path" / "1" / "one.py").exists()
    assert (work / "tree" / "interclr" / "learner.py").exists()
    assert record.exists()


def test_start_and_look_in_one_command_end_with_the_runs_and_bring_their_records(tmp_path: Path) -> None:
    record = touched(tmp_path / "work" / "tree" / "results" / "cifar10" / "tiny" / "a-s0.json")
    for body, expected in (("exit 0", 0), ("echo '1 s: tiny/a-s0: started'; sleep 1; exit 5", 5)):
        environment = in_place_of_python(tmp_path, body)
        told = detached(environment, "run", "60", str(tmp_path / "out"), "tiny")
        assert told.returncode == expected, told
        with tarfile.open(tmp_path / "out" / "records.tgz") as packed:
            assert "results/cifar10/tiny/a-s0.json" in packed.getnames()
    assert record.exists()
    told = detached(environment, "run", "60", "tiny")
    assert (told.returncode, told.stderr) == (2, "run: seconds, a folder for the records, and what to run\n")


def test_a_checkout_is_not_replaced_by_its_own_copy(tmp_path: Path) -> None:
    kept = touched(tmp_path / "tree" / "interclr" / "learner.py")
    script = touched(tmp_path / "tree" / "benchmarks" / "cifar10_detached.sh")
    shutil.copy(ROOT / "benchmarks" / "cifar10_detached.sh", script)
    environment = in_place_of_python(tmp_path, "exit 0") | {"WORK": str(tmp_path)}
    told = subprocess.run([script, "start", "60", "tiny"], capture_output=True, text=True, env=environment)
    assert (told.returncode, "tree is this checkout itself" in told.stderr) == (2, True), told
    assert kept.exists()


def test_nothing_starts_without_a_package_that_cannot_be_copied(tmp_path: Path) -> None:
    environment = in_place_of_python(tmp_path, "exit 0") | {"PYTHONPATH": str(tmp_path)}  # the copy would lie in itself
    told = detached(environment, "start", "60", "tiny")
    assert (told.returncode, f"PYTHONPATH: {tmp_path} was not copied" in told.stderr) == (2, True), told
    assert "started" not in told.stdout
    assert not (tmp_path / "work" / "pid").exists()


def test_a_start_that_ends_without_a_word_is_none(tmp_path: Path) -> None:
    environment = in_place_of_python(
        tmp_path, 'until [ -s "$WORK/pid" ]; do sleep 0.1; done; kill -KILL "$(cat "$WORK/pid")"'
    )
    told = detached(environment, "start", "60", "tiny")
    assert (told.returncode, "it ended without a word" in told.stderr) == (1, True), told
    assert "started" not in told.stdout


def test_a_start_of_which_nothing_is_heard_is_none(tmp_path: Path) -> None:
    environment = in_place_of_python(tmp_path, f"exec {shutil.which('sleep')} 100")
    hurried = touched(tmp_path / "tools" / "sleep")  # the minute of waiting, but not what runs, is over at once
    hurried.write_text("#!/bin/sh\n")
    hurried.chmod(0o755)
    try:
        told = detached(environment | {"PATH": f"{hurried.parent}:{environment['PATH']}"}, "start", "60", "tiny")
        assert (told.returncode, "no run has started in a minute" in told.stderr) == (1, True), told
        assert "started" not in told.stdout
    finally:
        stopped = detached(environment, "stop")
    assert stopped.returncode == 0, stopped


def test_runs_go_on_between_commands_and_their_records_come_back(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"tiny": {"common": TINY, "seeds": [0], "runs": {"a": {"recipe": "synthetic-npidv2"}}}})
    environment = os.environ | {"PYTHON": sys.executable, "WORK": str(tmp_path / "work"), "INTERCLR_COMMIT": "c0ffee"}
    carried = tmp_path / "carried"  # packages that the machine lacks, in a folder that the next command replaces
    carried.mkdir()
    (carried / "sitecustomize.py").write_text("import os; os.environ['CARRIED'] = __file__\n")
    environment |= {"PYTHONPATH": f"{os.path.relpath(carried)}:{ROOT}"}

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return detached(environment, *words)

    assert "nothing was started" in call("look").stderr
    assert "nothing goes on" in call("stop").stderr
    try:
        first = call("start", "150", "tiny", "--plan", str(plan))
        assert (first.returncode, "tiny/a-s0: started" in first.stdout) == (0, True), first
        shutil.rmtree(carried)
        again = call("start", "150", "tiny", "--plan", str(plan))
        assert (again.returncode, "runs go on" in again.stderr) == (2, True)
        assert call("look", "0", str(tmp_path / "early")).returncode == 3
        (copy,) = (tmp_path / "work" / "path").iterdir()  # not of the checkout
        assert (copy / "sitecustomize.py").exists()
        assert (tmp_path / "early" / "records.tgz").exists()
    finally:
        stopped = call("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert call("look").returncode not in (0, 3)
    try:
        assert call("start", "150", "tiny", "--plan", str(plan)).returncode == 0
        done = call("look", "150", str(tmp_path / "got"))
    finally:
        call("stop")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny/a-s0: k-NN" in done.stdout
    with tarfile.open(tmp_path / "got" / "records.tgz") as packed:
        file = packed.extractfile("results/cifar10/tiny/a-s0.json")
        assert file is not None
        record = json.load(file)
    assert (record["commit"], "figures" in record) == ("c0ffee", True)
    assert not (ROOT / "results" / "cifar10" / "tiny").exists()
