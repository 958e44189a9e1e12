"""Presets against arcface_torch's published runs, and the conversion of its configs."""

from pathlib import Path

import pytest

from facetrain.backbone.registry import BACKBONES
from facetrain.config.arcface_torch import convert
from facetrain.config.loading import load_config
from facetrain.errors import ConfigError
from facetrain.run.build.step_schedule import schedule_steps
from tests.support.command import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_preset_is_valid_and_named_after_its_file(path):
    config = load_config(path)
    assert config.model.backbone in BACKBONES
    assert config.run.name == path.stem
    assert load_config(path, ["recipe=head"]).optim.power == 1 or path.stem == "quickstart"


@pytest.mark.parametrize(
    ("name", "gpus", "steps", "lr", "decay", "margin"),
    [
        ("ms1mv3_r50", 8, 101_160, 0.1, 5e-4, "arcface"),
        ("ms1mv2_r100", 8, 113_720, 0.1, 5e-4, "arcface"),
        ("glint360k_r100", 8, 333_820, 0.1, 1e-4, "cosface"),
        ("wf42m_pfc02_8gpus_r50_bs4k", 8, 207_380, 0.4, 5e-4, "cosface"),
    ],
)
def test_steps_learning_rates_and_margins_are_the_published_ones(name, gpus, steps, lr, decay, margin):
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    assert schedule_steps(config, config.data.num_images, gpus).total_steps == steps
    assert (config.optim.lr, config.optim.weight_decay, config.head.margin.type) == (lr, decay, margin)
    assert (config.optim.power, config.head.margin.gradient, config.head.margin.beyond_pi) == (
        2,
        "exact",
        "linear",
    )


def test_the_recipes_quote_the_results_that_the_configs_do():
    quoted = {
        path.stem: line.rsplit(": ", 1)[1].rstrip(".\n")
        for path in CONFIGS
        for line in path.read_text().splitlines()
        if "last evaluation, LFW" in line
    }
    rows = [
        line.strip("| ").split(" | ") for line in (ROOT / "recipes" / "README.md").read_text().splitlines()
    ]
    listed = {row[0].strip("`"): row[-1] for row in rows if row[0].strip("`") in quoted}
    assert len(listed) > 10 and listed == {name: quoted[name] for name in listed}


PEER = """
from easydict import EasyDict as edict

# make training faster
config = edict()
config.margin_list = (1.0, 0.0, 0.4)
config.network = "r50"
config.resume = False
config.output = None
config.embedding_size = 512
config.sample_rate = 0.2
config.fp16 = True
config.momentum = 0.9
config.weight_decay = 5e-4
config.batch_size = 512
config.lr = 0.4
config.verbose = 2000
config.dali = False
config.rec = "/train_tmp/WebFace42M"
config.num_classes = 2059906
config.num_image = 42474557
config.num_epoch = 20
config.warmup_epoch = 2
config.val_targets = ["lfw", "cfp_fp", "agedb_30"]
"""


def converted(tmp_path, text):
    path = tmp_path / "wf42m.py"
    path.write_text(text)
    (tmp_path / "wf42m.yaml").write_text(convert(path))
    return load_config(tmp_path / "wf42m.yaml")


def test_a_converted_config_describes_the_same_run(tmp_path):
    config = converted(tmp_path, PEER)
    assert config.recipe == "head" and config.optim.power == 1
    assert (config.head.margin.type, config.head.margin.m3, config.head.sample_rate) == ("cosface", 0.4, 0.2)
    assert (config.train.batch_size, config.train.precision, config.train.epochs) == (512, "fp16", 20)
    assert (config.optim.lr, config.optim.warmup_epochs, config.data.num_classes) == (0.4, 2, 2059906)
    assert config.eval.targets == ("lfw", "cfp_fp", "agedb_30")
    assert "# momentum: arcface_torch ignores it" in (tmp_path / "wf42m.yaml").read_text()


@pytest.mark.parametrize(
    ("margins", "kind"),
    [
        ((1.0, 0.5, 0.0), "arcface"),
        ((1.0, 0.0, 0.4), "cosface"),
        ((1.35, 0.0, 0.0), "combined"),
    ],
)
def test_every_margin_of_arcface_torch_is_converted(tmp_path, margins, kind):
    margin = converted(tmp_path, f"{PEER}config.margin_list = {margins}\n").head.margin
    assert margin.type == kind and (margin.m1, margin.m2, margin.m3) == margins


@pytest.mark.parametrize("margins", [(1.0, 0.5, 0.2), (1.35, 0.0, 0.2)])
def test_a_margin_with_m3_is_converted_without_what_arcface_torch_ignores(tmp_path, margins):
    margin = converted(tmp_path, f"{PEER}config.margin_list = {margins}\n").head.margin
    assert (margin.type, margin.m1, margin.m2, margin.m3) == ("cosface", 1, 0, 0.2)
    assert "# margin_list: m1 and m2 are left out" in (tmp_path / "wf42m.yaml").read_text()


def test_the_augmentation_of_dali_is_converted_only_if_dali_is_in_use(tmp_path):
    on = converted(tmp_path, PEER + "config.dali = True\nconfig.dali_aug = True\n").data.augment
    assert (on.low_resolution, on.blur, on.color, on.gray) == (0.1, 0.2, 0.2, 0.1)
    assert "# dali_aug: converted to data.augment" in (tmp_path / "wf42m.yaml").read_text()
    off = converted(tmp_path, PEER + "config.dali = False\nconfig.dali_aug = True\n").data.augment
    assert (off.low_resolution, off.blur, off.color, off.gray) == (0, 0, 0, 0)
    assert "# dali_aug: is left out" in (tmp_path / "wf42m.yaml").read_text()


def test_intervals_in_micro_batches_are_converted_to_steps(tmp_path):
    intervals = "config.gradient_acc = 4\nconfig.verbose = 2000\nconfig.frequent = 3\n"
    config = converted(tmp_path, PEER + intervals)
    assert (config.optim.accumulate, config.eval.every_steps, config.log.every_steps) == (4, 500, 1)
    assert "# verbose, frequent: divided by gradient_acc" in (tmp_path / "wf42m.yaml").read_text()


WITHOUT_MARGIN = PEER.replace("config.margin_list = (1.0, 0.0, 0.4)\n", "")


@pytest.mark.parametrize(
    ("loss", "kind", "margins"), [("cosface", "cosface", (1, 0, 0.4)), ("arcface", "arcface", (1, 0.5, 0))]
)
def test_the_loss_of_2021_is_converted_to_its_margin(tmp_path, loss, kind, margins):
    margin = converted(tmp_path, f"{WITHOUT_MARGIN}config.loss = '{loss}'\n").head.margin
    assert (margin.type, margin.scale, margin.m1, margin.m2, margin.m3) == (kind, 64, *margins)
    assert "# loss" not in (tmp_path / "wf42m.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (PEER + "config.loss = 'arcface'\n", "# loss: margin_list gives the margin"),
        (PEER + "config.loss = 'curricularface'\n", "# loss: has no equivalent in facetrain"),
    ],
)
def test_a_loss_that_gives_no_margin_is_named(tmp_path, text, note):
    assert converted(tmp_path, text).head.margin.type == "cosface"
    assert note in (tmp_path / "wf42m.yaml").read_text().splitlines()


@pytest.mark.parametrize(
    ("network", "note"),
    [
        ("vit_t_dp005_mask0", None),
        ("vit_s_dp005_mask_0", None),
        (
            "vit_b_dp005_mask_005",
            "`dp005_mask_005` is left out; the masking of patches in training has no equivalent",
        ),
        ("vit_b", "the masking of patches in training has no equivalent"),
    ],
)
def test_the_masking_of_patches_is_named_where_it_is_on(tmp_path, network, note):
    config = converted(tmp_path, f"{PEER}config.network = '{network}'\n")
    assert config.model.backbone == network[:5]
    notes = [line for line in (tmp_path / "wf42m.yaml").read_text().splitlines() if "# network" in line]
    assert len(notes) == (note is not None) and (note or "") in "".join(notes)


def test_synthetic_data_keeps_its_size_for_the_plan_and_is_named(tmp_path):
    config = converted(tmp_path, PEER + "config.rec = 'synthetic'\nconfig.num_classes = 300 * 10000\n")
    assert (config.data.num_classes, config.data.num_images) == (3_000_000, 42474557)
    text = (tmp_path / "wf42m.yaml").read_text()
    assert "# rec: the synthetic data of arcface_torch has no equivalent" in text
    assert "`facetrain data synth`" in text and "`facetrain bench`" in text


def test_a_size_that_is_no_integer_is_named(tmp_path):
    assert converted(tmp_path, PEER + "config.num_image = 'forget'\n").data.num_images is None
    assert "# num_image: is not an integer and is left out" in (tmp_path / "wf42m.yaml").read_text()


def test_a_converted_config_names_the_values_that_it_leaves_out(tmp_path):
    converted(tmp_path, PEER + "config.suffix_run_name = 'a'\n")
    assert "# suffix_run_name: has no equivalent in facetrain" in (tmp_path / "wf42m.yaml").read_text()


def test_weights_and_biases_are_converted_only_if_they_are_in_use(tmp_path):
    project = PEER + "config.wandb_project = 'faces'\n"
    assert converted(tmp_path, project).log.wandb is None
    assert converted(tmp_path, project + "config.using_wandb = True\n").log.wandb == "faces"
    assert converted(tmp_path, PEER + "config.using_wandb = True\n").log.wandb is None
    assert "# using_wandb: names no project" in (tmp_path / "wf42m.yaml").read_text()


def test_a_base_file_and_arithmetic_are_supported(tmp_path):
    (tmp_path / "base.py").write_text("config = edict()\nconfig.weight_decay = 1e-4\nconfig.lr = 0.3\n")
    config = converted(tmp_path, PEER.replace("config.lr = 0.4", "config.lr = 0.1 * 512 / 128"))
    assert (config.optim.lr, config.optim.weight_decay) == (pytest.approx(0.4), 5e-4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import os; os.system('touch /tmp/facetrain-ran')", "line 25: only"),
        ("config.lr = __import__('os').getpid()", "is not a plain value"),
        ("config.rec = 'a' * 10**10", "is not a plain value"),
        ("config.lr = 1 / 0", "division by zero"),
        ("config.rec = b'/a'", "line 25: `b'/a'` is not a plain value"),
        ("config.val_targets = ['lfw', b'a']", "line 25: `b'a'` is not a plain value"),
        ("config.lr = 1j", "line 25: `1j` is not a plain value"),
        ("config.val_targets = 'lfw'", r"line 25: config.val_targets is text, not a list; write \['lfw'\]"),
        ("config.margin_list = '105'", "line 25: config.margin_list is text, not a list"),
        ("config.margin_list = (1.0, 0.5)", "has a type that arcface_torch does not accept"),
        ("config.network = 50", "has a type that arcface_torch does not accept"),
        ("config.network = 'r51'", "did you mean r50"),
        ("def f(: pass", "is not valid Python"),
    ],
)
def test_anything_but_plain_assignments_is_refused_and_never_executed(tmp_path, line, message):
    path = tmp_path / "evil.py"
    path.write_text(PEER + line + "\n")
    with pytest.raises(ConfigError, match=message):
        convert(path)
    assert not Path("/tmp/facetrain-ran").exists()
