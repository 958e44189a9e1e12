"""Resuming from crafted checkpoints, and from one with optimizer states in channels_last."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from facetrain.config.loading import load_config
from facetrain.errors import CheckpointError, RunError
from facetrain.head.partial_fc import PartialFC
from facetrain.telemetry.jsonl import read_jsonl
from tests.runs.conftest import train_and_resume
from tests.support import training
from tests.support.checkpoints import update_manifest
from tests.support.datasets import damage_records


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    """The folder of a run of two steps, and its config."""
    folder = tmp_path_factory.mktemp("state")
    config = load_config(training.write_tiny_config(folder, dataset, train={"max_steps": 2}))
    assert training.train(config, folder / "run") == 0
    return folder / "run", config


CRAFTED = {
    "a backbone without a layer": ("replicated", lambda t: t.pop("backbone.conv1.weight")),
    "momentum of a parameter whose name is a path": (
        "replicated",
        lambda t: t.update({"optimizer.../../etc/passwd.momentum_buffer": torch.zeros(3)}),
    ),
    "momentum of another shape": (
        "replicated",
        lambda t: t.update({"optimizer.conv1.weight.momentum_buffer": torch.zeros(1 << 10)}),
    ),
    "momentum of another dtype": (
        "replicated",
        lambda t: t.update({"optimizer.conv1.weight.momentum_buffer": torch.zeros(8, 3, 3, 3).double()}),
    ),
    "no loss scale": ("replicated", lambda t: t.pop("scale.value")),
    "sums of the metrics that are not pairs": (
        "replicated",
        lambda t: t.update({"meter.loss": torch.zeros(3)}),
    ),
    "centers of another length": ("rows_00000_of_00001", lambda t: t.update(weight=torch.zeros(20, 5))),
    "no statistics of a batch norm": ("rank_00000", lambda t: t.pop("buffer.bn1.running_mean")),
    "statistics of three channels": (
        "rank_00000",
        lambda t: t.update({"buffer.bn1.running_mean": torch.zeros(3)}),
    ),
}


@pytest.mark.parametrize("crafted", CRAFTED)
def test_a_checkpoint_that_no_run_saves_is_refused_and_nothing_outside_is_written(
    finished, tmp_path, crafted
):
    shutil.copytree(finished[0], tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step_00000002"
    stem, change = CRAFTED[crafted]
    path = folder / f"{stem}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    update_manifest(folder, path)
    with pytest.raises(CheckpointError, match="step_00000002"):
        training.go_on(tmp_path / "run", changes=["train.max_steps=4"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_too_little_memory_for_a_checkpoint_is_not_taken_for_another_network(finished, tmp_path, monkeypatch):
    shutil.copytree(finished[0], tmp_path / "run")

    def load_rows(head, read):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(PartialFC, "load_rows", load_rows)
    with pytest.raises(RunError, match="^rank 0: too little memory"):
        training.go_on(tmp_path / "run", changes=["train.max_steps=4"])


@pytest.mark.parametrize("optimizer", [{"name": "sgd"}, {"name": "adamw"}, {"muon": {"lr": 0.01}}])
def test_a_network_in_channels_last_resumes_bit_for_bit(dataset, tmp_path, optimizer):
    config = training.write_tiny_config(
        tmp_path,
        dataset,
        # With 16 channels and more, the weights are in channels_last on a CPU too.
        model={"widths": [16] * 4},
        optim={"lr": 0.01} | optimizer,
        train={"max_steps": 3},
        checkpoint={"every_steps": 1},
    )
    train_and_resume(load_config(config), tmp_path / "run", 1)


def test_a_resumed_run_reports_the_same_loss_and_counts_skipped_images_once(dataset, tmp_path):
    shutil.copytree(dataset / "data", tmp_path / "data")
    damage_records(tmp_path / "data" / "train.rec", (5, 6, 70))
    described = training.write_tiny_config(
        tmp_path,
        tmp_path,
        data={"bad_records": "skip"},
        train={"max_steps": 8},
        checkpoint={"every_steps": 4},
        log={"every_steps": 3},
    )
    config, folder = load_config(described), tmp_path / "run"

    def reports():
        records = read_jsonl(folder / "metrics.jsonl")
        return [(one["step"], one["loss"], one["skipped_images"]) for one in records]

    assert training.train(config, folder) == 0
    expected, listed = reports(), (folder / "skipped_images.txt").read_text()
    assert [step for step, _, _ in expected] == [3, 6, 8] and expected[-1][2] == listed.count("\n") == 3
    (folder / "skipped_images.txt").unlink()
    assert training.resume(config, folder, 4) == 0
    assert reports() == expected and (folder / "skipped_images.txt").read_text() == listed
