from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from facetrain.backbone.zoo import names
from facetrain.config import strict_yaml as yaml
from facetrain.config.loading import build_config, dump_config, load_config
from facetrain.config.schema import BackboneName
from facetrain.errors import ConfigError


def write(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_file_extends_another_and_set_wins_over_both(tmp_path):
    write(tmp_path, "data: {train: base}\noptim: {lr: 0.3, momentum: 0.8}\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\noptim: {lr: 0.2}\n")
    config = load_config(path, ["optim.weight_decay=1e-4", "train.max_steps=5"])
    assert config.data.train == "base"
    assert (config.optim.lr, config.optim.momentum, config.optim.weight_decay) == (0.2, 0.8, 1e-4)
    assert config.train.max_steps == 5


def test_the_recipe_fills_in_what_the_file_leaves_open_and_nothing_else(tmp_path):
    published = load_config(write(tmp_path, "data: {train: x}"))
    assert (published.optim.power, published.head.margin.gradient) == (2.0, "exact")
    present = load_config(write(tmp_path, "data: {train: x}"), ["recipe=head"])
    assert (present.optim.power, present.head.margin.gradient) == (1.0, "straight_through")
    assert present.head.margin.beyond_pi == "none"
    own = load_config(write(tmp_path, "{data: {train: x}, recipe: head, optim: {power: 3}}"))
    assert (own.optim.power, own.head.margin.beyond_pi) == (3.0, "none")


def test_every_fault_is_told_at_once_with_what_was_given(tmp_path):
    path = write(
        tmp_path, "data: {train: x}\noptim: {weight_decy: 1, lr: -1}\nhead: {sample_rate: 2}\nepochs: 3\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    said = str(caught.value)
    assert "optim.weight_decy is not a key; did you mean weight_decay?" in said
    assert "optim.lr: input should be greater than 0, not -1" in said
    assert "head.sample_rate: input should be less than or equal to 1, not 2" in said
    assert "epochs is not a key" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: {train: x}\noptim: {lr: 1, lr: 2}", "line 2: the key lr stands twice"),
        ("data: !!python/object/apply:os.system ['true']", "line 1: could not determine a constructor"),
        ("a: &a [1]\nb: *a", "an alias"),
        ("[1, 2]", "holds a list, not `key: value` lines"),
        ("# nothing", "is empty"),
        ("data: {train: x", "line 1"),
        ("1: 2", "the key 1 is not a word"),
        ("seed: 3", "data is missing"),
        ("data: {train: x}\nmodel: {backbone: iresnet}", "needs layers and widths"),
        ("data: {train: x}\ntrain: {batch_size: 1, global_batch_size: 2}", "not both"),
        ("data: {train: x}\nhead: {margin: {type: arcface, m1: 1.35}}", "take type combined"),
        ("data: {train: x}\nmodel: {backbone: r51}", 'backbone: "r51" does not exist; did you mean r50?'),
        ("data: {train: x}\nmodel: {backbone: swin}", "'resnet152' or 'iresnet', not \"swin\""),
        ("extends: run.yaml", "extends itself"),
        ("extends: none.yaml", "No such file"),
        ("extends: .", "is no file"),
    ],
)
def test_a_wrong_file_gives_one_line_that_says_where(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_the_backbones_that_a_config_may_name_are_those_that_can_be_built():
    assert list(get_args(BackboneName)) == names()


def test_a_file_that_is_not_there_is_told_with_those_of_like_names(tmp_path):
    write(tmp_path, "data: {train: x}")
    with pytest.raises(ConfigError, match=f"No such file or directory; did you mean {tmp_path}/run.yaml[?]"):
        load_config(tmp_path / "runs.yaml")


def test_a_device_is_not_read_to_its_end(tmp_path):
    with pytest.raises(ConfigError, match="/dev/zero: is no file"):
        load_config(write(tmp_path, "extends: /dev/zero"))


def test_a_wrong_override_is_named(tmp_path):
    path = write(tmp_path, "data: {train: x}")
    for override in ("optim.lr", "=3", "optim..lr=3", "optim.lr=[1", "optim.lr=-1", "optim.rate=1"):
        with pytest.raises(ConfigError, match="--set"):
            load_config(path, [override])


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    assert yaml.parse("[5e-4, 1E6, -2e+3, 0.1]", "x") == [5e-4, 1e6, -2e3, 0.1]


def test_a_dumped_config_reads_back_the_same(tmp_path):
    config = load_config(
        write(tmp_path, "data: {train: x}"), ["checkpoint.async=false", "eval.targets=[a, b]"]
    )
    again = load_config(write(tmp_path, dump_config(config), "again.yaml"))
    assert again == config
    assert again.checkpoint.asynchronous is False


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_no_text_does_more_than_parse_or_fail_with_the_documented_error(text):
    try:
        value = yaml.parse(text, "x")
        build_config(value if isinstance(value, dict) else {}, "x")
    except ConfigError:
        pass


SECTIONS = ["run", "data", "model", "head", "optim", "train", "eval", "checkpoint", "log", "recipe", "extra"]
KEYS = [
    "train",
    "backbone",
    "margin",
    "lr",
    "batch_size",
    "async",
    "layers",
    "widths",
    "targets",
    "lr_factors",
    "x",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from(SECTIONS), VALUES, max_size=5))
def test_no_values_do_more_than_make_a_config_or_fail_with_one_line(values):
    try:
        config = build_config(values, "x")
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert build_config(yaml.parse(dump_config(config), "x"), "x") == config
