"""Presets against arcface_torch's published runs, and the conversion of its configs."""

import re
from operator import attrgetter

import pytest

from facetrain.backbone.registry import BACKBONES
from facetrain.config.arcface_torch import convert
from facetrain.config.loading import load_config
from facetrain.errors import ConfigError
from facetrain.run.parts.step_schedule import global_batch_size, schedule_steps
from tests.support.command import ROOT

PUBLISHED = (
    r"^# Published by arcface_torch: (.*) % TAR at FAR 1e-4 on IJB-C\.$",
    r"^# Published .*last evaluation, LFW / CFP-FP / AgeDB-30: (.*)\.$",
)
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
        ("ms1mv2_ir50_adaface", 2, 295_672, 0.1, 5e-4, "adaface"),
    ],
)
def test_steps_learning_rates_and_margins_are_the_published_ones(name, gpus, steps, lr, decay, margin):
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    assert schedule_steps(config, config.data.num_images, gpus).total_steps == steps
    assert (config.optim.lr, config.optim.weight_decay, config.head.margin.type) == (lr, decay, margin)
    assert (config.optim.power, config.head.margin.gradient) == (2, "exact")


def test_the_recipes_quote_the_results_that_the_configs_do():
    lines = (ROOT / "recipes" / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    published = {row[0].strip("`"): (row[3], row[5]) for row in rows if len(row) == 6}
    assert len(published) > 30
    for name, results in published.items():
        text = (ROOT / "configs" / f"{name}.yaml").read_text()
        found = [re.search(pattern, text, re.MULTILINE) for pattern in PUBLISHED]
        assert tuple(match[1] if match else "" for match in found) == results, name


def test_the_cards_of_the_datasets_list_the_presets_that_train_on_them():
    cards = "".join(path.read_text() for path in (ROOT / "datasets").glob("*.md"))
    names = {path.stem for path in CONFIGS if not path.stem.startswith("wf42m_")}
    assert {name for name in names if f"`{name}`" not in cards} == {"quickstart"} and "`wf42m_…`" in cards


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
    text = (tmp_path / "wf42m.yaml").read_text()
    assert text.endswith("needs no key for it: dali, momentum, resume\n")


USUAL_NOTES = ("Converted",)
"""Notes that the lines above cause."""
WITHOUT_MARGIN = PEER.replace("config.margin_list = (1.0, 0.0, 0.4)\n", "")
MARGIN = "head.margin.type head.margin.scale head.margin.m1 head.margin.m2 head.margin.m3"
AUGMENTATION = "data.augment.low_resolution data.augment.blur data.augment.color data.augment.gray"
INTERVALS = "optim.accumulate eval.every_steps log.every_steps"
SIZES = "data.num_classes data.num_images"
NETWORK = "model.backbone model.checkpoint_activations"
LEFT_OUT = "margin_list: m1 and m2 are left out"
CONVERSIONS = [
    # lines of the file, keys and values of the config, and the beginning of the note (None: no note)
    ("margin_list = (1.0, 0.5, 0.0)", MARGIN, ("arcface", 64, 1, 0.5, None), None),
    ("margin_list = (1.0, 0.0, 0.4)", MARGIN, ("cosface", 64, 1, None, 0.4), None),
    ("margin_list = (1.35, 0.0, 0.0)", MARGIN, ("combined", 64, 1.35, 0, 0), None),
    # arcface_torch subtracts m3 alone then.
    ("margin_list = (1.0, 0.5, 0.2)", MARGIN, ("cosface", 64, 1, None, 0.2), LEFT_OUT),
    ("margin_list = (1.35, 0.0, 0.2)", MARGIN, ("cosface", 64, 1, None, 0.2), LEFT_OUT),
    ("loss = 'arcface'", MARGIN, ("cosface", 64, 1, None, 0.4), "loss: is left out, because margin_list is"),
    ("loss = 'curricularface'", MARGIN, ("curricularface", 64, 1, None, None), "margin_list: is left out"),
    ("loss = 'unpg'", MARGIN, ("cosface", 64, 1, None, 0.4), "loss: is left out"),
    ("decay_epoch = [8, 12]", "optim.schedule optim.milestones", ("steps", (8, 12)), "decay_epoch: is kept"),
    ("output = 'work_dirs/a'", "run.dir run.name", ("work_dirs", "a"), None),
    ("output = 'work_dirs/lr=0.1'", "run.dir run.name", ("work_dirs/lr=0.1", "wf42m"), None),
    ("decay_epoch = 10", "optim.schedule", "polynomial", "decay_epoch: is no list of rising epochs"),
    ("dali = True; dali_aug = True", AUGMENTATION, (0.1, 0.2, 0.2, 0.1), None),
    ("dali_aug = True", AUGMENTATION, (0, 0, 0, 0), "dali_aug: is left out"),
    ("gradient_acc = 4; frequent = 3", INTERVALS, (4, 500, 1), None),
    ("network = 'vit_t_dp005_mask0'", NETWORK, ("vit_t", False), None),
    ("network = 'vit_s_dp005_mask_0'", "model.backbone", "vit_s", None),
    ("network = 'vit_b_dp005_mask_005'", NETWORK, ("vit_b", True), "network: the drop path is 0.05"),
    ("network = 'vit_b'", "model.backbone", "vit_b", "network: the drop path is 0.05"),
    # Synthetic data keeps its size, for `facetrain plan`.
    ("rec = 'synthetic'; num_classes = 300 * 10000", SIZES, (3_000_000, 42474557), None),
    ("num_image = 'forget'", SIZES, (2059906, None), "num_image: is not an integer and is left out"),
    ("suffix_run_name = None", "seed", 2048, None),
    ("suffix_run_name = 'a'", "seed", 2048, "suffix_run_name: is left out"),
    (
        "wandb_project = 'faces'; using_wandb = True",
        "log.sinks",
        ("wandb",),
        "using_wandb: start the run with WANDB",
    ),
    ("wandb_project = 'faces'; using_wandb = False", "log.sinks", (), None),
]


@pytest.mark.parametrize(("lines", "keys", "values", "note"), CONVERSIONS, ids=lambda text: str(text)[:40])
def test_each_setting_is_converted_or_named_in_a_note(tmp_path, lines, keys, values, note):
    config = converted(tmp_path, PEER + "".join(f"config.{line}\n" for line in lines.split("; ")))
    assert attrgetter(*keys.split())(config) == values
    text, _, unneeded = (
        (tmp_path / "wf42m.yaml").read_text().partition("# Left out, because facetrain needs no key")
    )
    assert "momentum" in unneeded, "below the config, so that the others are seen"
    notes = [line[2:] for line in text.splitlines() if line[0] == "#"]
    others = [line for line in notes if not line.startswith(USUAL_NOTES)]
    assert len(others) == (note is not None) and "".join(others).startswith(note or "")


@pytest.mark.parametrize(("loss", "margin"), [("cosface", (1, None, 0.4)), ("arcface", (1, 0.5, None))])
def test_the_loss_of_2021_is_converted_to_its_margin(tmp_path, loss, margin):
    config = converted(tmp_path, f"{WITHOUT_MARGIN}config.loss = '{loss}'\n")
    assert attrgetter(*MARGIN.split())(config) == (loss, 64, *margin)
    assert "# loss" not in (tmp_path / "wf42m.yaml").read_text()
    with_steps = converted(
        tmp_path, f"{WITHOUT_MARGIN}config.loss = '{loss}'\nconfig.decay_epoch = [8, 12]\n"
    )
    assert (with_steps.head.margin.gradient == "exact") == (loss == "arcface")
    assert "set optim.lr to 0.4 times the number of GPUs" in (tmp_path / "wf42m.yaml").read_text()


@pytest.mark.parametrize("batch_size", ["'128.0'", None])
def test_the_rate_of_2021_is_that_of_the_batch_size_of_the_converted_config(tmp_path, batch_size):
    lines = f"config.loss = 'arcface'\nconfig.decay_epoch = [8, 12]\nconfig.batch_size = {batch_size}\n"
    assert global_batch_size(converted(tmp_path, WITHOUT_MARGIN + lines), 1) == 128
    assert "set optim.lr to 0.1 times the number of GPUs" in (tmp_path / "wf42m.yaml").read_text()


@pytest.mark.parametrize(
    ("loss", "margin"),
    [
        ("arcface", (1, 0.5, None)),
        ("cosface", (1, None, 0.4)),
        ("magface", (1, None, None)),
        ("unpg", None),
    ],
)
def test_the_loss_of_a_file_wins_over_the_margin_list_of_the_base_file(tmp_path, loss, margin):
    (tmp_path / "base.py").write_text("config = edict()\nconfig.margin_list = (1.0, 0.2, 0.0)\n")
    lines = f"{WITHOUT_MARGIN}config.loss = '{loss}'\nconfig.decay_epoch = [8, 12]\n"
    if margin is None:
        with pytest.raises(ConfigError, match="set config.margin_list"):
            converted(tmp_path, lines)
        return
    config = converted(tmp_path, lines)
    assert attrgetter(*MARGIN.split())(config) == (loss, 64, *margin)
    assert (config.head.margin.gradient == "exact") == (loss == "arcface")
    text = (tmp_path / "wf42m.yaml").read_text()
    assert "# margin_list: that of base.py is left out, because wf42m.py has loss\n" in text
    assert "set optim.lr to 0.4 times the number of GPUs" in text and "# decay_epoch" not in text


@pytest.mark.parametrize("unused", ["", "config.margin_list = None\n"])
@pytest.mark.parametrize("loss", ["adaface", "curricularface", "magface"])
def test_a_loss_of_a_fork_is_its_margin_with_the_published_numbers(tmp_path, loss, unused):
    config = converted(tmp_path, f"{WITHOUT_MARGIN}config.loss = '{loss}'\n{unused}")
    assert attrgetter(*MARGIN.split())(config) == (loss, 64, 1, None, None)


def test_a_momentum_that_arcface_torch_ignores_is_left_out_with_a_note(tmp_path):
    assert converted(tmp_path, PEER.replace("momentum = 0.9", "momentum = 0.8")).optim.momentum == 0.9
    assert "# momentum: is left out, because arcface_torch" in (tmp_path / "wf42m.yaml").read_text()


def test_an_unknown_loss_without_a_margin_list_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"wf42m.py: config.loss 'unpg' is unknown"):
        converted(tmp_path, f"{WITHOUT_MARGIN}config.loss = 'unpg'\n")


def test_the_type_of_a_converted_margin_can_be_changed_by_one_option(tmp_path):
    converted(tmp_path, PEER)
    margin = load_config(tmp_path / "wf42m.yaml", ["head.margin.type=adaface"]).head.margin
    assert (margin.type, margin.m2) == ("adaface", None)


def test_values_of_other_configs_arguments_updates_and_variables_are_taken(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "first.py").write_text(
        "config = edict(network='mbf', lr=0.02)\nconfig.rec = '/data/first'"
    )
    path = tmp_path / "configs" / "mine.py"
    path.write_bytes(
        b"\xef\xbb\xbffrom configs.first import config\r\nimport os\r\nepochs = 4\r\n"
        b"config.update(dict(batch_size=32), num_epoch=epochs + 1)\r\nconfig['rec'] = '/data/mine'\r\n"
        b"config.output = os.environ.get('OUT', 'work_dirs')\r\n"
    )
    text = convert(path)
    (tmp_path / "mine.yaml").write_text(text)
    config = load_config(tmp_path / "mine.yaml")
    assert (config.model.backbone, config.optim.lr, config.train.batch_size) == ("mbf", 0.02, 32)
    assert (config.train.epochs, config.data.train, config.run.name) == (5, "/data/mine", "work_dirs")
    assert "# os.environ.get('OUT', 'work_dirs'): has its default here" in text


def test_a_base_file_and_arithmetic_are_supported(tmp_path):
    (tmp_path / "base.py").write_text("config = edict()\nconfig.weight_decay = 1e-4\nconfig.lr = 0.3\n")
    config = converted(tmp_path, PEER.replace("config.lr = 0.4", "config.lr = 0.1 * 512 / 128"))
    assert (config.optim.lr, config.optim.weight_decay) == (pytest.approx(0.4), 5e-4)


OF_2021 = """from easydict import EasyDict as edict
config = edict()
config.dataset = "DATASET"
config.lr = 0.1
if config.dataset == "emore":
    config.rec = "/data/faces_emore"
    config.num_epoch = 16
    def lr_step_func(epoch):
        return ((epoch + 1) / (4 + 1)) ** 2 if epoch < -1 else 0.1 ** len([m for m in [8, 14] if m - 1 <= epoch])
    config.lr_func = lr_step_func
elif config.dataset != "webface":
    config.rec = "/data/other"
else:
    config.rec = "/data/webface"
    config.num_epoch = 34
"""


@pytest.mark.parametrize(
    ("dataset", "rec", "epochs"),
    [
        ("emore", "/data/faces_emore", 16),
        ("webface", "/data/webface", 34),
        ("glint360k", "/data/other", 20),
    ],
)
def test_the_branch_of_the_dataset_is_read_in_a_config_of_2021(tmp_path, dataset, rec, epochs):
    config = converted(tmp_path, OF_2021.replace("DATASET", dataset))
    assert (config.data.train, config.train.epochs) == (rec, epochs)
    note = (
        "# lr_func: is code and is left out, with its list [8, 14]; for its learning rate set optim.schedule"
    )
    text = (tmp_path / "wf42m.yaml").read_text()
    assert (note in text) == (dataset == "emore")
    # 0.1 times 128 images a GPU, divided by 512.
    assert ("set optim.lr to 0.025 times the number of GPUs" in text) == (dataset == "emore")
    assert config.head.margin.gradient == ("exact" if dataset == "emore" else "straight_through")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import os; os.system('touch ran')", "line 25: .*only"),
        ("for name in ('lr',): config[name] = 1", "line 25: `for name"),
        ("if config.speed == 1: config.lr = 3", "line 25: `config.speed` is not a plain value"),
        ("if config.lr < 1: config.lr = 3", "line 25: `if config.lr < 1`: only settings that are compared"),
        (
            "if config.lr == 0.4:\n    config.lr = f()\nelse: g()",
            "line 26: `f\\(\\)` is not a plain value; write the value itself",
        ),
        ("def f(): return 1\nconfig.lr = f()", "line 26: `f\\(\\)` is not a plain value"),
        ("@f\ndef g(): pass", "line 26: .*only assignments"),
        ("config.lr = 1 if __debug__ else 2\nif True: config.lr = 3", "line 25: .*; line 26: `if True"),
        ("config.rec = os.environ.get('DATA')", "`os.environ.get.* has no default"),
        ("from configs.unknown import config", "this file is not beside it"),
        ("from evil import config", "this file is not beside it"),
        ("config.update(more)", "`more` is not a plain value"),
        ("config = other", "`other` is not plain settings"),
        ("config.lr = __import__('os').getpid()", "is not a plain value"),
        ("config.rec = 'a' * 10**10", "is not a plain value"),
        (
            f"config.rec = f('{'a' * 99}')",
            "line 25: `f\\('a{57}…` is not a plain value; write the value itself",
        ),
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
def test_anything_but_plain_assignments_is_refused_and_never_executed(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.py"
    path.write_text(PEER + line + "\n")
    with pytest.raises(ConfigError, match=message):
        convert(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "line",
    [
        'config["zz\\ncheckpoint: {mirror: x}"] = 1',
        "config.update({1: 2})",
        f"config.batch_size = {'1 + ' * 3000}1",
    ],
)
def test_a_converted_config_has_no_more_than_its_file_names(tmp_path, line):
    (tmp_path / "c.py").write_text(PEER + line)
    with pytest.raises(ConfigError, match=r"c\.py, line"):
        convert(tmp_path / "c.py")


def test_a_line_break_in_a_text_does_not_end_the_comment_that_shows_it(tmp_path):
    lines = 'config.using_wandb = True\nconfig.wandb_project = "a\\nextends: other.yaml #"\n'
    assert converted(tmp_path, PEER + lines) == converted(tmp_path, f"{PEER}config.using_wandb = True\n")


@pytest.mark.parametrize(
    ("stem", "name"),
    [("my config", "my-config"), ("_r50 (2)", "r50-2-"), ("配置", "run"), ("r50.v2", "r50.v2")],
)
def test_a_run_without_output_is_named_after_the_file_as_far_as_names_can_be(tmp_path, stem, name):
    (tmp_path / f"{stem}.py").write_text(PEER)
    (tmp_path / "c.yaml").write_text(convert(tmp_path / f"{stem}.py"))
    assert load_config(tmp_path / "c.yaml").run.name == name
