"""Open what is to be evaluated and the data, run one protocol or all that the data allow, and write what came out."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from interclr.config import explain, flat, joined
from interclr.data.builtin import in_full
from interclr.data.reading import Unreadable
from interclr.data.source import Source
from interclr.data.stream import in_order
from interclr.data.subset import readable_part
from interclr.data.views import largest_side
from interclr.evaluate.base import BATCH, BrokenImages, Context, Evaluation, LabelledData, Subject, write_json
from interclr.evaluate.paper import HEADLINES, PAPER_METHODS, published
from interclr.evaluate.requested import CPU, Request, Requested
from interclr.evaluate.subject import open_subject
from interclr.run.files import check_writable, write_text
from interclr.run.folder import Run
from interclr.screen import Screen
from interclr.types import UserError

OWN_COLUMNS = 3  # protocol, figure, value; then come the paper's
WIDE = 130  # columns of a terminal that has room for the paper's figures
NO_MATTER = {"jobs", "workers", "cache_gb", "save_epochs", "checkpoint_every"}  # settings that change no figure
Broken = dict[str, Unreadable]  # by the images that were looked through, see _key


def evaluate(
    names: list[str],
    protocols: Mapping[str, type[Evaluation]],
    request: Request,
    overrides: list[str],
    screen: Screen,
    whole: bool = False,
) -> dict[str, dict[str, float]]:
    """Run protocols by name; one that the data do not allow does not keep the others from being run.

    As a ``whole`` it is passed over with a warning, and there is a table of all; otherwise it is an error, at the end.
    """
    unknown = next((name for name in names if name not in protocols), None)
    if unknown is not None:
        raise UserError(f"no protocol {unknown!r}; there are: {', '.join(protocols)}, or all")
    request.check_held_out()
    subject = open_subject(request.subject, request.backbone, request.image_size)
    out = request.out or place_of(request)
    results: dict[str, dict[str, float]] = {}
    passed_over: dict[str, str] = {}
    broken: Broken = {}
    for name in names:
        settings = _settings(protocols[name], overrides)
        place = out / name
        check_writable(place)
        autocast = torch.bfloat16 if request.device.type == "cuda" else None
        where = None if request.data is None else in_full(request.data)
        context = Context(place, request.device, screen, request.seed, autocast, data_path=where)
        started = time.monotonic()
        try:
            data, settings = settings.open(Requested(request, largest_side(subject.image_size), place, screen))
            if whole and settings.weeks_on_a_cpu and request.device.type == "cpu":
                raise UserError("takes weeks on a CPU and is left out; ask for it by its name to run it all the same")
            _say_what_is_replaced(settings, request, subject.name, place, screen)
            try:
                results[name] = _run(settings, subject, data, context, broken)
            except KeyboardInterrupt:
                if settings.continues(data):
                    screen.say(f"{name}: the same command goes on where this one was")
                raise
        except UserError as error:
            if len(names) == 1:
                raise
            passed_over[name] = str(error)
            if whole:
                screen.warn(f"{name}: {error}")
            if not any(place.iterdir()):
                place.rmdir()
            continue
        seconds = round(time.monotonic() - started, 2)
        screen.say(f"{name}: {seconds:.1f} s; results in {place}")
        _predictions_as_json(place)
        if whole:
            _table_of_all(results, protocols, passed_over, subject, request, out)
    if passed_over and not whole:
        raise UserError("; ".join(f"{name}: {reason}" for name, reason in passed_over.items()))
    if whole:
        rows, header = _table_of_all(results, protocols, passed_over, subject, request, out)
        if not results:
            raise UserError(f"nothing could be measured; the reasons are in {out / 'all.md'}, too")
        shown = len(header) if screen.console.width >= WIDE else OWN_COLUMNS
        beside = " (columns after 'this run': the paper's own, ResNet-50 on ImageNet)" if shown > OWN_COLUMNS else ""
        screen.table(f"{subject.name}{beside}", [row[:shown] for row in rows], header[:shown])
        whose = " beside the paper's" if len(header) > OWN_COLUMNS else ""
        screen.say(f"this table{whose} is in {out / 'all.md'}")
    return results


def place_of(request: Request) -> Path:
    """Where results go: those of other subjects, or on other data, do not overwrite each other."""
    path, folder = Path(request.subject), request.run
    if folder is not None:
        place = folder / "evaluate" if path == folder else folder / "evaluate" / path.stem
    else:
        place = Path("evaluate") / _as_name(request.subject)
    if request.held_out:
        return place / "held-out"
    if request.data is None:
        return place
    name, where = _as_name(request.data), in_full(request.data)
    if any(_is_of_other_data(path, request.data, where) for path in place.glob(f"{glob.escape(name)}/*/result.json")):
        name += f"-{hashlib.sha256(os.fsencode(where)).hexdigest()[:8]}"
    return place / name


def _is_of_other_data(result: Path, data: str, where: str) -> bool:
    """Whether a result in the way is of another set whose path, or name in another folder, makes the same name here.

    Those of before tell only what was typed.
    """
    try:
        told = json.loads(result.read_text())
        return bool(told["data_path"] != where if "data_path" in told else told["data"] != data)
    except (OSError, ValueError, KeyError, TypeError):  # damaged: nothing to be kept
        return False


def _as_name(text: str) -> str:
    """Of a path or a name one that a folder can have."""
    return re.sub(r"[^\w.@-]+", "-", text).strip("-.")[-100:] or "data"


def _say_what_is_replaced(settings: Evaluation, request: Request, subject: str, place: Path, screen: Screen) -> None:
    """Before anything is measured, so that a result that was to be kept still can be."""
    try:
        old = json.loads((place / "result.json").read_text())
        seed, whose, before = old["seed"], str(old["subject"]), _compared(old["settings"], place)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or damaged: nothing to be kept
        return
    now = _compared(settings.model_dump(mode="json"), place)
    other = [f"{key}={value}" for key, value in before.items() if key in now and now[key] != value]
    whose = whose if request.out is not None and whose != subject else ""  # without --out each has its own place
    if seed != request.seed or other or whose:
        told = ", ".join([*[whose] * bool(whose), f"seed {seed}", *other])
        keep = "give --out" if request.out is None else "give another --out"
        screen.say(f"{settings.name}: replaces the result of {told} in {place}; {keep} to keep both")


def _compared(settings: dict[str, Any], place: Path) -> dict[str, Any]:
    """Settings by dotted key, without those that change no figure.

    A file beside the results is the protocol's own, wherever the folder has been moved and however it is spelled.
    """
    return {
        key: Path(value).name if isinstance(value, str) and Path(value).parent.name == place.name else value
        for key, value in flat(settings).items()
        if key not in NO_MATTER
    }


def _run(
    protocol: Evaluation, subject: Subject, data: LabelledData, context: Context, broken: Broken
) -> dict[str, float]:
    """Images that cannot be read are left out. When one is met all of its split are looked for, and it begins again:
    looking beforehand would take as long as many a protocol."""
    while True:
        left = _without(data, broken) if protocol.reads_images else data
        out = data.left_out
        for split, whole in _splits(data).items():
            out += len(whole) - len(_splits(left)[split])
            if len(whole) and not len(_splits(left)[split]):
                raise UserError(f"none of the {len(whole)} images of {whole.name} can be read: nothing to measure")
        try:
            sizes = (len(left.train), len(left.test))
            here = replace(context, left_out=out, sizes=sizes)
            figures = protocol.run(subject, left, here)
            if not here.written:
                protocol.write_result(subject, left.name, here, {"figures": figures})
                rows = [(name, f"{value:.6g}") for name, value in figures.items()]
                here.screen.table(f"{protocol.name} of {subject.name} on {left.name}", rows, ("figure", "value"))
            return figures
        except BrokenImages:
            unknown = {key: source for source in _splits(data).values() if (key := _key(source)) not in broken}
            if not unknown or data.train.labels is None:  # images that the protocol opens itself
                raise
            broken |= {key: _find_broken(source, context.screen) for key, source in unknown.items()}


def _splits(data: LabelledData) -> dict[str, Source]:
    return {"train": data.train} | ({} if data.test is data.train else {"test": data.test})


def _key(source: Source) -> str:
    """Of these images in this place: what is the training split to one protocol can be a part of it to the next."""
    return f"{source.name} {source.fingerprint()}"


def _find_broken(source: Source, screen: Screen) -> Unreadable:
    met = Unreadable()
    with screen.working(f"looking for unreadable images in {source.name}") as progress:
        for images in in_order(source, CPU, BATCH, unreadable=met):
            progress(int(images.index[-1]) + 1, len(source))
    if met.reasons:
        many = f"{len(met.reasons)} of {len(source)} images of {source.name}"
        screen.warn(f"{many} cannot be read: left out. The first is {met.first}")
    return met


def _without(data: LabelledData, broken: Broken) -> LabelledData:
    def kept(split: str) -> Source:
        source = _splits(data)[split]
        met = broken.get(_key(source)) if broken else None
        return source if met is None else readable_part(source, met.reasons)

    train = kept("train")
    return replace(data, train=train, test=train if data.test is data.train else kept("test"))


def _predictions_as_json(place: Path) -> None:
    """Predicted and true classes beside the tensors they come from, for readers without safetensors."""
    tensors = place / "predictions.safetensors"
    if tensors.exists():
        whole = {name: value for name, value in load_file(tensors).items() if not value.is_floating_point()}
        write_json(place / "predictions.json", {name: value.tolist() for name, value in whole.items()})


def _settings(protocol: type[Evaluation], overrides: list[str]) -> Evaluation:
    try:
        return protocol.model_validate(joined(overrides))
    except ValidationError as error:
        raise UserError(explain(error, protocol)) from error


def _table_of_all(
    results: dict[str, dict[str, float]],
    protocols: Mapping[str, type[Evaluation]],
    passed_over: dict[str, str],
    subject: Subject,
    request: Request,
    out: Path,
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Its rows and header, written to ``all.md`` and ``all.json`` with what was passed over."""
    folder = request.run
    data = request.data or (Run(folder).settings.data.source if folder is not None else "no data")
    data += ", held out" if request.held_out else ""  # which no figure of the paper is measured on, either
    header: tuple[str, ...] = ("protocol", "figure", "this run", *PAPER_METHODS)
    rows: list[tuple[str, ...]] = []
    for name, figures in results.items():
        for figure in (figure for figure in HEADLINES.get(name, figures) if figure in figures):
            told = ", ".join(filter(None, (figure, protocols[name].qualifier(figure, figures))))
            beside = [f"{value:.1f}" for value in published(name, figure, data)] or [""] * len(PAPER_METHODS)
            rows.append((name, told, f"{figures[figure]:.2f}", *beside))
    with_paper = any(cell for row in rows for cell in row[OWN_COLUMNS:])
    if not with_paper:
        header, rows = header[:OWN_COLUMNS], [row[:OWN_COLUMNS] for row in rows]
    lines = [f"# {subject.name} on {data}", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", *(f"Not run: {name}: {reason}" for name, reason in passed_over.items()), ""]
    if with_paper:
        lines += [
            "Columns after 'this run' are the paper's own results (ResNet-50, ImageNet, 200 epochs), for orientation."
        ]
    write_text(out / "all.md", "\n".join(lines).rstrip() + "\n")
    table = [dict(zip(header, row, strict=True)) for row in rows]
    whole = {"subject": subject.name, "data": data, "figures": results, "table": table, "not run": passed_over}
    write_json(out / "all.json", whole)
    return rows, header
