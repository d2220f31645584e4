"""The command line: parse, call, print. Errors a user can mend are one line and exit code 2."""

from __future__ import annotations

import difflib
import json
import os
import sys
import warnings
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from typer.core import TyperGroup

from interclr import __version__
from interclr.types import UserError, printable


class Commands(TyperGroup):
    """Ctrl-C is one line and exit code 130: left to itself typer ends without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Learn visual representations from unlabelled images by relating different images to each other.",
)
data_app = typer.Typer(no_args_is_help=True, help="Get, pack and check image sets.")
app.add_typer(data_app, name="data")


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"interclr {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


Overrides = Annotated[list[str] | None, typer.Argument(help="A recipe (see: interclr recipes) and key.sub=value …")]
console = Console(highlight=False, soft_wrap=True, emoji=False)


def _meant(option: str) -> str:
    """Of ``--epochs`` that it is written ``schedule.epochs=…``, of ``--resum`` that it lacks a letter."""
    from interclr.config import keys_ending_in

    name, _, value = option.lstrip("-").partition("=")
    written = [f"{key}={value or '…'}" for key in keys_ending_in(name.rpartition(".")[2].replace("-", "_"))]
    if written:
        return f"settings are written {' or '.join(written)}; "
    command: Any = typer.main.get_command(app)
    options = command.commands["pretrain"].params
    known = [text for option in options for text in (*option.opts, *option.secondary_opts)]
    close = difflib.get_close_matches(f"--{name}", known, 1)
    return f"did you mean {close[0]}? " if close else ""


def recipe_and_overrides(words: list[str] | None) -> tuple[str | None, list[str]]:
    """The word without '=', or the file of that name, is the recipe; there may be one."""
    if option := next((word for word in words or [] if word.startswith("-")), None):
        raise UserError(f"no option {option}; {_meant(option)}see: interclr pretrain --help")
    plain = [word for word in words or [] if "=" not in word or (word.endswith(".yaml") and Path(word).is_file())]
    if len(plain) > 1:
        raise UserError(f"one recipe at a time, not {' and '.join(plain)}; overrides are written key.sub=value")
    return (plain[0] if plain else None), [word for word in words or [] if word not in plain]


@app.command(context_settings={"ignore_unknown_options": True})
def pretrain(
    words: Overrides = None,
    data: Annotated[str | None, typer.Option(help="Folder, list file, packed store or built-in name.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/RECIPE-TIME.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out exactly where it stopped.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = None,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html at the end.")] = True,
) -> None:
    """Pre-train a backbone. Without arguments: the default recipe on the embedded synthetic set."""
    from interclr import dist
    from interclr.config import load_settings, quoted
    from interclr.engine import pretrain as train
    from interclr.report.pretrain import report_if_finished
    from interclr.run.folder import new_folder, restore_settings
    from interclr.screen import Screen

    recipe, overrides = recipe_and_overrides(words)
    if data is not None and any(override.startswith("data.source=") for override in overrides):
        raise UserError("images are named twice, by --data and by data.source=: give one of them")
    overrides += [] if data is None else [f"data.source={quoted(data)}"]
    overrides += [] if device is None else [f"engine.device={quoted(device)}"]
    if resume:
        if out is None:
            raise UserError("--resume needs the run folder: add --out DIR")
        if not out.is_dir() and recipe is None and data is None:  # with one it begins: a job that is queued again
            raise UserError(f"--resume: there is no run in {out}")
        restore_settings(out)
        if recipe is None and (out / "resolved.yaml").is_file():
            recipe = str(out / "resolved.yaml")
        elif recipe is None and data is None:
            raise UserError(f"--resume: {out} holds no run yet (no resolved.yaml); start it again without --resume")
    name = recipe or ("default" if data is None else "folder")
    settings = load_settings(name, overrides)
    if Path(name).stem == "folder" and settings.data.source == load_settings("folder").data.source:
        raise UserError("the recipe folder is for your own images: name them with --data")
    run = train(settings, out or new_folder(name), resume=resume)
    main_process = dist.is_main()
    dist.stop()  # else its threads may be running when the process ends, which then aborts
    if page and main_process:
        report_if_finished(run, Screen(console))
    if not run.finished and main_process:
        raise typer.Exit(130)  # so that what should follow a training does not follow half of one


@app.command()
def config(words: Overrides = None) -> None:
    """Print the whole settings tree of a recipe with overrides, checked."""
    from interclr.config import dump, load_settings

    recipe, overrides = recipe_and_overrides(words)
    console.print(dump(load_settings(recipe or "default", overrides)), markup=False, end="")


@app.command()
def evaluate(
    protocol: Annotated[
        str,
        typer.Argument(
            help="knn, linear, svm, low-shot, semi-supervised, detection, clusters; several with commas; all"
        ),
    ],
    subject: Annotated[str, typer.Argument(help="Run folder, checkpoint, torchvision/NAME@WEIGHTS, timm/NAME, file.")],
    words: Annotated[list[str] | None, typer.Argument(help="Settings of the protocol: key=value …")] = None,
    data: Annotated[str | None, typer.Option(help="Labelled images; by default the run's own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go; by default RUN/evaluate.")] = None,
    root: Annotated[Path | None, typer.Option(help="Where built-in sets lie.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    backbone: Annotated[str | None, typer.Option(help="Architecture of a weights file that does not tell.")] = None,
    image_size: Annotated[
        int | None, typer.Option(min=8, help="Side of the input, for weights that are not a run's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of draws and heads.")] = 0,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Test on what the run kept from its training (data.hold_out): for choices."),
    ] = False,
) -> None:
    """Measure a representation by protocols of the paper: one, several, or all that the data allow."""
    from interclr.engine.build import choose_device
    from interclr.evaluate import PROTOCOLS, Request
    from interclr.evaluate import evaluate as measure
    from interclr.screen import Screen

    names = list(PROTOCOLS) if protocol == "all" else list(dict.fromkeys(protocol.split(",")))
    if len(names) > 1 and words:
        raise UserError(f"settings belong to one protocol; evaluate {protocol} takes none")
    request = Request(subject, data, out, root, choose_device(device), backbone, image_size, seed, held_out)
    measure(names, PROTOCOLS, request, words or [], Screen(console), whole=protocol == "all")


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(help="Run folder, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="File or folder; by default RUN/report.html.")] = None,
    points: Annotated[int | None, typer.Option(help="Images on the map, at most 20,000.")] = None,
    data: Annotated[str | None, typer.Option(help="The run's images, where they have been moved.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
) -> None:
    """Write one self-contained page that shows a run: curves, map, clusters, neighbours, negatives, duplicates."""
    from interclr.engine.build import choose_device
    from interclr.report import POINTS, report
    from interclr.screen import Screen

    many = POINTS if points is None else points
    report(run, screen=Screen(console), out=out, device=choose_device(device), points=many, data=data)


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="A built-in study (interclr study list), all, or a YAML file.")],
    words: Annotated[list[str] | None, typer.Argument(help="Overrides for every cell: key.sub=value …")] = None,
    recipe: Annotated[str | None, typer.Option(help="The recipe whose settings are varied.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of every cell.")] = None,
    seeds: Annotated[str | None, typer.Option(help="3 means 0,1,2; or a list such as 0,7.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder, list file, packed store or built-in name.")] = None,
    out: Annotated[Path | None, typer.Option(help="By default studies/NAME; finished cells there are kept.")] = None,
    jobs: Annotated[int, typer.Option(help="Cells that run at once, each in a process of its own.")] = 1,
    devices: Annotated[str | None, typer.Option(help="Spread the jobs: cuda:0,cuda:1 …")] = None,
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Time a few steps first to say how long.")] = True,
) -> None:
    """Run one of the paper's experiments, or your own: a table, a plot and raw JSON; continues after interruption."""
    from interclr.screen import Screen
    from interclr.study import parse_seeds, run_study, study_names

    if name == "list":
        console.print("\n".join([*study_names(), "all"]), markup=False)
        return
    run_study(
        name,
        out or Path("studies") / Path(name).stem,
        recipe=recipe,
        epochs=epochs,
        seeds=None if seeds is None else parse_seeds(seeds),
        data=data,
        overrides=words or [],
        jobs=jobs,
        devices=devices.split(",") if devices else (),
        probe=probe,
        screen=Screen(console),
    )


@app.command()
def plot(
    kind: Annotated[
        str, typer.Argument(help="tsne, retrieval, curves; of one run negatives, map, clusters, duplicates, outliers")
    ],
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="File; .png and .svg are both written.")],
    data: Annotated[
        str | None, typer.Option(help="Other images than the run's own; not for curves, negatives.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the images that are shown.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
) -> None:
    """Draw the paper's figures of one or more runs, and those of the report, for papers."""
    from interclr.engine.build import choose_device
    from interclr.report.plots import KINDS, plot_found
    from interclr.run.files import check_writable
    from interclr.screen import Screen
    from interclr.study.gallery import plot_negatives, plot_retrieval
    from interclr.study.plots import plot_curves, plot_tsne

    if kind in ("negatives", *KINDS) and len(runs) != 1:
        raise UserError(f"plot {kind} takes one run, not {len(runs)}")
    check_writable(out.parent)
    on = choose_device(device)
    if kind == "tsne":
        plot_tsne(runs, out, data=data, seed=seed, device=on)
    elif kind == "retrieval":
        plot_retrieval(runs, out, data=data, seed=seed, device=on)
    elif kind == "negatives":
        plot_negatives(runs[0], out, seed=seed, device=on)
    elif kind == "curves":
        plot_curves(runs, out)
    elif kind in KINDS:
        plot_found(kind, runs[0], out, data=data, seed=seed, device=on, screen=Screen(console))
    else:
        raise UserError(f"no plot {kind!r}; there are: tsne, retrieval, curves, negatives, {', '.join(KINDS)}")
    console.print(f"{out.with_suffix('.png')} and {out.with_suffix('.svg')}", markup=False)


@app.command()
def embed(
    subject: Annotated[str, typer.Argument(help="Run folder, checkpoint, torchvision/NAME@WEIGHTS, timm/NAME, file.")],
    data: Annotated[str, typer.Argument(help="Folder, list file, packed store or built-in name.")],
    out: Annotated[Path, typer.Argument(help="A .safetensors file: features, and labels where known.")],
    split: Annotated[str, typer.Option(help="train or test")] = "train",
    root: Annotated[Path | None, typer.Option(help="Where built-in sets lie.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    backbone: Annotated[str | None, typer.Option(help="Architecture of a weights file that does not tell.")] = None,
    image_size: Annotated[
        int | None, typer.Option(min=8, help="Side of the input, for weights that are not a run's.")
    ] = None,
) -> None:
    """Write the features of every image; NaN where unreadable. Beside it (.names.txt), in the same order, the names of
    the images as JSON strings, one a line."""
    from interclr.engine.build import choose_device
    from interclr.evaluate.embedding import write_features
    from interclr.evaluate.subject import open_subject
    from interclr.screen import Screen

    opened = open_subject(subject, backbone, image_size)
    write_features(opened, data, out, split, root, choose_device(device), Screen(console))


@app.command()
def export(
    subject: Annotated[str, typer.Argument(help="Run folder or checkpoint.")],
    out: Annotated[Path, typer.Argument(help="File to write.")],
    file_format: Annotated[str, typer.Option("--format", help="torchvision, timm, safetensors, onnx, detectron2")] = (
        "torchvision"
    ),
) -> None:
    """Write the backbone under the names another library expects."""
    from interclr.evaluate.subject import open_subject
    from interclr.export import Format
    from interclr.export import export as write

    formats: tuple[Format, ...] = get_args(Format)
    chosen = next((known for known in formats if known == file_format), None)
    if chosen is None:
        raise UserError(f"--format {file_format}: use one of {', '.join(formats)}")
    opened = open_subject(subject)
    written = write(opened.backbone, out, chosen, opened.image_size)
    console.print(f"{written.tensors} tensors in {written.path}. {written.note}".rstrip(), markup=False)


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="step, cifar, convolutions, data, kmeans, growth, cpu; by default all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the whole report goes, as JSON.")] = Path("bench.json"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: shows that it works, not how fast it is.")
    ] = False,
    root: Annotated[Path | None, typer.Option(help="Where CIFAR-10 lies; otherwise made-up pixels.")] = None,
    store: Annotated[Path | None, typer.Option(help="A packed JPEG store; otherwise made-up photographs.")] = None,
) -> None:
    """Measure speed and memory: device events, warm-up, repeats, spread; ratios within one run."""
    from interclr.bench.suite import BENCHES, Options, lines_of, run_benches
    from interclr.engine.build import choose_device
    from interclr.run.files import write_text
    from interclr.screen import Screen

    chosen, asked = choose_device(device), set(names or BENCHES)
    if chosen.type == "cpu" and not quick and asked != {"cpu"} and asked <= set(BENCHES):
        raise UserError("these sizes are for a GPU: add --quick, or measure the step on a CPU with: interclr bench cpu")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    screen = Screen(console)
    report = run_benches(
        names or list(BENCHES),
        Options(chosen, screen, quick, root, store),
        lambda so_far: write_text(out, json.dumps(so_far, indent=1) + "\n"),
    )
    screen.table(f"{report['machine']}, torch {report['torch']}", lines_of(report), ("what", "median [range]"))
    screen.say(f"everything is in {out}")


@app.command()
def recipes() -> None:
    """List the recipes."""
    from interclr.config import load_settings, recipe_names

    for name in recipe_names():
        settings = load_settings(name)
        where = "your images (--data)" if name == "folder" else settings.data.source
        branch = "" if settings.inter is None else f", λ={settings.inter.intra_weight}, k={settings.inter.clusters}"
        console.print(
            f"{name:28} {settings.method.name} on {where}, {settings.model.backbone}, "
            f"{settings.schedule.epochs} epochs{branch}",
            markup=False,
        )


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100, stl10, voc07, voc0712")],
    root: Annotated[Path | None, typer.Option(help="Where sets lie; $INTERCLR_DATA or ./data by default.")] = None,
) -> None:
    """Download a built-in set."""
    from interclr.data.builtin import get

    get(name, root, lambda text: console.print(text, markup=False))


@data_app.command("pack")
def data_pack(
    source: Annotated[str, typer.Argument(help="Folder, list file or built-in name.")],
    destination: Annotated[Path, typer.Argument(help="A new folder for the packed store.")],
    image_format: Annotated[str, typer.Option("--format", help="auto, jpeg or raw")] = "auto",
    max_side: Annotated[int | None, typer.Option(help="Shrink images whose longer side is larger.")] = None,
    split: Annotated[str, typer.Option(help="train or test")] = "train",
) -> None:
    """Turn images into one store that loads fast."""
    from interclr.data.builtin import open_source
    from interclr.data.packed import pack
    from interclr.engine.interrupt import term_as_interrupt
    from interclr.screen import Screen

    with term_as_interrupt(), Screen(console).working("packing") as progress:
        report = pack(
            open_source(source, split), destination, image_format=image_format, max_side=max_side, progress=progress
        )
    console.print(str(report), markup=False)


@data_app.command("check")
def data_check(
    source: Annotated[str, typer.Argument(help="Folder, list file or built-in name.")],
    report_file: Annotated[Path | None, typer.Option("--json", help="Also write the whole report here.")] = None,
    copies: Annotated[
        bool,
        typer.Option(
            "--copies/--no-copies",
            help="Look for near duplicates. Takes as the square of the number of images: on one core half a minute for "
            "40,000, three minutes for 100,000.",
        ),
    ] = True,
) -> None:
    """Find unreadable, truncated and odd images, exact and near duplicates. Exits with 1 where some are unreadable."""
    from interclr.data.check import check
    from interclr.run.files import write_text
    from interclr.screen import Screen

    screen = Screen(console)
    report = check(source, working=screen.working, copies=copies)
    rows = [(kind, f"{count:,}", examples) for kind, count, examples in report.summary()]
    if rows:
        screen.table(f"{source}: {report.count:,} images", rows, ("finding", "images", "for instance"))
    else:
        screen.say(f"{source}: {report.count:,} images, nothing odd found")
    if report_file is not None:
        if report_file.exists() and not report_file.is_file():  # a pipe
            report_file.write_text(report.to_json())
        else:
            write_text(report_file.resolve(), report.to_json())  # a link stays one
    if report.unreadable:
        raise typer.Exit(1)


def _is_spare() -> bool:
    """Under ``torchrun``, where one process alone does what does not train: the others would do all of it again."""
    of_several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("RANK", "0") != "0"
    return of_several and not any(command in sys.argv[1:2] for command in ("pretrain", "study", "bench"))


def main() -> None:
    """Entry point: turns ``UserError`` into one line and exit code 2."""
    if _is_spare():
        return
    for stream in (sys.stdout, sys.stderr):  # a file name need not be text
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *_: print(f"! {printable(str(message))}", file=sys.stderr)
    try:
        app()
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
