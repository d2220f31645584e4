from __future__ import annotations

import re
from importlib import resources
from itertools import permutations
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from interclr.config import (
    Settings,
    dump,
    keys_ending_in,
    load_recipe,
    load_settings,
    merge,
    parse_override,
    recipe_names,
)
from interclr.types import UserError

RECIPES = Path(str(resources.files("interclr") / "recipes"))
BLOCKS = sorted(str(path.relative_to(RECIPES))[:-5] for path in RECIPES.glob("*/*.yaml"))


def error_of(*overrides: str, recipe: str = "default") -> str:
    """The message a user sees; always one line, without pydantic's links."""
    with pytest.raises(UserError) as caught:
        load_settings(recipe, overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert "pydantic" not in text
    return text


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_survives_dump_and_reload(name: str, tmp_path: Path) -> None:
    settings = load_settings(name)
    file = tmp_path / "dumped.yaml"
    file.write_text(dump(settings))
    assert load_settings(str(file)) == settings
    assert set(yaml.safe_load(file.read_text())) == set(Settings.model_fields)


def test_recipe_names_are_the_files_and_leave_blocks_out() -> None:
    assert recipe_names() == sorted(path.stem for path in RECIPES.glob("*.yaml"))
    assert "default" in recipe_names()
    assert not any("/" in name for name in recipe_names())


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_a_valid_part(block: str) -> None:
    tree = load_recipe(block)
    assert tree
    assert tree.keys() <= Settings.model_fields.keys()
    if not block.startswith("views/npidv2"):
        load_settings(block)
    else:
        load_settings(block, ["method.name=npidv2"])


def test_a_recipe_extends_others_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 1\nmonitor: {k: 3, temperature: 0.5}\n")
    (tmp_path / "b.yaml").write_text("seed: 2\n")
    (tmp_path / "c.yaml").write_text("extends: [a.yaml, b.yaml, blocks/inter-auto]\nmonitor: {k: 9}\n")
    settings = load_settings(str(tmp_path / "c.yaml"))
    assert settings.seed == 2
    assert (settings.monitor.k, settings.monitor.temperature) == (9, 0.5)
    assert settings.inter is not None
    assert settings.inter.margin == -0.5


def test_overrides_are_yaml_and_later_ones_win() -> None:
    settings = load_settings("default", ["seed=3", "seed=4", "optimiser.betas=[0.8, 0.9]", "data.root=/somewhere"])
    assert settings.seed == 4
    assert settings.optimiser.name == "adamw"
    assert settings.optimiser.betas == (0.8, 0.9)
    assert settings.data.root == Path("/somewhere")
    assert load_settings("mocov2-interclr", ["inter=null"]).inter is None
    assert load_settings("default", ["optimiser.base_lr=1e-3"]).optimiser.base_lr == 1e-3
    assert load_settings("default", ["data.source=a=b"]).data.source == "a=b"


def test_an_override_that_names_another_component_replaces_it_whole() -> None:
    settings = load_settings("default", ["optimiser.name=sgd"])  # adamw's betas and rate must not leak into it
    assert settings.optimiser.model_dump() == type(settings.optimiser)().model_dump()
    kept = load_settings("default", ["optimiser.name=adamw"])
    assert kept == load_settings("default")


@pytest.mark.parametrize("order", list(permutations(["negatives=512", "pool_fraction=0.2", "name=semi_easy"])))
def test_the_order_of_overrides_does_not_matter_when_one_names_a_component(order: tuple[str, ...]) -> None:
    inter = load_settings("mocov2-interclr", [f"inter.sampler.{each}" for each in order]).inter
    assert inter is not None
    told = inter.sampler.model_dump()
    assert (told["name"], told["negatives"], told["pool_fraction"]) == ("semi_easy", 512, 0.2)


def test_a_component_that_does_not_exist_and_a_folder_for_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"inter\.sampler: no 'semihard'; did you mean semi_hard\?"):
        load_settings("mocov2-interclr", ["inter.sampler.name=semihard"])
    with pytest.raises(UserError, match="write --data"):
        load_settings(str(tmp_path))


names = st.sampled_from(["name", "a", "b"])
trees = st.recursive(
    st.integers(0, 3), lambda children: st.dictionaries(names, children, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


@given(trees, trees)
def test_merge_against_its_rule(base: dict[str, object], change: dict[str, object]) -> None:
    before = repr(base), repr(change)
    merged = merge(base, change)
    assert (repr(base), repr(change)) == before
    assert merged.keys() == base.keys() | change.keys()
    for key, value in merged.items():
        old, new = base.get(key), change.get(key)
        if key not in change:
            assert value == old
        elif not (isinstance(old, dict) and isinstance(new, dict)) or (
            "name" in old and "name" in new and old["name"] != new["name"]
        ):
            assert value == new
        else:
            assert value == merge(old, new)
    assert merge(merged, change) == merged
    assert merge(base, {}) == base


def test_parse_override() -> None:
    assert parse_override("a.b.c=[1, x]") == {"a": {"b": {"c": [1, "x"]}}}
    assert parse_override("a=") == {"a": None}
    for bad in ("a.b", "=3", ""):
        with pytest.raises(UserError, match=r"key\.sub=value"):
            parse_override(bad)


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("optimiser.base_lrr=1", "optimiser.base_lrr", ["did you mean base_lr?", "weight_decay", "betas"]),
        ("scedule.epochs=3", "scedule", ["did you mean schedule?", "monitor"]),
        ("data.batchh=3", "data.batchh", ["did you mean batch?", "image_size"]),
        ("method.quue=3", "method.quue", ["did you mean queue?", "temperature"]),
        ("inter.sampler={name: hard, negatives: 4, pol: 1}", "inter.sampler.pol", ["allowed", "negatives"]),
        ("data.batch=many", "data.batch", ["integer", "'auto'", "got 'many'"]),
        ("data.batch=0", "data.batch", ["greater than or equal to 2", "got 0"]),
        ("data.batch=1", "data.batch", ["greater than or equal to 2"]),
        ("data.batch=2.5", "data.batch", ["integer"]),
        ("seed=-1", "seed", ["greater than or equal to 0"]),
        ("seed=99999999999999999999", "seed", ["less than 4294967296"]),
        ("optimiser.base_lr=0", "optimiser.base_lr", ["greater than 0"]),
        ("optimiser.base_lr=.inf", "optimiser.base_lr", ["finite"]),
        ("optimiser.base_lr=.nan", "optimiser.base_lr", ["finite"]),
        ("optimiser.betas=[0.9, 1.0]", "optimiser.betas.1", ["less than 1"]),
        ("optimiser.weight_decay=-1", "optimiser.weight_decay", ["greater than or equal to 0"]),
        ("optimiser.name=adam", "optimiser", ["'sgd'", "'lars'", "'adamw'"]),
        ("method.name=moco", "method", ["'mocov2'", "'byol'"]),
        ("inter.labels.name=offlin", "inter.labels", ["'online'", "'offline'"]),
        ("inter.clusters=1", "inter.clusters", ["greater than or equal to 2"]),
        ("inter.intra_weight=1.5", "inter.intra_weight", ["less than or equal to 1"]),
        ("engine.precision=fp8", "engine.precision", ["'fp32'", "'bf16'", "'fp8'"]),
        ("engine.mode=3", "engine.mode", ["'eager'", "'compile'"]),
        ("engine.loggers=[tensorboard, wandbb]", "engine.loggers.1", ["'wandb'"]),
        ("engine.loggers=tensorboard", "engine.loggers", ["list in brackets", "[tensorboard]"]),
        ("engine.channels_last=maybe", "engine.channels_last", ["boolean"]),
        ("views=[]", "views", ["at least 1"]),
        ("views=[{}, {flip: 2}]", "views.1.flip", ["less than or equal to 1"]),
        ("views=[{}, {flipp: 1}]", "views.1.flipp", ["did you mean flip?"]),
        ("views=[{}]", "views", ["mocov2", "two"]),
        ("views=[{crop_scale: [1.0, 0.2]}, {}]", "views.0.crop_scale", ["(low, high)"]),
        ("data=3", "data", ["got 3"]),
        ("data.std=[0, 1, 1]", "data.std.0", ["greater than 0"]),
        ("data.mean=[0, 1]", "data.mean.2", ["required", "got [0, 1]"]),
        ("data.unreadable=ignore", "data.unreadable", ["'skip'", "'fail'"]),
        ("model.width=2", "model.width", ["greater than or equal to 4"]),
        ("model.stem=tiny", "model.stem", ["'small'"]),
        ("seed=[", "seed", ["YAML"]),
        ("seed.x=3", "seed", ["integer"]),
        ("margin=5", "margin", ["less than or equal to 2"]),
    ],
)
def test_a_wrong_override_names_the_key_and_what_is_allowed(override: str, key: str, says: list[str]) -> None:
    message = error_of(override)
    assert message.startswith(f"{key}: "), message
    for text in says:
        assert text in message


def test_two_mistakes_are_both_named_in_one_line() -> None:
    message = error_of("data.batch=0", "engine.devise=cpu")
    assert "data.batch: " in message
    assert "engine.devise: " in message
    assert "did you mean device?" in message


def test_where_one_head_is_needed_two_are_refused() -> None:
    assert error_of("inter.head=separate", recipe="npidv2-interclr").startswith("inter.head: ")
    assert error_of("inter.head=separate", "inter.loss=soft", recipe="mocov2-interclr").startswith("inter.head: ")
    assert error_of("inter.target_view={}", recipe="mocov2-interclr").startswith("inter.target_view: ")
    own = ("inter.loss=soft", "inter.target_view={}")
    assert load_settings("mocov2-interclr", ["inter.head=separate", *own]).inter is not None


def test_temperatures_of_what_is_not_soft_are_refused() -> None:
    for key in ("soft_temperature", "soft_target_temperature"):
        assert error_of(f"inter.{key}=0.3", recipe="mocov2-interclr").startswith(f"inter.{key}: only soft labels ")
        assert load_settings("mocov2-interclr", [f"inter.{key}=0.3", "inter.loss=soft"]).inter is not None


def test_nobody_is_sent_to_the_view_of_soft_targets() -> None:
    assert keys_ending_in("blur") == []
    assert keys_ending_in("target_view") == ["inter.target_view"]
    assert "target_view" not in error_of("flip=0", recipe="mocov2")


def test_a_momentum_that_moves_nothing_is_refused() -> None:
    own, moved = ("inter.loss=soft", "inter.target_view={}"), "inter.target_momentum=0.5"
    assert load_settings("npidv2-interclr", [*own, moved]).inter is not None
    assert error_of(*own, moved, recipe="mocov2-interclr").startswith("inter.target_momentum: mocov2 has a momentum ")
    assert error_of("inter.loss=soft", moved, recipe="npidv2-interclr").startswith("inter.target_momentum: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1,", "not valid YAML"),
        ("- a\n- b\n", "mapping"),
        ("just words", "mapping"),
        ("sead: 3", "did you mean seed?"),
        ("1: 2", "1: "),
        ("optimiser: {base_lr: 1}", "optimiser: needs a name"),
        ("extends: nothing-like-it", "no recipe 'nothing-like-it'"),
        ("extends: 3", "extends"),
        ("extends: [{a: b}]", "extends"),
        ("extends: own.yaml", "extends itself"),
        ("extends: other.yaml", "extends itself"),
    ],
)
def test_a_broken_recipe_file(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text("extends: own.yaml")
    assert says in error_of(recipe=str(tmp_path / "own.yaml"))


def test_a_recipe_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00seed")
    assert "a.yaml" in error_of(recipe=str(tmp_path / "a.yaml"))


def test_an_empty_recipe_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_settings(str(tmp_path / "empty.yaml")) == Settings()


def test_an_unknown_recipe_suggests_near_ones_or_lists_all() -> None:
    assert re.search(r"no recipe 'mocv2': did you mean .*\bmocov2\b", error_of(recipe="mocv2"))
    message = error_of(recipe="zzzzzz")
    assert all(name in message for name in recipe_names())


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().seed = 3  # type: ignore[misc]


def test_settings_that_are_gone_are_missed_only_where_they_did_something(tmp_path: Path) -> None:
    old, kept = tmp_path / "resolved.yaml", "  margin_kind: cosine\n  warmup_epochs"
    text = dump(load_settings("mocov2-interclr"))
    assert kept in text
    gone = "  margin_kind: cosine\n  forgiveness: 0.0\n  bank_view: null\n  warmup_epochs"
    old.write_text(text.replace(kept, gone))
    assert load_settings(str(old)) == load_settings("mocov2-interclr")
    with pytest.raises(UserError, match=r"^inter\.forgiveness: no longer there, since it did not help"):
        load_settings("mocov2-interclr", ["inter.forgiveness=2"])
    gone = "  margin_kind: cosine\n  bank_view:\n    crop_scale: [0.2, 1]\n    flip: 0.5\n  warmup_epochs"
    old.write_text(text.replace(kept, gone))
    with pytest.raises(UserError, match=r"^inter\.bank_view: .* the lines that belong to it out .*; --resume cannot"):
        load_settings(str(old))
