from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from facetrain.config.loading import (
    build_config,
    dump_config,
    is_set,
    load_config,
    override_keys,
    plain_config,
    values_of_overrides,
)
from facetrain.errors import ConfigError, UsageError
from facetrain.run.request import as_override
from facetrain.strict_yaml import dump_in_line, dump_yaml, parse_yaml


def write(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_set_overrides_a_file_which_overrides_the_file_that_it_extends(tmp_path):
    write(tmp_path, "data: {train: base}\noptim: {lr: 0.3, momentum: 0.8}\n", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\noptim: {lr: 0.2}\n")
    config = load_config(path, ["optim.weight_decay=1e-4", "train.max_steps=5"])
    assert config.data.train == "base"
    assert (config.optim.lr, config.optim.momentum, config.optim.weight_decay) == (0.2, 0.8, 1e-4)
    assert config.train.max_steps == 5


def test_the_recipe_gives_the_defaults_of_its_keys_only(tmp_path):
    published = load_config(write(tmp_path, "data: {train: x}"))
    assert (published.optim.power, published.head.margin.gradient) == (2.0, "exact")
    present = load_config(write(tmp_path, "data: {train: x}"), ["recipe=head"])
    assert (present.optim.power, present.head.margin.gradient) == (1.0, "straight_through")
    own = load_config(write(tmp_path, "{data: {train: x}, recipe: head, optim: {power: 3}}"))
    assert (own.optim.power, own.head.margin.gradient) == (3.0, "straight_through")


def test_all_faults_are_reported_together_with_what_was_given(tmp_path):
    path = write(
        tmp_path, "data: {train: x}\noptim: {weight_decy: 1, lr: -1}\nhead: {sample_rate: 2}\nepochs: 3\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert "optim.weight_decy is not a key; did you mean weight_decay?" in message
    assert "optim.lr: " in message and "not -1" in message
    assert "head.sample_rate: " in message and "not 2" in message
    assert "epochs is not a key" in message
    assert "\n" not in message


FIXED = "fixed for this backbone; leave the key out, or choose one of"
INVALID_TOGETHER = {
    "model: {backbone: iresnet}": "iresnet: layers and widths must be given",
    "model: {layers: [1, 1, 1, 1]}": f"r50: layers: {FIXED} mbf_small",
    "model: {backbone: mbf, widths: [8, 8, 8, 8]}": f"mbf: widths: {FIXED} iresnet",
    "model: {backbone: mbf, layers: [1, 1, 1]}": "layers must have four numbers, not 3",
    "model: {backbone: mbf, layers: [0, 1, 1, 1]}": "the first of a MobileFaceNet needs at",
    "model: {init_blocks: first}": "init_blocks: first needs init_from",
    "train: {batch_size: 1, global_batch_size: 2}": "not both",
    "head: {margin: {type: arcface, m1: 1.35}}": "use type combined",
    "optim: {final_factor: 0.1}": "optim: final_factor needs schedule cosine",
    "model: {backbone: r51}": "backbone: r51 does not exist; did you mean r50?",
    "model: {backbone: swin}": "backbone: swin does not exist; use one of r18, r34, ",
}
"""Invalid lines of a config that names its data, and what the message says."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {train: x}\noptim: {lr: 1, lr: 2}", "line 2: duplicate key lr"),
        ("data: !!python/object/apply:os.system ['true']", "line 1: tags (!name) are not allowed"),
        ("data: {train: x}\noptim: !!set {lr, wd}", "line 2: tags (!name) are not allowed"),
        ("a: &a [1]\nb: *a", "line 2: aliases (*name) are not allowed"),
        ("[1, 2]", "is a list, but a config has `key: value` lines"),
        ("# nothing", "is empty"),
        ("data: {train: x", "line 1: expected ',' or '}'"),
        ("1: 2", "the key 1 is not text"),
        ("seed: 3", "data is missing"),
        ("extends: run.yaml", "extends itself"),
        (
            "extends: quickstart",
            "no such file; `extends` takes a file; `facetrain config show PRESET > FILE`",
        ),
        ("extends: .", "is not a file"),
        *((f"data: {{train: x}}\n{line}", message) for line, message in INVALID_TOGETHER.items()),
    ],
)
def test_an_invalid_file_gives_one_line_that_names_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("eval: {targets: lfw}", ["eval.targets", '"lfw"']),
        ("run: {name: a b}", ["run.name", '"a b"']),
        ("optim: {lr: fast}", ["optim.lr", '"fast"']),
        ("optim: {lr: .inf}", ["optim.lr", "Infinity"]),
        (
            "{optim: {warmup_epochs: 1.0e+308}, train: {timeout_s: 1.0e+300}}",
            ["optim.warmup_epochs", "train.timeout_s"],
        ),
        ("optim: {betas: [0.9]}", ["optim.betas[1]"]),
        (
            "data: {train: x, num_classes: 99999999999999999}",
            ["data.num_classes", "less than or equal to 1099511627776"],
        ),
        # An empty text is neither a path nor null.
        ('model: {init_from: "", lora: {rank: 2}}', ["model.init_from", '""']),
        ('data: {train: "", cache: ""}', ["data.train", "data.cache", '""']),
        ('distill: {teacher: "", cache: ""}', ["distill.teacher", "distill.cache", '""']),
        ('{run: {dir: ""}, eval: {dir: "", targets: [""]}}', ["run.dir", "eval.dir", "eval.targets[0]"]),
        ("optim: {betas: [0.9, 2]}", ["optim.betas[1]", "less than 1", "2"]),
        ("optim: {schedule: stairs}", ["optim.schedule", "stairs", "polynomial, cosine"]),
        ("optim: 3", ["optim: ", "3"]),
        ("data: {train: x, workers: many}", ["data.workers: ", "integer", "'auto'", '"many"']),
        ("train: {compile: maybe}", ["train.compile", "'off', 'on' or 'reduce-overhead'", '"maybe"']),
        ("model: {layers: [1, -1]}", ["model.layers[1]", "-1"]),
        (
            "model: {widths: [8, 65537], embedding_size: 65537}",
            ["model.widths[1]", "model.embedding_size", "65536"],
        ),
        ("optim: {lr: on}", ["optim.lr", "true is a truth value"]),
        ("run: {name: off}", ["run.name", "a valid string, not false; put the text in quotes"]),
        ("run: {name: 2024-12-01}", ["run.name", "string, not 2024-12-01; put the text in quotes"]),
        ("run: {name: 12}", ["run.name", "string, not 12; put the text in quotes"]),
        ("eval: {targets: lfw}", ['eval.targets: Input should be a list, such as [a, b], not "lfw"']),
        ("data: {train: x, augment: {blur: yes}}", ["data.augment.blur", "true is a truth value"]),
        ("data: {train: x, workers: off}", ["data.workers", "false is a truth value"]),
        ("data: {train: x, augment: {low_resolution_sizes: [8, 1025]}}", ["low_resolution_sizes[1]", "1025"]),
        ("optim: {schedule: steps, milestones: [on, 2]}", ["optim.milestones", "true is a truth value"]),
        ("model: {lr_factors: {a: on}}", ["model.lr_factors", "true is a truth value"]),
        (
            "checkpoint: {asynchronous: false}",
            ["checkpoint.asynchronous is not a key; the keys are", "async"],
        ),
        ("head: {margin: {type: adaface, m2: 0}}", ["m2 must be greater than 0 for adaface"]),
        ("head: {margin: {m2: 28.65}}", ["head.margin.m2: 28.65 is more", "28.65 degrees are 0.5"]),
        ("head: {margin: {type: cosface, m3: 20}}", ["head.margin.m3", "less than or equal to 2, not 20"]),
        ("model: {lr_factors: {fc: -2}}", ["model.lr_factors.fc", "-2"]),
        ("head: {placment: disk}", ["head.placment is not a key; did you mean placement?"]),
        ("head: {x: 3}", ["head.x is not a key; the keys are init_from, margin, "]),
        ("optim: {learning_rate: 1}", ["optim.learning_rate is not a key; did you mean optim.lr?"]),
        ("optim: {epochs: 1}", ["optim.epochs is not a key; did you mean train.epochs?"]),
        ("data: {train: x, workers: [4]}", ["data.workers: ", "[4]"]),
        ("log: {sinks: [{type: 3}]}", ["log.sinks[0]", "3"]),
        (
            "log: {sinks: [{type: 'a:b', foo: 1}]}",
            ["log.sinks[0].foo is not a key; the keys are type, options"],
        ),
        ("train: {async: true}", ["train.async is not a key; did you mean checkpoint.async?"]),
        ("lr: 1", ["lr is not a key; did you mean optim.lr?"]),
        ('optim: {"a\\nb": 1}', ["optim.a\\nb is not a key"]),
        ("batch_size: 1", ["batch_size is not a key; did you mean train.batch_size or eval.batch_size?"]),
        ("distill: {teacher: y, weight: -1, teachr: 3}", ["distill.weight", "-1", "teachr", "mean teacher?"]),
        (
            "train: {stages: [{until_epoch: 1, batch_siz: 3}]}",
            ["train.stages[0].batch_siz", "mean batch_size?"],
        ),
        *(
            (f"model: {{backbone: {name}}}", ["model.backbone", name, f"did you mean {ours}?"])
            for name, ours in {
                "iresnet50": "r50",
                "IR_100": "r100",
                "ir-50": "ir50",
                "resnet_50": "resnet50",
                "resnet-50": "resnet50",
            }.items()
        ),
    ],
)
def test_an_invalid_value_is_reported_with_its_key_what_was_given_and_what_is_allowed(line, names):
    values = {"data": {"train": "x"}} | parse_yaml(line)
    with pytest.raises(ConfigError) as caught:
        build_config(values, "x")
    assert str(caught.value).startswith("x: ") and "\n" not in str(caught.value)
    assert not [name for name in names if name not in str(caught.value)], str(caught.value)


def test_a_text_that_is_no_name_is_not_refused_for_having_no_keys_as_well():
    with pytest.raises(ConfigError) as caught:
        build_config({"data": {"train": "x"}, "log": {"sinks": ["mlflow", "b:c", 3]}}, "x")
    refused = str(caught.value)
    assert refused.count("log.sinks[0]") == 1 and "mlflow does not exist; use one of wandb" in refused
    assert "log.sinks[1]" not in refused and "log.sinks[2]" in refused


def test_keys_that_are_wrong_are_not_refused_for_being_no_text_as_well():
    for sink, fault in (
        ({"type": "b:c", "option": {}}, "log.sinks[0].option is not a key; did you mean options?"),
        ({}, "log.sinks[0].type is missing"),
    ):
        with pytest.raises(ConfigError) as caught:
            build_config({"data": {"train": "x"}, "log": {"sinks": [sink]}}, "x")
        assert str(caught.value) == f"x: {fault}"
    with pytest.raises(ConfigError, match=r"run\.name: .*string, not \{"):
        build_config({"data": {"train": "x"}, "run": {"name": {"a": 1}}}, "x")


def test_the_sets_of_a_dataset_in_one_file_are_in_its_folder(tmp_path):
    (tmp_path / "faces.new").touch()
    (tmp_path / "faces.lmdb").mkdir()
    folders = {"faces.new": ".", "faces.tar": ".", "faces.v2": "faces.v2", "faces.lmdb": "faces.lmdb"}
    for train, folder in folders.items():
        config = build_config({"data": {"train": f"{tmp_path}/{train}"}}, "x")
        assert Path(config.eval_dir) == tmp_path / folder


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("data:\n\ttrain: x", 2), ("data: {train: x}}", 1), ("  a: 1\n b: 2", 2), ("data: train: x", 1),
        ("a: 1\nb: \"x\\0y\"", 2), ('a: "\\ud800"', 1), (f"seed: 0x{'f' * 4000}", 1),
        ("a: 1\nb: 020", 2), ("a: 1:30", 1),
        ("a: 1:30.5", 1), ("a: [1, 2\nb: 3", 2), ("a: 1\n---\nb: 2", 2), ("!!python/name:os.system ''", 1),
        ("a: 1\nb: !!binary /w==", 2), ("a: !!str 1", 1), ("a: [! 1]", 1), ("!!omap []", 1),
    ],
)  # fmt: skip
def test_invalid_yaml_is_refused_with_the_line(text, line):
    with pytest.raises(ValueError, match=f"^line {line}: "):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["a: 2024-13-45", "a: \x00", "[" * 5000])
def test_yaml_that_the_library_fails_on_is_refused(text):
    with pytest.raises(ValueError):
        parse_yaml(text)


def test_a_preset_is_found_by_name_and_a_file_of_that_name_wins_but_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").mkdir()  # as in `runs/` after a run of this preset
    assert load_config(Path("quickstart")).run.name == "quickstart"
    write(tmp_path, "data: {train: x}\nrun: {name: mine}", "ms1mv3_r50")
    assert load_config(Path("ms1mv3_r50")).run.name == "mine"


@pytest.mark.parametrize("path", ["glint360k", "glint360k.yaml", "configs/glint360k.yaml"])
def test_a_preset_is_found_by_its_file_name_from_any_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named, published = load_config(Path(path)), load_config(Path("glint360k_r100"))
    assert named.run.name == "glint360k" and named.model_copy(update={"run": published.run}) == published


def test_a_file_in_another_folder_is_not_taken_for_a_preset(tmp_path):
    with pytest.raises(ConfigError, match="quickstart.yaml"):
        load_config(tmp_path / "quickstart.yaml")


def test_an_ambiguous_or_misspelled_preset_is_reported_with_the_names():
    with pytest.raises(ConfigError, match="wf12m_mbf, wf12m_pfc02_r100, wf12m_r100, wf12m_r50$"):
        load_config(Path("wf12m"))
    with pytest.raises(ConfigError, match="quickstrat: .* quickstart[?]"):
        load_config(Path("quickstrat"))
    with pytest.raises(ConfigError, match="unknown: .*facetrain config list"):
        load_config(Path("unknown"))


def test_a_missing_file_is_reported_with_similar_names_and_a_device_is_not_read(tmp_path):
    path = write(tmp_path, "extends: /dev/zero")
    with pytest.raises(ConfigError, match=f"{path}[?]"):
        load_config(tmp_path / "runs.yaml")
    with pytest.raises(ConfigError, match="/dev/zero"):
        load_config(path)


def test_the_command_for_a_config_of_arcface_torch_works_in_a_shell(tmp_path):
    path = write(tmp_path, "config = edict()", "r50 of $me.py")
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert f"`facetrain config convert '{path}' > 'r50 of $me.yaml'`" in str(refused.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.name=1234567", "1234567"),
        ("run.name= 12e4567", "12e4567"),
        ("run.name=12 # the twelfth", "12"),
        ("run.name=2024-11-28", "2024-11-28"),
        ("run.name=on", "on"),
        ("run.name='7'", "7"),
        ("model.init_from=20241128", "20241128"),
        ("model.init_from=null", None),
        ("seed=7", 7),
    ],
)
def test_a_key_that_holds_a_text_takes_what_yaml_reads_as_another_value(tmp_path, override, expected):
    path = tmp_path / "run.yaml"
    path.write_text("data: {train: faces}\n")
    value = plain_config(load_config(path, [override]))
    for key in override.partition("=")[0].split("."):
        value = value[key]
    assert value == expected


def test_an_invalid_override_is_named(tmp_path):
    path = write(tmp_path, "data: {train: x}")
    for override in ("optim.lr", "=3", "optim..lr=3", "optim.lr=[1", "optim.lr=-1", "optim.rate=1"):
        with pytest.raises(ConfigError, match="--set|the command line"):
            load_config(path, [override])


def test_an_empty_mapping_removes_what_the_file_below_has(tmp_path):
    model = "model: {backbone: timm/x, options: {a: 1}, lr_factors: {a: 0.1}, init_from: y, lora: {rank: 4}}"
    write(tmp_path, f"data: {{train: x}}\n{model}\noptim: {{muon: {{lr: 0.01}}}}", "base.yaml")
    path = write(tmp_path, "extends: base.yaml\nmodel: {lr_factors: {}, options: {}}\noptim: {}")
    config = load_config(path, ["optim.muon={}", "model.lora={}"])
    assert (
        config.model.lora.rank != 4
        and not config.model.lr_factors
        and not config.model.options
        and config.optim.muon.lr != 0.01
    )
    assert load_config(path, ["optim={}"]).optim.muon.lr == 0.01


def test_the_keys_of_a_section_that_is_set_are_those_in_it():
    keys = override_keys(
        [
            "optim={lr: 1, muon: {lr: 2}}",
            "seed=1",
            "eval.targets=[a]",
            "model={lr_factors: {}, lora: {}}",
            "data={}",
        ]
    )
    assert keys == {"optim.lr", "optim.muon.lr", "seed", "eval.targets", "model.lr_factors", "model.lora"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr=1", True),
        ("optim={lr: 1}", True),
        ("optim.muon={}", False),
        ("optim={}", False),
        ("optim=null", True),
        ("optim.lr.x=1", True),
        ("seed=1", False),
    ],
)
def test_a_key_is_set_by_itself_by_its_section_and_by_what_is_inside_of_it(override, expected):
    assert is_set(override_keys([override]), "optim.lr") is expected
    assert is_set(override_keys([override]), "eval", "optim.lr") is expected


def test_the_values_of_a_config_stay_as_they_are():
    values = {"data": {"train": "x"}, "optim": {"lr": 0.1}}
    assert build_config(values, "test", ["optim.lr=0.3", "optim.muon={lr: 1}"]).optim.lr == 0.3
    assert values == {"data": {"train": "x"}, "optim": {"lr": 0.1}}


def test_numbers_in_scientific_notation_are_numbers():
    assert parse_yaml("[5e-4, 1E6, -2e+3, 0.1]") == [5e-4, 1e6, -2e3, 0.1]


@pytest.mark.parametrize("text", ["a\x85b", "a\x85 'b'", "a b", "1e6", "", "\u2028", "\n"])
def test_a_text_is_read_as_it_was_written(text):
    assert parse_yaml(dump_yaml({"key": text})) == {"key": text}
    assert parse_yaml(dump_in_line(text)) == text
    assert values_of_overrides([as_override("data.train", text)]) == {"data": {"train": text}}


def test_a_value_that_is_not_in_utf_8_is_told_with_its_key():
    with pytest.raises(UsageError, match="run.dir="):
        as_override("run.dir", "runs/caf\udce9")


@pytest.mark.parametrize("name", ["run", "1e-3", "2e5", "12", "0x1f", "012", "null", "on", "1_0"])
def test_a_dumped_config_reads_back_the_same(tmp_path, name):
    config = load_config(
        write(tmp_path, "data: {train: x}"),
        ["checkpoint.async=false", "eval.targets=[a, b]", f"run.name='{name}'"],
    )
    again = load_config(write(tmp_path, dump_config(config), "again.yaml"))
    assert again == config
    assert again.checkpoint.asynchronous is False


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_any_text_gives_a_value_or_the_documented_error(text):
    try:
        value = parse_yaml(text)
        config = build_config(value if isinstance(value, dict) else {}, "x")
    except (ConfigError, ValueError) as error:
        assert str(error)
    else:
        assert config.data.train


SECTIONS = ["run", "data", "model", "head", "optim", "train", "eval", "checkpoint", "log", "recipe", "extra"]
KEYS = [
    "train", "backbone", "margin", "lr", "batch_size", "async", "layers", "widths", "targets", "lr_factors", "x",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from(SECTIONS), VALUES, max_size=5))
def test_any_values_give_a_config_or_an_error_of_one_line(values):
    try:
        config = build_config(values, "x")
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert build_config(parse_yaml(dump_config(config)), "x") == config


@pytest.mark.parametrize(
    "word",
    ["on", "off", "reduce-overhead"],
)
def test_a_switch_takes_the_words_that_yaml_reads_as_truth_values(word):
    values = {"data": {"train": "x"}} | parse_yaml(f"train: {{compile: {word}}}")
    assert build_config(values, "x").train.compile == word
    assert build_config({"data": {"train": "x"}}, "x", [f"train.compile={word}"]).train.compile == word


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("optim.accumulate=2", "optim.accumulate: 2"),
        ("model.checkpoint_activations=true", "model.checkpoint_activations: true"),
        ("train.deterministic=true", "deterministic: true cannot be combined with compile: reduce-overhead"),
    ],
)
def test_replayed_code_is_refused_with_what_it_cannot_replay(other, message):
    with pytest.raises(ConfigError, match=message):
        build_config({"data": {"train": "x"}}, "x", ["train.compile=reduce-overhead", other])
