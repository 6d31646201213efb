"""The config: unknown keys, overrides, validators, and the dump that reads back as itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

import draftsmith
from draftsmith.config import Config, Section, load_config, parse_config
from draftsmith.errors import InputError

SMALLEST = "{name: run, target: {model: some/model}, train: {steps: 10}}"
ROOT = Path(__file__).parents[1]


def refusal(*overrides: str, text: str = SMALLEST) -> str:
    with pytest.raises(InputError) as caught:
        parse_config(text, "c.yaml", overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("override", "unknown", "closest"),
    [
        ("trian.steps=3", "trian", "train"),
        ("train.learning_rte=1", "train.learning_rte", "train.learning_rate"),
        ("train.setps=3", "train.setps", "train.steps"),
        ("drafter.blocksize=8", "drafter.blocksize", "drafter.block_size"),
        ("generate.max_tokens=8", "generate.max_tokens", "generate.max_new_tokens"),
        ("target.modle=x", "target.modle", "target.model"),
    ],
)
def test_unknown_key_names_the_closest(override, unknown, closest):
    assert refusal(override) == f"c.yaml: unknown key {unknown}, did you mean {closest}?"


def test_unknown_key_with_nothing_close_gives_no_hint():
    assert refusal("train.qqqq=1") == "c.yaml: unknown key train.qqqq"


def test_every_unknown_key_is_named_at_once():
    message = refusal("train.setps=1", "drafter.blocksize=2")
    assert "train.steps" in message and "drafter.block_size" in message


def test_overrides_replace_create_and_are_yaml():
    config = parse_config(
        SMALLEST,
        "c.yaml",
        [
            "name=other",
            "train.steps=null",
            "train.epochs=1.5",
            "train.learning_rate=1e-3",
            "drafter.feature_layers=[1, 3]",
            "drafter.num_features=2",
            "export.output=out=put",
            "evaluate.untrained=true",
            "evaluate.prompts=3",
            "evaluate.prompts=4",
        ],
    )
    assert (config.name, config.train.steps, config.train.epochs) == ("other", None, 1.5)
    assert config.train.learning_rate == 1e-3
    assert config.drafter.feature_layers == (1, 3)
    assert config.export.output == Path("out=put")
    assert config.evaluate.untrained is True and config.evaluate.prompts == 4  # the last one counts


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps", "must look like section.key=value"),
        ("=3", "must look like section.key=value"),
        ("name.first=x", "name is not a section"),
        ("train.steps=[1", "not valid YAML"),
    ],
)
def test_malformed_override_is_named(override, said):
    message = refusal(override)
    assert repr(override) in message and said in message


def test_missing_keys_are_named():
    message = refusal(text="{target: {}, train: {steps: 1}}")
    assert "name is missing" in message and "target.model is missing" in message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.epochs=2"], "exactly one of train.steps and train.epochs"),
        (["train.steps=null"], "exactly one of train.steps and train.epochs"),
        (["tokenize.max_tokens=4096"], "tokenize.max_tokens 4096 is more than a row holds (train.row_tokens 3072)"),
        (["drafter.layer_types=[full]"], "drafter.layer_types lists 1 layers, drafter.num_layers is 5"),
        (["drafter.layer_types=sliding"], "set drafter.sliding_window"),
        (["drafter.feature_layers=[1]"], "drafter.feature_layers lists 1 layers, drafter.num_features is 5"),
        (["drafter.block_size=1"], "drafter.block_size: "),
        (["drafter.head_dim=15"], "drafter.head_dim: "),
        (["drafter.layer_types=half"], "drafter.layer_types: "),
        (["train.steps=0"], "train.steps: "),
        (["train.steps=many"], "(given 'many')"),
        (["train.betas=[0.9, 1.0]"], "train.betas.1: "),
        (["train.seed=-1"], "train.seed: "),
        (["train.learning_rate=.inf"], "train.learning_rate: "),
        (["loss.gamma=.nan"], "loss.gamma: "),
        (["train.warmup_fraction=1"], "train.warmup_fraction: "),
        (["tokenize.heldout_fraction=1"], "tokenize.heldout_fraction: "),
        (["generate.top_p=0"], "generate.top_p: "),
        (["evaluate.rule=luck"], "evaluate.rule: "),
        (["device=tpu"], "device: "),
        (["name=../up"], "name: "),
    ],
)
def test_validators_name_the_key(overrides, said):
    message = refusal(*overrides)
    assert message.startswith("c.yaml: ") and said in message


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["tokenize.max_tokens=3072"], "tokenize.max_tokens", 3072),
        (["drafter.layer_types=sliding", "drafter.sliding_window=64"], "drafter.layer_types", "sliding"),
        (["drafter.num_layers=2", "drafter.layer_types=[full, full]"], "drafter.layer_types", ("full", "full")),
        (["train.seed=0"], "train.seed", 0),
        (["train.fp8=off"], "train.fp8", "off"),  # which YAML reads as a boolean
        (["floor.action=off"], "floor.action", "off"),
    ],
)
def test_validators_let_the_boundary_through(overrides, key, value):
    section, name = key.split(".")
    assert getattr(getattr(parse_config(SMALLEST, "c.yaml", overrides), section), name) == value


@pytest.mark.parametrize("text", ["a: [", "- a\n- b", "", "just words"])
def test_what_is_not_a_config_is_refused(text):
    assert refusal(text=text).startswith("c.yaml ")


def test_unreadable_file_is_named(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(InputError, match=str(path)):
            load_config(path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: é".encode("latin-1"))
    with pytest.raises(InputError, match=str(latin)):
        load_config(latin)


def test_dump_reads_back_as_the_same_config():
    config = parse_config(
        SMALLEST,
        "c.yaml",
        [
            "generate.prompts=a/b.jsonl",
            "train.learning_rate=1.0e-7",
            "drafter.num_layers=2",
            "drafter.layer_types=[full, sliding]",
            "drafter.sliding_window=128",
            "drafter.num_features=2",
            "drafter.feature_layers=[2, 5]",
            "loss.gamma=3",
            "train.betas=[0.8, 0.99]",
        ],
    )
    again = parse_config(config.dump(), "the dump")
    assert again == config
    assert again.dump() == config.dump()
    assert list(json.loads(config.dump())) == list(Config.model_fields)
    assert parse_config(config.dump(), "the dump", ["loss.gamma=4"]) != config


def sections(value: Section) -> list[Section]:
    children = [getattr(value, name) for name in type(value).model_fields]
    return [value, *(s for child in children if isinstance(child, Section) for s in sections(child))]


def test_frozen_everywhere():
    found = sections(parse_config(SMALLEST, "c.yaml"))
    assert len(found) == 13
    for section in found:
        name = next(iter(type(section).model_fields))
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, None)


def test_paths_follow_from_name_and_can_be_set():
    config = parse_config(SMALLEST, "c.yaml")
    assert config.conversations == Path("data/run/conversations.jsonl")
    assert config.store == Path("data/run/store")
    config = parse_config(SMALLEST, "c.yaml", ["data_dir=d", "tokenize.conversations=mine.jsonl"])
    assert (config.conversations, config.store) == (Path("mine.jsonl"), Path("d/store"))
    assert config.max_document == config.train.row_tokens
    assert parse_config(SMALLEST, "c.yaml", ["tokenize.max_tokens=99"]).max_document == 99


def test_yaml_tags_build_no_objects():
    message = refusal(text="name: !!python/object/apply:os.getcwd []")
    assert "not valid YAML" in message


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "examples").glob("*.yaml")), Path(draftsmith.__file__).with_name("demo.yaml")],
    ids=lambda p: p.name,
)
def test_what_we_ship_is_valid(path):
    assert load_config(path).name


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "examples").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_example_is_a_config(path):
    assert load_config(path).name
