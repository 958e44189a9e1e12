"""Checks of disk, labels and learning rate before the first step."""

import errno
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from facetrain.backbone.own_network import OwnNetwork
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import build_config, load_config, with_values
from facetrain.data.build import open_training_data
from facetrain.errors import ConfigError, RunError, UsageError
from facetrain.head.build import build_margin
from facetrain.head.partial_fc import PartialFC
from facetrain.head.settings import MarginSettings
from facetrain.run import start_checks
from facetrain.run.parts.state import check_precision
from facetrain.run.parts.step_schedule import schedule_steps
from facetrain.run.start_checks import (
    _check_cores,
    _check_learning_rate,
    _check_lengths,
    _check_people,
    _require_renames,
    check_free_space,
)
from facetrain.run.suited_settings import RunFacts
from tests.support import training
from tests.support.datasets import encoded_image, write_records
from tests.support.world import ONE_RANK
from tests.unit.plan.helpers import small_config


@pytest.mark.parametrize(
    ("name", "usual", "absurd", "published"), [("sgd", 0.4, 1000, 0.1), ("adamw", 0.001, 1, 0.001)]
)
def test_a_learning_rate_that_cannot_be_meant_is_reported(name, usual, absurd, published):
    for lr, count in ((usual, 0), (absurd, 1)):
        config = build_config({"data": {"train": "x"}, "optim": {"name": name, "lr": lr}}, "test")
        facts = RunFacts(10, 100, 1024, name, has_gpu=False, has_bfloat16=True)
        warnings = list(_check_learning_rate(config, facts))
        assert len(warnings) == count and all(f"set it to {published}: " in warning for warning in warnings)


def test_a_resume_reports_a_rate_that_is_far_too_high_if_the_command_changes_it(describe, tmp_path):
    folder = tmp_path / "run"
    assert training.train(load_config(describe(steps=1), ["eval.targets=[]"]), folder) == 0
    for changes, count in (
        (["train.max_steps=2"], 1),
        (["train.max_steps=3", "optim.lr=0.5"], 2),
        (["train.max_steps=4", "optim.lr=0.0001"], 2),
    ):
        assert training.go_on(folder, changes=changes) == 0
        log = (folder / "log.txt").read_text()
        assert log.count(" is far above 0.0037; ") == count and "far below" not in log


@pytest.mark.parametrize(("lr", "count"), [(0.05, 0), (20, 1)])
def test_a_rate_of_muon_that_cannot_be_meant_is_reported(lr, count):
    config = build_config({"data": {"train": "x"}, "optim": {"muon": {"lr": lr}}}, "test")
    facts = RunFacts(10, 100, 1024, "sgd", has_gpu=False, has_bfloat16=True)
    warnings = list(_check_learning_rate(config, facts))
    assert len(warnings) == count and all("the usual rate, 0.02" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("people", "model", "count"),
    [(4, {}, 1), (999, {}, 1), (1000, {}, 0), (4, {"init_from": "m.safetensors"}, 0)],
)
def test_too_few_people_for_a_new_network_are_reported(people, model, count):
    config = build_config({"data": {"train": "x"}, "model": model}, "test")
    facts = RunFacts(people, 5000, 128, "sgd", has_gpu=False, has_bfloat16=True)
    warnings = list(_check_people(config, facts))
    assert len(warnings) == count and all("facetrain finetune" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("local_size", "reported"),
    [(1, False), (2, False), (8, True)],
    ids=["alone", "a core each", "fewer cores"],
)
def test_more_processes_than_cores_are_reported(local_size, reported):
    assert bool(list(_check_cores(SimpleNamespace(local_size=local_size, host_cores=2)))) == reported


@pytest.mark.parametrize(("every_steps", "keep", "count"), [(10, 3, 4), (30, 3, 2), (10, 8, 6)])
def test_a_disk_too_small_for_the_kept_checkpoints_is_reported(
    tmp_path, monkeypatch, every_steps, keep, count
):
    sections = {"data": {"train": "x"}, "checkpoint": {"every_steps": every_steps, "keep": keep}}
    config, size = build_config(sections, "test"), 10**9
    for free, message in (
        (count * size, None),
        (count * size - 1, f"{count} checkpoints of 1,000.0 MB are written"),
    ):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        warnings = list(check_free_space(config, tmp_path, size, steps=60, held=0))
        assert [message in line for line in warnings] == ([True] if message else [])
        # A run that continues replaces one of those that it has by the next one.
        assert not list(check_free_space(config, tmp_path, size, steps=60, held=keep))
    with pytest.raises(RunError, match=r"9,000\.0 MB"):
        list(check_free_space(config, tmp_path, 9 * size, steps=60, held=0))


def test_storage_that_renames_no_folder_is_refused_before_the_first_step(tmp_path, monkeypatch):
    _require_renames(tmp_path)
    assert list(tmp_path.iterdir()) == []

    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("os.rename", refuse)  # as mounts of object stores do
    with pytest.raises(RunError, match="run.dir"):
        _require_renames(tmp_path)


def test_a_run_among_the_folders_of_the_people_is_refused(describe, tmp_path):
    for number in range(24):
        person = tmp_path / "photos" / ("ann", "bob")[number % 2]
        person.mkdir(parents=True, exist_ok=True)
        (person / f"{number}.png").write_bytes(encoded_image(number))
    config = load_config(describe(steps=1), [f"data.train={tmp_path}/photos", "eval.targets=[]"])
    with pytest.raises(UsageError, match=r"photos/run: is among the folders of the people in "):
        training.train(config, tmp_path / "photos/run")
    (tmp_path / "mix.yaml").write_text("datasets: [{path: photos}]")
    mixed = load_config(describe(steps=1), [f"data.train={tmp_path}/mix.yaml", "eval.targets=[]"])
    with pytest.raises(UsageError, match=r"photos/run: is among the folders of the people in "):
        training.train(mixed, tmp_path / "photos/run")
    assert {path.name for path in (tmp_path / "photos").iterdir()} == {"ann", "bob"}
    assert training.train(config, tmp_path / "photos/runs/one") == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_forecast_of_a_checkpoint_is_its_size(describe, tmp_path, monkeypatch, optimizer):
    sizes = []
    forecast = start_checks.checkpoint_bytes

    def record(*args):
        sizes.append(forecast(*args))
        return sizes[-1]

    monkeypatch.setattr("facetrain.run.start_checks.checkpoint_bytes", record)
    settings = [f"optim.name={optimizer}", "eval.targets=[]", "data.workers=0"]
    assert training.train(load_config(describe(steps=2), settings), tmp_path / "run") == 0
    written = sum(entry.size for entry in Checkpoint.open(tmp_path / "run").manifest.files)
    assert sizes == [pytest.approx(written, rel=0.25)], "the rest are random states and headers"


@pytest.mark.parametrize(
    ("device", "precision", "capability", "refused"),
    [("cuda", "bf16", (7, 0), True), ("cuda", "fp16", (7, 0), False), ("cuda", "bf16", (8, 0), False)],
)
def test_bf16_on_a_gpu_that_would_emulate_it_is_refused(monkeypatch, device, precision, capability, refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    world = SimpleNamespace(device=torch.device(device))
    config = build_config({"data": {"train": "x"}, "train": {"precision": precision}}, "test")
    with pytest.raises(ConfigError, match=r"7\.0.*fp16") if refused else nullcontext():
        check_precision(config, world)


@pytest.mark.parametrize(
    ("optim", "max_steps", "lines"),
    [
        (
            {"schedule": "steps", "milestones": [1, 3, 5]},
            None,
            ["milestones: 3, 5 are not before the end, epoch 3"],
        ),
        ({"warmup_epochs": 3}, 60, ["warmup_epochs: 3 of 3 epochs"]),
        ({}, 61, ["max_steps: 61 is never reached: the last epoch ends after step 60"]),
        ({"schedule": "steps", "milestones": [1, 2], "warmup_epochs": 1}, 60, []),
        (
            {"schedule": "steps", "milestones": [1, 2], "warmup_epochs": 1.5},
            30,
            ["milestones: 2 is not before the end, epoch 1.5", "warmup_epochs: 1.5 of 1.5 epochs"],
        ),
    ],
)
def test_a_schedule_that_the_run_does_not_reach_is_reported(optim, max_steps, lines):
    config = small_config(optim=optim, train={"epochs": 3, "batch_size": 4, "max_steps": max_steps})
    found = list(start_checks._check_schedule(config, schedule_steps(config, 80, 1)))
    assert len(found) == len(lines) and all(line in each for line, each in zip(lines, found, strict=True))


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ("head.margin={type: cosface, m2: 0.5, m3: 0.3}", ["head.margin.m2: 0.5"]),
        ("head.margin={type: arcface, m2: 0.4, m3: 0.3}", ["head.margin.m3: 0.3"]),
        ("head.margin={type: softmax, m2: 0.5, m3: 0}", ["head.margin.m2: 0.5"]),
        ("head.margin={type: 'mine:margin', m2: 0.5}", ["head.margin.m2: 0.5"]),
        ("head.margin={type: combined, m2: 0.5, m3: 0.3}", []),
        (
            "head.margin={type: adaface, gradient: straight_through}",
            ["head.margin.gradient: straight_through"],
        ),
        ("head.margin={type: adaface, gradient: exact}", []),
        ("head.margin={type: combined, gradient: straight_through}", []),
        ("recipe=head; head.margin.type=adaface", []),
        ("recipe=head; optim.power=2", []),
        ("recipe=head; optim.power=2; head.margin.gradient=exact", ["recipe: head"]),
        ("data={max_skipped: 5}", ["data.max_skipped: 5"]),
        ("data={max_skipped: 5, bad_records: skip}", []),
        ("data.augment.low_resolution_sizes=[16, 112, 120]", ["low_resolution_sizes: 112, 120"]),
        ("optim={gamma: 0.3}", ["optim.gamma: 0.3"]),
        ("optim={name: adamw, momentum: 0.8}", ["optim.momentum: 0.8 has no effect without optim.name: sgd"]),
        ("optim={betas: [0.9, 0.95]}", ["optim.betas: [0.9, 0.95]"]),
        ("optim={name: adamw, betas: [0.9, 0.95]}", []),
        ("optim.momentum=0; head.momentum_dtype=int8", ['head.momentum_dtype: "int8"']),
        ("head.expectation_margin=0.3", ["head.expectation_margin: 0.3"]),
        ("head.expectation_margin=0.3; train.stages=[{until_epoch: 1, expectations: moving}]", []),
        ("optim={gamma: 0.3, schedule: steps, milestones: [1]}", []),
        (
            "optim={power: 3, schedule: cosine}",
            ["optim.power: 3.0 has no effect without optim.schedule: polynomial"],
        ),
        ("recipe=head; optim.schedule=cosine", []),
        (
            "optim.batch_scaling=sqrt",
            ['optim.batch_scaling: "sqrt" has no effect without train.stages or --batch auto'],
        ),
        ("optim.batch_scaling=sqrt; train.stages=[{until_epoch: 1, batch_size: 2}]", []),
    ],
)
def test_a_value_without_effect_is_reported(value, keys):
    config = build_config({"data": {"train": "x"}}, "x", value.split("; "))
    found = list(start_checks._check_effects(config, scaled=False))
    assert len(found) == len(keys) and all(key in line for key, line in zip(keys, found, strict=True))


def test_a_value_without_effect_in_the_head_of_a_dataset_is_reported(tmp_path):
    write_records(tmp_path / "a", [0, 0, 1, 1], size=8)
    margins = ("{}", "{m3: 0.9}", "{type: cosface}", "{type: cosface, m2: 1.2}")
    parts = "".join(f"- {{path: a, margin: {margin}, loss_weight: 0.5}}\n" for margin in margins)
    (tmp_path / "mixture.yaml").write_text(f"heads: separate\ndatasets:\n{parts}")
    config = build_config(
        {"data": {"train": f"{tmp_path}/mixture.yaml"}, "head": {"margin": {"m2": 0.4}}}, "x"
    )
    found = list(start_checks._check_mixture(config, open_training_data(config.data)))
    assert [line.partition("mixture.yaml: margin of ")[2] for line in found] == [
        "dataset 2: m3: 0.9 has no effect with type arcface",
        "dataset 4: m2: 1.2 has no effect with type cosface",
    ]
    taught = with_values(config, {"distill.teacher": "x", "distill.margin_weight": 0}, "x")
    (line, *others) = start_checks._check_mixture(taught, open_training_data(config.data))
    assert "mixture.yaml: loss_weight of dataset 1: 0.5 has no effect with distill.loss: cosine" in line
    assert len(others) == 2 + 3


class Unit(nn.Module):
    def forward(self, x):
        return F.normalize(x)


@pytest.mark.parametrize(
    ("margin", "normalizes", "reported"),
    [("adaface", True, True), ("magface", True, True), ("adaface", False, False), ("cosface", True, False)],
)
def test_a_margin_of_lengths_over_normalized_embeddings_is_reported(margin, normalizes, reported):
    frozen = nn.BatchNorm1d(4)
    layers = [nn.Flatten(), nn.Linear(3 * 8 * 8, 4), frozen, *[Unit()] * normalizes]
    backbone = OwnNetwork(nn.Sequential(*layers), embedding_size=4, image_size=8)
    head = PartialFC(build_margin(MarginSettings(type=margin)), 4, 3)
    backbone.train()
    frozen.eval()
    state = SimpleNamespace(backbone=backbone, head=head, world=ONE_RANK)
    warnings = list(_check_lengths(state))
    assert len(warnings) == reported
    assert all("embeddings of equal length, 1;" in warning for warning in warnings)
    assert backbone.training and not frozen.training and not frozen.num_batches_tracked
