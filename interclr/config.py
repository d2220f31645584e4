"""One typed configuration tree, YAML recipes that extend each other, and dotted overrides.

A typo, a wrong type or an impossible value becomes one line that names the key and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import Field, ValidationError, model_validator

from interclr.data.view_parameters import Positive, View
from interclr.intra import MethodConfig, MoCoConfig
from interclr.learner import InterConfig
from interclr.losses import MarginKind
from interclr.models import BackboneConfig
from interclr.optim import OptimiserConfig, SGDConfig
from interclr.types import Config, UserError

Count = Annotated[int, Field(ge=1)]
Auto = Literal["auto"]
Triple = tuple[float, float, float]
IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)


class DataConfig(Config):
    source: str = "synthetic"  # a built-in name, a folder, a list file or a packed store
    root: Path | None = None  # where built-in sets lie; None: $INTERCLR_DATA or ./data
    image_size: Annotated[int, Field(ge=8)] | Auto = "auto"  # side of the views
    max_side: Annotated[int, Field(ge=8)] | Auto = "auto"  # larger images are shrunk when decoded
    batch: Annotated[int, Field(ge=2)] | Auto = "auto"  # images per micro-batch, over all ranks
    resident: bool | Auto = "auto"  # keep the whole set in the memory of the device
    workers: Annotated[int, Field(ge=0)] | Auto = "auto"  # decoding processes of a streamed set
    unreadable: Literal["skip", "fail"] = "skip"  # skip: counted, named and replaced within the batch
    hold_out: Annotated[int, Field(ge=0)] = 0  # last images of a seeded shuffle kept from training, for choices
    mean: Triple = IMAGENET_MEAN
    std: tuple[Positive, Positive, Positive] = IMAGENET_STD

    def at(self, source: str | None) -> DataConfig:
        """The same of other images, or of those that have been moved there; as it is where there is no ``source``."""
        return self if source is None else self.model_copy(update={"source": source})


class ModelConfig(BackboneConfig):
    backbone: str = "auto"
    stem: Literal["standard", "strided", "small", "auto"] = "auto"  # type: ignore[assignment]
    width: Annotated[int, Field(ge=4)] | Auto = "auto"  # type: ignore[assignment]


class ScheduleConfig(Config):
    epochs: Count | Auto = "auto"
    warmup_epochs: Annotated[float, Field(ge=0)] = 0  # of the learning rate


class EngineConfig(Config):
    device: str = "auto"  # auto, cpu, cuda, cuda:1 …
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    # compile: encoders and views are compiled (a minute or two). graph: all that follows the views is one CUDA graph.
    mode: Literal["auto", "eager", "compile", "graph"] = "auto"
    channels_last: bool = True
    accumulate: Count = 1  # micro-batches per optimiser step
    deterministic: bool = True  # repeatable kernels: what makes resume bit-exact
    log_every: Count = 10  # micro-batches between lines of metrics.jsonl
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)


class CheckpointConfig(Config):
    every_epochs: Count | Auto = "auto"
    every_minutes: Annotated[float, Field(gt=0)] = 15
    keep: Count = 2


class MonitorConfig(Config):
    every_epochs: Annotated[int, Field(ge=0)] | Auto = "auto"  # k-NN and health during training; 0: only at the end
    k: Count | Auto = "auto"
    temperature: Annotated[float, Field(gt=0)] = 0.1
    limit: Count = 50_000  # training images that serve as the k-NN bank, at most


class Settings(Config):
    """The whole tree. ``interclr config RECIPE`` prints it."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    data: DataConfig = DataConfig()
    views: Annotated[tuple[View, ...], Field(min_length=1, max_length=2)] = (View(), View())
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MoCoConfig(queue="auto")
    margin: Annotated[float, Field(ge=-2, le=2)] = 0.0  # of the intra loss
    margin_kind: MarginKind = "cosine"
    inter: InterConfig | None = None
    optimiser: OptimiserConfig = SGDConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()

    @property
    def branch(self) -> InterConfig | None:
        """The inter branch; None also where λ = 1, which is exactly the plain method."""
        return self.inter if self.inter is not None and self.inter.intra_weight < 1 else None

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if len(self.views) < self.method.views_needed:
            raise ValueError(f"views: method {self.method.name} compares two views of an image; give two")
        if self.inter is not None:
            self._check_branch(self.inter)
        return self

    def _check_branch(self, inter: InterConfig) -> None:
        if inter.head == "separate" and not self.method.separate_heads:
            raise ValueError(f"inter.head: {self.method.name} keeps one bank for both branches; use shared")
        if inter.head == "separate" and inter.loss == "soft" and inter.target_view is None:
            raise ValueError(
                "inter.head: inter.loss=soft has the method's own targets, which are of its own head; use shared, or "
                "inter.target_view={}"
            )
        for key in ("soft_temperature", "soft_target_temperature"):
            if inter.loss != "soft" and getattr(inter, key) != InterConfig.model_fields[key].default:
                raise ValueError(f"inter.{key}: only soft labels have one; use inter.loss=soft")
        if inter.target_view is not None and inter.loss != "soft":
            raise ValueError("inter.target_view: only soft targets have one of their own; use inter.loss=soft")
        if inter.target_momentum != InterConfig().target_momentum:
            if inter.target_view is None:
                raise ValueError("inter.target_momentum: it is what sees inter.target_view that moves by it; give one")
            if self.method.keeps_slow_encoder:
                raise ValueError(
                    f"inter.target_momentum: {self.method.name} has a momentum encoder of its own, by which "
                    "inter.target_view is seen; use method.momentum"
                )


Tree = dict[str, Any]
GONE: dict[str, Any] = {"inter.forgiveness": 0.0, "inter.bank_view": None}  # settings of before, and what was nothing
# Where and how a run is carried out, not what it computes: keys, and sections with a dot behind them.
CARRIED_OUT = (
    *("data.root", "data.resident", "data.workers", "data.unreadable", "checkpoint."),
    *("engine.device", "engine.loggers", "engine.log_every"),
)


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Every value by its dotted key."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for key, value in tree.items() for k, v in flat(value, f"{path}.{key}" if path else key).items()}


def recipe_names() -> list[str]:
    """Every recipe that ships with the package, without the building blocks in sub-folders."""
    folder = resources.files("interclr") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_settings(recipe: str = "default", overrides: Iterable[str] = ()) -> Settings:
    """A recipe by name or YAML file, with ``a.b=c`` overrides, checked.

    Overrides are joined before they meet the recipe: of ``sampler.negatives=5 sampler.name=random``, in whatever order,
    nothing is lost when the other sampler replaces the recipe's.
    """
    return settings_from(merge(load_recipe(recipe), joined(overrides)))


def joined(overrides: Iterable[str]) -> Tree:
    """Overrides as one tree; of two for the same key the later counts."""
    changes: Tree = {}
    for override in overrides:
        changes = merge(changes, parse_override(override))
    return changes


def load_recipe(recipe: str, above: tuple[str, ...] = ()) -> Tree:
    """Read a recipe; ``extends: [a, b]`` merges those first, in order. Names may be blocks such as views/mocov2.

    ``above`` are the recipes that led here; a file named in one of them is looked for beside it.
    """
    path = Path(above[-1]).parent / recipe if above else Path(recipe)
    bundled = resources.files("interclr") / "recipes" / f"{recipe}.yaml"
    if bundled.is_file():
        text, where = bundled.read_text(), recipe
    elif path.suffix in (".yaml", ".yml") and path.is_file():
        where = str(path)
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
    else:
        close = difflib.get_close_matches(recipe, recipe_names(), 3, 0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(recipe_names())}"
        if not above and path.exists():
            hint = f"to train on the images in it write --data {recipe}"
        raise UserError(f"no recipe {recipe!r}: {hint} (or give a .yaml file)")
    try:
        own = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(own, dict):
        raise UserError(f"{where}: a recipe is a mapping of keys to values")
    if where in above:
        raise UserError(f"{where}: extends itself, by way of {' → '.join((*above, where))}")
    bases = own.pop("extends", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{where}: extends takes the name of a recipe or a list of names (got {bases!r})")
    tree: Tree = {}
    for base in bases:
        tree = merge(tree, load_recipe(base, (*above, where)))
    return merge(tree, own)


def quoted(text: str) -> str:
    """``text`` as an override has it, whatever it holds: YAML reads JSON's pairs of surrogates as two characters."""
    return '"' + "".join(f"\\U{ord(c):08x}" if ord(c) > 0xFFFF else json.dumps(c)[1:-1] for c in text) + '"'


def parse_override(text: str) -> Tree:
    """``a.b=c`` → {a: {b: c}}; the value is YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"{text!r} is not an override: write key.sub=value")
    try:
        tree: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"{key}: {value!r} is not a YAML value") from error
    for part in reversed(key.split(".")):
        tree = {part: tree}
    assert isinstance(tree, dict)
    return tree


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> Tree:
    """Mappings merge key by key; one that names another component (another ``name``) replaces the old one whole."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not _names_another(old, value):
            result[key] = merge(old, value)
        else:
            result[key] = value
    return result


def _names_another(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return "name" in old and "name" in new and old["name"] != new["name"]


def settings_from(tree: Mapping[str, Any]) -> Settings:
    try:
        return Settings.model_validate(_without_gone(tree))
    except ValidationError as error:
        raise UserError(explain(error)) from error


def _without_gone(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Runs of before have settings that are no longer there; where they did nothing, nothing is missed."""
    for key, nothing in GONE.items():
        section, _, name = key.rpartition(".")
        inner = tree.get(section)
        if isinstance(inner, Mapping) and name in inner:
            if inner[name] != nothing:
                raise UserError(
                    f"{key}: no longer there, since it did not help (CHANGELOG.md); leave it out. To use what a run "
                    "with it has learnt, take it and the lines that belong to it out of the run's resolved.yaml; "
                    "--resume cannot go on with such a run, as its checkpoint has it too: start a new one"
                )
            tree = {**tree, section: {own: value for own, value in inner.items() if own != name}}
    return tree


def dump(settings: Settings) -> str:
    """The whole tree as YAML that ``load_settings`` reads back to an equal tree."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def explain(error: ValidationError, root: type[Config] = Settings) -> str:
    """Pydantic's errors as one line per key: the dotted path, what is wrong, what is allowed."""
    lines: dict[str, list[str]] = {}
    for item in error.errors():
        path, model = _walk(item["loc"], root)
        lines.setdefault(path, [])
        if item["type"] == "extra_forbidden":
            allowed = list(model.model_fields) if model is not None else []
            last = path.rsplit(".", 1)[-1]
            elsewhere = [key for key in keys_ending_in(last, root) if key != path]  # it may be another component's
            close = elsewhere or difflib.get_close_matches(last, allowed, 1, 0.6)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            lines[path].append(f"unknown key; {hint}allowed: {', '.join(allowed)}")
        elif item["type"] == "value_error":
            lines[path].append(str(item["ctx"]["error"]))
        elif item["type"] in ("union_tag_not_found", "union_tag_invalid"):
            lines[path].append(_about_name(item["ctx"]))
        elif item["type"] == "tuple_type":
            lines[path].append(f"takes a list in brackets, such as [{item['input']}] (got {item['input']!r})")
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            lines[path].append(f"{message} (got {item['input']!r})")
    return "; ".join(f"{path}: {_joined(messages)}" if path else _joined(messages) for path, messages in lines.items())


def keys_ending_in(name: str, root: type[Config] = Settings) -> list[str]:
    """Full keys whose last part is ``name``: what somebody meant who left out the rest.

    None of those of a view: ``views`` are a list, in brackets, and whoever asks for a view's seldom means that of soft
    targets.
    """
    found = {name: None} if name in root.model_fields else {}  # a dict, since components of a union share keys
    for key, field in root.model_fields.items():
        if get_origin(field.annotation) is not tuple:
            kinds = [kind for kind in _leaves(field.annotation) if isinstance(kind, type)]
            parts = [kind for kind in kinds if issubclass(kind, Config) and kind is not View]
            found |= {f"{key}.{below}": None for part in parts for below in keys_ending_in(name, part)}
    return list(found)


def _about_name(context: Mapping[str, Any]) -> str:
    """Of a component whose name is missing, or is none of those known."""
    expected, given = str(context.get("expected_tags", "")), context.get("tag")
    if given is None:
        return f"needs a name, one of {expected}".rstrip()
    close = difflib.get_close_matches(str(given), re.findall(r"'([^']+)'", expected), 1, 0.6)
    return f"no {given!r}; " + (f"did you mean {close[0]}? " if close else "") + f"there are {expected}"


def _joined(messages: list[str]) -> str:
    """Alternatives of a union share the value they got: say it once."""
    got = {message.rpartition(" (got ")[2] for message in messages}
    if len(messages) > 1 and len(got) == 1 and all(" (got " in message for message in messages):
        return " or ".join(message.rpartition(" (got ")[0] for message in messages) + f" (got {got.pop()}"
    return " or ".join(messages)


def _walk(location: tuple[int | str, ...], root: type[Config]) -> tuple[str, type[Config] | None]:
    """The dotted path a user would write, and the model that owns its last key: drops pydantic's union tags."""
    path: list[str] = []
    owner: type[Config] | None = None
    candidates: list[Any] = [root]
    for part in location:
        if isinstance(part, int):
            path.append(str(part))
            continue
        owners = [c for c in candidates if isinstance(c, type) and issubclass(c, Config)]
        tagged = [c for c in owners if "name" in c.model_fields and c.model_fields["name"].default == part]
        holding = [c for c in owners if part in c.model_fields]
        if holding:
            owner = holding[0]
            path.append(part)
            candidates = [leaf for c in holding for leaf in _leaves(c.model_fields[part].annotation)]
        elif tagged and len(owners) > 1:
            candidates = tagged
            owner = tagged[0]
        elif owners:
            owner = owners[0] if len(owners) == 1 else owner
            path.append(part)
            candidates = []
    return ".".join(path), owner


def _leaves(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Annotated, Union, tuple, list) or type(annotation).__name__ == "UnionType":
        return [leaf for argument in get_args(annotation) for leaf in _leaves(argument)]
    return [annotation]
