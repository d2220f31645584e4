from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from tiny_runs import INTER, MOCO, TINY, final_state, write_images

import interclr
from interclr import cli
from interclr.config import load_settings, recipe_names, settings_from
from interclr.data.packed_store import is_packed
from interclr.report.history import commands
from interclr.run.folder import Run, command_line
from interclr.screen import Screen


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The command line in this process: what it prints and the code it ends with."""

    def run(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["interclr", *words])
        monkeypatch.setattr(cli.console, "_file", None)  # whatever stdout is by then
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    monkeypatch.setattr("warnings.showwarning", lambda *_: None)
    return run


@pytest.mark.parametrize(
    ("rank", "words", "says"), [("0", "recipes", "default"), ("1", "recipes", ""), ("1", "pretrain", "--out")]
)
def test_one_process_of_several_does_what_does_not_train(
    call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, rank: str, words: str, says: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    result = call(words)
    assert (says in result.out + result.err) if says else not result.out + result.err


def small(*overrides: str) -> list[str]:
    return ["views/synthetic", *TINY, *MOCO, *overrides]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["pretrain", "data.batchh=3"], "data.batchh: unknown key; did you mean batch?"),
        (["pretrain", "data.batch=many"], "data.batch: "),
        (["pretrain", "epochs=2"], "epochs: unknown key; did you mean schedule.epochs?"),
        (["pretrain", "warmup_epochs=2"], "did you mean inter.warmup_epochs or schedule.warmup_epochs?"),
        (["pretrain", "--epochs", "2"], "no option --epochs; settings are written schedule.epochs=…; see"),
        (["pretrain", "--resum"], "no option --resum; did you mean --resume? see: interclr pretrain --help"),
        (["pretrain", "--no-reprot"], "did you mean --no-report?"),
        (["pretrain", "--schedule.epochs=2"], "settings are written schedule.epochs=2;"),
        (["config", "cifar10-byol", "method.queue=3"], "method.queue: unknown key; allowed: name"),
        (["pretrain", "defalt"], "no recipe 'defalt': did you mean default"),
        (["pretrain", "default", "mocov2"], "one recipe at a time"),
        (["pretrain", "seed=["], "seed: "),
        (["pretrain", "--data", "/nowhere/at/all"], "/nowhere/at/all does not exist"),
        (["pretrain", "--data", "cifar11"], "did you mean cifar10"),
        (["pretrain", "--resume"], "--resume needs the run folder"),
        (["pretrain", "--resume", "--out", "/nowhere/run"], "there is no run in /nowhere/run"),
        (["pretrain", "--device", "gpu"], "engine.device: "),
        (["pretrain", "--out", "/dev/null/run"], "cannot write to /dev/null/run"),
        (["pretrain", "folder"], "name them with --data"),
        (["pretrain", "folder", "data={source: /nowhere/at/all}"], "/nowhere/at/all does not exist"),
        (["pretrain", "mocov2", "optimiser.nesterov=true", "optimiser.momentum=0"], "nesterov=true needs a momentum"),
        (
            [
                "pretrain",
                "data.source=synthetic:64",
                "model.backbone=vit_b_16",
                "model.stem=standard",
                "model.width=64",
            ],
            "vit_b_16 does not take images of 32×32 pixels",
        ),
        (["config", "optimiser.name=adam"], "'adamw'"),
        (["config", "nothing.yaml"], "no recipe 'nothing.yaml'"),
        (["data", "get", "cifar"], "there is no data set 'cifar'"),
        (["data", "get", "imagenet"], "cannot be downloaded"),
        (["data", "pack", "/nowhere/at/all", "/tmp/x"], "does not exist"),
        (["data", "check", "/nowhere/at/all"], "does not exist"),
        (["plot", "tsne", "/nowhere", "--out", "/dev/null/picture"], "cannot write to /dev/null"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], says: str, call: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert result.code == 2
    assert says in result.err
    assert re.fullmatch(r"error: [^\n]+\n", result.err), result.err
    assert "Traceback" not in result.out + result.err
    assert list(tmp_path.rglob("*.pt")) == []


def test_the_installed_command_does_the_same() -> None:
    command = [sys.executable, "-m", "interclr.cli", "pretrain", "enginee.device=cpu"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: enginee: unknown key; did you mean engine?")
    assert done.stderr.count("\n") == 1


def test_the_public_names_are_listed_before_they_are_loaded() -> None:
    code = "import sys, interclr; print({*interclr.__all__, '__version__'} <= {*dir(interclr)}, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True False\n", done.stderr


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; sys.argv = ['interclr', '--help']; from interclr import cli\n"
    code += "try: cli.main()\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pretrain" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("recipe", ["default", "byol-interclr"])
def test_config_prints_a_tree_that_reads_back(recipe: str, call: object) -> None:
    result = call("config", recipe, "seed=7", "data.source=/a/:cat:/[b]/" + "long" * 60)
    assert result.code == 0
    expected = load_settings(recipe, ["seed=7", "data.source=/a/:cat:/[b]/" + "long" * 60])
    assert settings_from(yaml.safe_load(result.out)) == expected


def test_recipes_are_listed_one_a_line(call: object) -> None:
    result = call("recipes")
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines()] == recipe_names()


def test_pretrain_resume_and_again(call: object, out: Path) -> None:
    result = call("pretrain", *small(*INTER), "--out", str(out))
    assert result.code == 0, result.err
    assert Run(out).finished
    assert "after" in result.out
    again = call("pretrain", *small(*INTER), "--out", str(out))
    assert again.code == 2
    assert "--resume" in again.err
    resumed = call("pretrain", "--resume", "--out", str(out))  # the settings are those of the run
    assert resumed.code == 0, resumed.err
    assert "is finished" in resumed.out
    longer = call("pretrain", "--resume", "--out", str(out), "schedule.epochs=3")
    assert longer.code == 0, longer.err
    assert final_state(out)["step"] == 12
    assert Run(out).result["epochs"] == 3
    assert Run(out).result["command"] == shlex.join(["interclr", "pretrain", *small(*INTER), "--out", str(out)])
    assert Run(out).result["continued_by"][-1].endswith("schedule.epochs=3")  # each that got as far as a checkpoint
    assert Run(out).result["changes"] == ["schedule.epochs: 2 → 3"]
    assert Run(out).result["processes"] == 1
    assert "continued with other settings (schedule.epochs: 2 → 3)" in commands(out, None, Run(out).result)[0]["label"]
    mask = os.umask(0)
    os.umask(mask)
    assert (out / "backbone.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize(("here", "says"), [("4", "--nnodes 2 --nproc-per-node 4"), ("8", "--nproc-per-node 8")])
def test_what_was_typed_names_the_processes(here: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [cli.__file__, "pretrain", "--out", "a b"])
    assert command_line() == "interclr pretrain --out 'a b'"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert command_line() == f"torchrun {says} -m interclr.cli pretrain --out 'a b'"
    monkeypatch.setattr(sys, "argv", ["mine.py", "1"])
    assert command_line() == f"torchrun {says} mine.py 1"


def test_data_takes_the_folder_recipe_and_overrides_win(
    call: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_images(tmp_path / "images [1]: a=b", 12)
    quick = ["schedule.epochs=1", "model.width=8", "method.hidden=16", "method.dim=8"]
    result = call("pretrain", "--data", str(folder), "--device", "cpu", *quick)
    assert result.code == 0, result.err
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("folder-")
    settings = Run(run).settings
    assert settings.data.source == str(folder)
    assert settings.inter is not None
    assert settings.engine.device == "cpu"
    assert "because" in result.out


def test_pack_and_check(call: object, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 6, classes=2)
    odd = folder / "class[" / "b] broken.png"  # its relative path holds what rich takes for a closing tag: [/b]
    odd.parent.mkdir()
    odd.write_bytes(b"nothing")
    packed = call("data", "pack", str(folder), str(tmp_path / "packed"))
    assert packed.code == 0, packed.err
    assert is_packed(tmp_path / "packed")
    checked = call("data", "check", str(folder), "--json", str(tmp_path / "report.json"))
    assert checked.code == 1
    assert "class[/b] broken.png" in checked.out
    assert "broken.png" in (tmp_path / "report.json").read_text()
    odd.unlink()
    checked = call("data", "check", str(folder))
    assert (checked.code, checked.out) == (0, f"{folder}: 6 images, nothing odd found\n")


def test_check_shows_its_two_passes_apart_and_can_leave_out_the_second(
    call: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_images(tmp_path / "images", 3)
    said: list[str] = []

    @contextmanager
    def working(self: Screen, what: str) -> Iterator[Callable[[int, int], None]]:
        said.append(what)
        yield lambda done, total: said.append(f"{done}/{total}")
        said.append("done")

    monkeypatch.setattr(Screen, "working", working)
    assert call("data", "check", str(folder)).code == 0
    assert said == ["checking", "1/3", "2/3", "3/3", "done", "comparing pictures", "3/3", "done"]
    said.clear()
    checked = call("data", "check", str(folder), "--no-copies", "--json", str(tmp_path / "report.json"))
    assert said == ["checking", "1/3", "2/3", "3/3", "done"]
    assert "not looked for" in checked.out
    assert json.loads((tmp_path / "report.json").read_text())["near_duplicates"] is None


def test_ctrl_c_is_130(call: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    result = call("pretrain")
    assert (result.code, result.err) == (130, "interrupted\n")


def test_ctrl_c_in_a_command_is_one_line_and_130(call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("interclr.report.report", interrupted)
    result = call("report", "somewhere", "--device", "cpu")
    assert (result.code, result.out, result.err) == (130, "", "interrupted\n")


def test_recipe_and_overrides() -> None:
    assert cli.recipe_and_overrides(None) == (None, [])
    assert cli.recipe_and_overrides(["a.b=1", "mocov2", "c=d=e"]) == ("mocov2", ["a.b=1", "c=d=e"])


def test_a_run_ends_with_its_page_and_the_page_can_be_made_again(call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert call("pretrain", *small(), "--out", str(run)).code == 0
    assert "<!doctype html>" in (run / "report.html").read_text().lower()
    assert call("report", str(run), "--points", "10", "--out", str(tmp_path / "again.html")).code == 0
    assert (tmp_path / "again.html").stat().st_size > 10_000
    answer = call("report", str(tmp_path))
    assert answer.code == 2
    assert "resolved.yaml" in answer.err
    assert call("plot", "curves", str(run), "--out", str(tmp_path / "figures" / "curves.png")).code == 0
    assert (tmp_path / "figures" / "curves.svg").exists()
    answer = call("plot", "nothing", str(run), "--out", str(tmp_path / "x.png"))
    assert answer.code == 2
    assert "tsne, retrieval, curves, negatives, map, clusters, duplicates, outliers" in answer.err


def test_moved_images_are_found_with_data(call: Callable[..., Result], tmp_path: Path) -> None:
    old = write_images(tmp_path / "old", 16, classes=2)
    run = tmp_path / "run"
    words = [word for word in small("schedule.epochs=1") if not word.startswith("data.source=")]
    assert call("pretrain", *words, "--data", str(old), "--out", str(run), "--no-report").code == 0
    new = str(old.rename(tmp_path / "new"))
    assert "the report has no images" in call("report", str(run), "--out", str(tmp_path / "without.html")).out
    for command in (["pretrain", "--resume", "--out", str(run)], ["evaluate", "knn", str(run)]):
        answer = call(*command)
        assert answer.code == 2
        assert re.search(r"old does not exist.*; where the run's images have been moved, add --data", answer.err)
    assert call("report", str(run), "--data", str(tmp_path / "nowhere")).code == 2
    assert call("report", str(run), "--data", new).code == 0
    assert "class0/000.png" in (run / "report.html").read_text()
    left = call("report", str(run))
    assert left.code == 2
    assert "--data" in left.err
    assert call("pretrain", "--resume", "--out", str(run), "--data", new, "schedule.epochs=2", "--no-report").code == 0


def test_no_report_where_none_is_wanted(call, tmp_path: Path) -> None:
    assert call("pretrain", *small(), "--no-report", "--out", str(tmp_path / "run")).code == 0
    assert not (tmp_path / "run" / "report.html").exists()


def test_studies_are_listed_and_an_unknown_one_is_explained(call, tmp_path: Path) -> None:
    assert "margin-inter" in call("study", "list").out.split()
    answer = call("study", "lamda", "--out", str(tmp_path))
    assert answer.code == 2
    assert "lambda" in answer.err


def test_evaluate_export_and_embed(call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert call("pretrain", *small(), "--no-report", "--out", str(run)).code == 0
    assert call("evaluate", "knn", str(run), "k=3").code == 0
    assert (run / "evaluate" / "knn" / "result.json").exists()
    assert "no protocol 'kn'" in call("evaluate", "kn", str(run)).err
    assert call("evaluate", "clusters,knn", str(run)).code == 0
    assert (run / "evaluate" / "clusters" / "result.json").exists()
    assert json.loads((run / "evaluate" / "knn" / "result.json").read_text())["figures"]["k"] != 3  # measured again
    answer = call("evaluate", "knn,detection", str(run))
    assert answer.code == 2
    assert "detection: synthetic" in answer.err
    assert "has no boxes" in answer.err
    assert not (run / "evaluate" / "all.json").exists()  # which belongs to evaluate all
    assert "no protocol 'x'" in call("evaluate", "knn,x", str(run)).err
    assert "settings belong to one protocol" in call("evaluate", "knn,clusters", str(run), "k=3").err
    answer = call("embed", str(run), "synthetic:12", str(tmp_path / "features.safetensors"))
    assert answer.code == 0
    assert "12 x 64 features of the train split in" in answer.out
    assert answer.out.endswith("; not embedded: 3 images of --split test\n")
    whole = write_images(tmp_path / "whole", 4)
    answer = call("embed", str(run), str(whole), str(tmp_path / "whole.safetensors"))
    assert answer.out.endswith(f"4 x 64 features in {tmp_path / 'whole.safetensors'}, names in whole.names.txt\n")
    assert len((tmp_path / "features.names.txt").read_text().splitlines()) == 12
    assert "are written as .safetensors" in call("embed", str(run), "synthetic:12", str(tmp_path / "f.npy")).err
    words = ["torchvision/resnet18", "synthetic:12", str(tmp_path / "tv.safetensors"), "--image-size", "32"]
    assert call("embed", *words).code == 0
    assert call("export", str(run), str(tmp_path / "weights.safetensors")).code == 0
    answer = call("export", str(run), str(tmp_path / "weights.x"), "--format", "keras")
    assert answer.code == 2
    assert "detectron2" in answer.err


def test_a_folder_that_cannot_be_written_is_told_before_the_work(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the kernel's: it is there, and nobody can make a file in it."""

    def works(*_: object, **__: object) -> None:
        raise AssertionError("the work has begun")

    assert call("pretrain", *small(), "--no-report", "--out", str(tmp_path / "run")).code == 0
    for work in ("report.write.collect", "evaluate.session._run", "evaluate.base.embed_source"):
        monkeypatch.setattr(f"interclr.{work}", works)
    monkeypatch.setattr("interclr.study.plots.plot_curves", works)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "knn").symlink_to("/proc/self")
    run, features = str(tmp_path / "run"), "/proc/self/features.safetensors"
    for words, says in (
        (["report", run, "--out", "/proc/self"], "choose another --out"),
        (["evaluate", "knn", run, "--out", str(tmp_path / "out")], "choose another --out"),
        (["plot", "curves", run, "--out", "/proc/self/curves.png"], "choose another --out"),
        (["embed", run, "synthetic:12", features], "name another file"),
    ):
        answer = call(*words)
        assert answer.code == 2
        assert re.fullmatch(rf"error: cannot write to [^\n]+; {says}\n", answer.err), answer.err


def test_names_that_are_no_plain_text(call, tmp_path: Path) -> None:
    """Beyond the basic plane, and not UTF-8 at all; neither ends a run."""
    folder = write_images(tmp_path / "\N{CAMERA}", 8)
    (folder / os.fsdecode(b"n\xe9.jpg")).write_bytes(b"no image")
    words = [word for word in small("schedule.epochs=1", "data.batch=4") if not word.startswith("data.source=")]
    result = call("pretrain", *words, "--data", str(folder), "--out", str(tmp_path / "run"), "--no-report")
    assert result.code == 0
    assert "1 of 9 images are unreadable" in result.out
    assert Run(tmp_path / "run").settings.data.source == str(folder)
    env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        [sys.executable, "-m", "interclr.cli", "data", "check", str(folder)], env=env, capture_output=True
    )
    assert b"Traceback" not in done.stderr
    assert rb"n\udce9.jpg" in done.stdout


def test_a_recipe_file_may_have_an_equals_sign_in_its_path(tmp_path: Path) -> None:
    path = tmp_path / "lr=3" / "resolved.yaml"
    path.parent.mkdir()
    path.write_text("{}")
    assert cli.recipe_and_overrides([str(path), "seed=1"]) == (str(path), ["seed=1"])


def test_a_signal_to_end_clears_away_what_is_half_packed(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from interclr.data import packed

    folder, real = write_images(tmp_path / "images", 6), packed.whole_folder

    @contextmanager
    def ended(destination: Path) -> Iterator[Path]:
        with real(destination) as place:
            assert place.parent == tmp_path
            os.kill(os.getpid(), signal.SIGTERM)
            yield place

    monkeypatch.setattr(packed, "whole_folder", ended)
    assert call("data", "pack", str(folder), str(tmp_path / "store"), "--format", "raw").code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_names_and_numbers_that_do_not_exist_are_refused(call: Callable[..., Result], tmp_path: Path) -> None:
    assert "no bench 'nope'" in call("bench", "nope").err
    assert call("report", str(tmp_path), "--points", "0").code == 2


def test_version_and_module(call) -> None:
    assert call("--version").out == f"interclr {interclr.__version__}\n"
    said = subprocess.run([sys.executable, "-m", "interclr", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"interclr {interclr.__version__}\n"
    assert version("interclr") == interclr.__version__


def test_images_are_named_once(call, tmp_path: Path) -> None:
    result = call("pretrain", "synthetic-byol", "data.source=synthetic:64", "--data", str(tmp_path))
    assert (result.code, "named twice" in result.err) == (2, True)


def test_a_job_that_is_queued_again_begins_by_the_command_that_resumes(call, tmp_path: Path) -> None:
    words = ["pretrain", "synthetic-mocov2", *TINY, "schedule.epochs=1", "--out", str(tmp_path / "new"), "--resume"]
    first = call(*words, "--no-report")
    assert (first.code, "starting from the beginning" in first.out) == (0, True), first.err
    assert "nothing to continue" in call(*words, "--no-report").out


def test_names_do_not_speak_to_the_terminal(call, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 4)
    (folder / "\x1b]0;owned\x07\x1b[2J.png").write_bytes(b"no image")
    result = call("data", "check", str(folder))
    assert "\\x1b]0;owned\\x07" in result.out
    assert "\x1b" not in result.out + result.err
