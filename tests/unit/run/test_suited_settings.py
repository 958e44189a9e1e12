"""Settings that suit a dataset and a machine: `train --data` and `doctor --data` state the same ones."""

import re
from types import SimpleNamespace

import pytest
import torch
import yaml

from facetrain.cli.usual_settings import UsualSettings
from facetrain.config.loading import build_config, override_keys, preset_configs
from facetrain.config.presets import presets
from facetrain.data.open_dataset import open_dataset
from facetrain.device import capability
from facetrain.distributed.ranks import Ranks
from facetrain.distributed.world import World
from facetrain.doctor.examine import check_settings, examine
from facetrain.remote.download import pinned
from facetrain.run import resolve
from facetrain.run import suited_settings as suited
from facetrain.run.agree import agree
from facetrain.run.asked_config import asked_config
from facetrain.run.folder.lease import Lease
from facetrain.run.parts.step_schedule import global_batch_size
from facetrain.run.request import TrainRequest
from facetrain.run.start_checks import _check_suited
from tests.support.command import ROOT
from tests.support.datasets import write_records

WORLD = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
KEYS = ("model.backbone", "train.precision", "optim.lr")


def value(config, key):
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def planned(request, folder):
    """Return the plan of a run, as its first rank resolves it."""
    with Lease() as lease:
        return agree(Ranks(), request.model_copy(update={"run_dir": str(folder)}), lease, pinned).plan


@pytest.mark.parametrize("settings", [(), ("model.backbone=r34", "optim.lr=0.5"), ("optim.name=adamw",)])
@pytest.mark.parametrize(
    ("machine", "images", "expected"),
    [
        ((False, True), 40, ("mbf", "bf16", 0.02)),
        ((False, False), 8, ("mbf", "fp32", 0.02)),
        ((True, True), 8, ("r18", "bf16", 0.02)),
        ((True, False), 40, ("r50", "fp16", 0.02)),
    ],
)
def test_train_and_doctor_take_the_same_settings_for_a_dataset_alone(
    tmp_path, monkeypatch, machine, images, expected, settings
):
    monkeypatch.setattr(suited, "_machine", lambda device: machine)
    monkeypatch.setattr(suited, "_FEWEST_IMAGES_OF_R50", 20)
    data = write_records(tmp_path / "data", [n % 4 for n in range(images)], size=16)
    batch = ("train.global_batch_size=8", "train.device=cpu")
    overrides = (*UsualSettings(str(data)).overrides(), *batch, *settings)
    request = TrainRequest(overrides=overrides, own_data=True)
    plan = planned(request, tmp_path / "run")
    asked = asked_config(request)
    stated = {result.check: result for result in examine(WORLD, asked.config, asked.set_keys)}
    for key, default in zip(KEYS, expected, strict=True):
        given = [one.partition("=")[2] for one in settings if one.startswith(f"{key}=")]
        if given:
            assert str(value(plan.config, key)) == given[0]
            assert (key in stated) == (key == "optim.lr"), "0.5 is far from the published rate"
        else:
            assert stated[key].message.startswith(f"{value(plan.config, key)}, "), "with its reason"
            assert any(line == f"{key}: {stated[key].message}" for line in plan.chosen)
            if key != "optim.lr":
                assert value(plan.config, key) == default
    assert not list(check_settings(plan.config, open_dataset(data), 1, None)) or "optim.lr=0.5" in settings


@pytest.mark.parametrize(("has_bfloat16", "expected"), [(True, "bf16"), (False, "fp32")])
def test_a_config_without_a_number_format_gets_that_of_the_machine_and_a_resume_keeps_it(
    tmp_path, monkeypatch, has_bfloat16, expected
):
    monkeypatch.setattr(suited, "_machine", lambda device: (False, has_bfloat16))
    data = write_records(tmp_path / "data", [0, 0, 1, 1], size=16)
    overrides = (f"data.train={data}", "eval.targets=[]", "train.global_batch_size=2")
    plan = planned(TrainRequest(overrides=overrides), tmp_path / "run")
    assert plan.config.train.precision == expected
    assert len(plan.chosen) == 1, "nothing else is chosen for a config"
    assert suited.with_suited_precision(asked_config(TrainRequest(overrides=overrides)).config).train == (
        plan.config.train
    ), "as a benchmark has it"
    checkpoint = SimpleNamespace(folder="x", meta={"config": "data: {train: x}\ntrain: {precision: fp16}\n"})
    config = build_config({"data": {"train": "x"}}, "test")
    again = resolve._with_recorded_choices(config, checkpoint, TrainRequest(), frozenset())
    assert again.train.precision == "fp16"
    given = build_config({"data": {"train": "x"}, "train": {"precision": "bf16"}}, "test")
    assert resolve._with_recorded_choices(given, checkpoint, TrainRequest(), frozenset()) == given


def test_published_batches_have_the_published_rates_and_a_preset_stays_as_it_is(tmp_path):
    facts = suited.RunFacts(584, 9449, 128, "sgd", has_gpu=False, has_bfloat16=True)
    rates = {}
    for batch in (64, 128, 512, 1024, 4096, 8192):
        known = suited.RunFacts(**vars(facts) | {"batch": batch})
        rate = suited.suited_settings(known)[2]
        rates[batch] = rate.value
        nearest = {64: "128", 8192: "4,096"}.get(batch)
        assert ("by the published rates" in rate.reason) == (nearest is None), rate.reason
        assert not nearest or rate.reason.endswith(f"in proportion to the published rate for {nearest}")
    assert rates == {
        64: 0.01,
        128: 0.02,
        512: pytest.approx(0.06, abs=0.003),
        1024: 0.1,
        4096: 0.4,
        8192: 0.8,
    }
    data = write_records(tmp_path / "data", [0, 0, 1, 1], size=16)
    overrides = (*UsualSettings(str(data), batch="2").overrides(), "train.device=cpu")
    plan = planned(TrainRequest(config="ms1mv3_r50", overrides=overrides, own_data=True), tmp_path / "run")
    assert [value(plan.config, key) for key in KEYS] == ["r50", "bf16", 0.1]


@pytest.mark.parametrize(
    ("precision", "machine", "is_slow"),
    [
        ("fp16", (False, True), True),
        ("bf16", (False, False), True),
        ("bf16", (False, True), False),
        ("fp32", (False, False), False),
        ("fp16", (True, False), False),
    ],
)
def test_a_number_format_that_the_cpu_emulates_is_a_warning(
    tmp_path, monkeypatch, precision, machine, is_slow
):
    monkeypatch.setattr(suited, "_machine", lambda device: machine)
    source = open_dataset(write_records(tmp_path, [0, 1], size=16))
    values = {"data": {"train": str(tmp_path)}, "train": {"precision": precision}, "optim": {"lr": 0.02}}
    config = build_config(values, "test")
    assert [result.check for result in check_settings(config, source, 1, None)] == [
        "train.precision"
    ] * is_slow
    warned = list(_check_suited(config, suited.gather_facts(config, source, 1), set()))
    assert [line.partition(":")[0] for line in warned] == ["train.precision"] * is_slow


@pytest.mark.parametrize(
    ("lr", "more", "found"),
    [
        (0.1, {}, True),
        (0.001, {}, True),
        (0.05, {}, False),
        (0.1, {"muon": {}}, False),
        (0.01, {"name": "adamw"}, True),
    ],
)
def test_a_rate_far_from_the_published_one_is_a_warning(tmp_path, lr, more, found):
    source = open_dataset(write_records(tmp_path, [0, 1], size=16))
    values = {"data": {"train": str(tmp_path)}, "train": {"precision": "fp32"}, "optim": {"lr": lr, **more}}
    config = build_config(values, "test")
    checks = [result.check for result in check_settings(config, source, 1, None)]
    assert checks == ["optim.lr"] * found
    facts = suited.gather_facts(config, source, 1)
    assert len(list(_check_suited(config, facts, set()))) == found, "a run reports it, too"
    assert not list(_check_suited(config, facts, {"optim.lr"}))


def test_a_preset_on_its_number_of_gpus_has_a_published_rate_and_on_another_one_may_not():
    for preset, config in zip(presets(), preset_configs().values(), strict=True):
        assert not rates_far_from_the_published(config, preset.gpus or 1), preset.name
    configs = preset_configs()
    for name in ("ms1mv3_r50", "ms1mv3_mbf", "glint360k_r100"):
        (line,) = rates_far_from_the_published(configs[name], 1)
        assert line.endswith("set it to 0.02: for 128 images per step, by the published rates of SGD")
    for processes in (1, 2, 4):
        assert not rates_far_from_the_published(configs["quickstart"], processes)


def rates_far_from_the_published(config, processes):
    batch = global_batch_size(config, processes)
    facts = suited.RunFacts(9000, 500_000, batch, config.optim.name, has_gpu=True, has_bfloat16=True)
    return list(_check_suited(config, facts, set()))


def test_doctor_compares_what_the_command_sets_for_a_dataset_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(suited, "_machine", lambda device: (False, True))
    data = write_records(tmp_path, [0, 1], size=16)
    overrides = (*UsualSettings(str(data)).overrides(), "optim.lr=5", "train.precision=fp16")
    asked = asked_config(TrainRequest(overrides=overrides, own_data=True))
    found = {
        result.check: result.status
        for result in check_settings(asked.config, open_dataset(data), 1, asked.set_keys)
    }
    assert found == {"model.backbone": "ok", "optim.lr": "warning", "train.precision": "warning"}


def test_the_page_for_own_photos_has_the_rate_of_its_batch():
    page = (ROOT / "docs" / "own_photos.md").read_text(encoding="utf-8")
    config = build_config(yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]), "test")
    facts = suited.RunFacts(50, 200, config.train.global_batch_size, "sgd", has_gpu=True, has_bfloat16=True)
    assert suited.suited_settings(facts)[2].value == config.optim.lr


@pytest.mark.parametrize(
    ("flags", "expected"), [("fpu avx512_bf16 sse", True), ("fpu avx512f", False), (None, False)]
)
def test_the_processor_says_whether_it_multiplies_bfloat16(tmp_path, monkeypatch, flags, expected):
    path = tmp_path / "cpuinfo"
    if flags:
        path.write_text(f"flags\t\t: {flags}\n")
    monkeypatch.setattr(capability, "_CPU_FACTS", path)
    assert capability.cpu_multiplies_bfloat16() is expected


@pytest.mark.parametrize(
    ("overrides", "given"),
    [
        (["optim={}"], ()),
        (["optim.weight_decay=0"], ()),
        (["optim.lr=1"], ("optim.lr",)),
        (["optim.muon={lr: 0.02}"], ("optim.lr",)),
        (["model={init_from: x}", "train={precision: fp32}"], ("model.backbone", "train.precision")),
    ],
)
def test_what_a_command_sets_is_not_chosen_at_the_start_nor_after_a_restart(overrides, given):
    config = build_config({"data": {"train": "x"}}, "test", overrides)
    keys = override_keys(overrides)
    expected = [key for key in KEYS if key not in given]
    assert sorted(suited.keys_to_choose(config, keys)) == sorted(expected)
    saved = "data: {train: x}\nmodel: {backbone: r18}\ntrain: {precision: fp16}\noptim: {lr: 0.3}\n"
    checkpoint = SimpleNamespace(folder="x", meta={"config": saved})
    again = resolve._with_recorded_choices(config, checkpoint, TrainRequest(own_data=True), keys)
    recorded = dict(zip(KEYS, ("r18", "fp16", 0.3), strict=True))
    assert [key for key in KEYS if value(again, key) == recorded[key]] == expected


@pytest.mark.parametrize(("set_keys", "expected"), [((), 0.02), (("optim",), 0.05), (("optim.lr",), 0.05)])
def test_a_rate_that_the_command_sets_wins_over_the_recorded_one_in_either_form(set_keys, expected):
    config = build_config({"data": {"train": "x"}, "optim": {"lr": 0.05}}, "test")
    checkpoint = SimpleNamespace(folder="x", meta={"config": "data: {train: x}\noptim: {lr: 0.02}\n"})
    chosen = resolve._with_recorded_choices(
        config, checkpoint, TrainRequest(choose=("batch",)), frozenset(set_keys)
    )
    assert chosen.optim.lr == expected


@pytest.mark.parametrize(("set_keys", "expected"), [(("optim.muon.lr",), 0.06), (("optim.lr",), 0.02)])
def test_the_rate_of_muon_follows_the_recorded_rate(set_keys, expected):
    config = build_config({"data": {"train": "x"}, "optim": {"lr": 0.05, "muon": {"lr": 0.02}}}, "test")
    saved = "data: {train: x}\noptim: {lr: 0.15, muon: {lr: 0.06}}\n"
    chosen = resolve._with_recorded_choices(
        config,
        SimpleNamespace(folder="x", meta={"config": saved}),
        TrainRequest(choose=("batch",)),
        frozenset(set_keys),
    )
    assert chosen.optim.muon.lr == expected


def test_muon_that_a_command_adds_to_a_run_keeps_the_rate_that_it_gives():
    config = build_config({"data": {"train": "x"}, "optim": {"lr": 0.05, "muon": {"lr": 0.02}}}, "test")
    checkpoint = SimpleNamespace(folder="x", meta={"config": "data: {train: x}\noptim: {lr: 0.15}\n"})
    set_keys = frozenset({"optim.muon"})
    chosen = resolve._with_recorded_choices(config, checkpoint, TrainRequest(choose=("lr",)), set_keys)
    assert (chosen.optim.lr, chosen.optim.muon.lr) == (0.15, 0.02)
