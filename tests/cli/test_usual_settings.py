"""Options of `facetrain train` for the settings that everybody changes."""

from pathlib import Path

import numpy as np
import pytest

from facetrain.cli.usual_settings import UsualSettings
from facetrain.data.formats.bin import write_bin
from facetrain.errors import ConfigError, UsageError
from tests.support.command import refusal
from tests.support.datasets import encoded_image, write_records


@pytest.fixture
def data(tmp_path):
    write_records(tmp_path / "a: b", [0, 0, 1])
    return tmp_path / "a: b"


def test_a_preset_is_trained_on_another_dataset_without_its_counts_and_missing_sets(data, capsys):
    write_bin(data / "cfp_fp.bin", [encoded_image(n) for n in range(4)], np.array([True, False]))
    config, keys = UsualSettings(str(data), epochs=3, batch="64", lr="0.05").load(
        Path("glint360k"), ["optim.lr=0.2"]
    )
    assert (config.data.train, config.data.num_classes, config.data.num_images) == (str(data), None, None)
    assert (config.train.epochs, config.train.batch_size, config.optim.lr) == (3, 64, 0.2), "--set wins"
    assert config.eval.targets == ("cfp_fp",) and {"data.train", "eval.targets", "train.epochs"} <= keys
    assert f"{data} has no verification sets lfw, agedb_30: training goes without" in capsys.readouterr().out


def test_sets_that_are_chosen_stay(data, capsys):
    config, _ = UsualSettings(str(data)).load(Path("glint360k"), ["eval.dir=sets"])
    assert config.eval.targets == ("lfw", "cfp_fp", "agedb_30") and not capsys.readouterr().out


def test_a_dataset_alone_is_trained_with_the_default_of_each_key(data):
    config, _ = UsualSettings(str(data)).load(None, [])
    assert (config.data.train, config.eval.targets, config.model.backbone) == (str(data), (), "r50")


def test_a_batch_replaces_the_batch_of_all_processes_and_data_the_drawn_faces(data):
    config, _ = UsualSettings(str(data), batch="8").load(Path("quickstart"), [])
    assert (config.train.batch_size, config.train.global_batch_size) == (8, None)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (UsualSettings(), UsageError, "give --config FILE, --preset NAME or --data DATASET"),
        (UsualSettings("nowhere"), UsageError, "--data nowhere: no such file or folder"),
    ],
)
def test_without_data_there_is_no_training(settings, error, message):
    with pytest.raises(error, match=message):
        settings.load(None, [])


def test_a_setting_is_chosen_or_given(data):
    config, keys = UsualSettings(str(data), batch="auto", lr="find").load(None, [])
    choices = UsualSettings(str(data), batch="auto", lr="find").choices(keys)
    assert (config.train.batch_size, choices.lr, choices.batch.keywords) == (None, True, {"keep_lr": True})
    for settings, override, message in (
        (
            UsualSettings(str(data), batch="auto"),
            "train.batch_size=8",
            "--batch auto and --set train.batch_size: give one",
        ),
        (UsualSettings(str(data), lr="find"), "optim.lr=1", "--lr find and --set optim.lr: give one of them"),
        (UsualSettings(str(data), lr="0,1"), "seed=1", "--lr 0,1: give a number or find"),
    ):
        with pytest.raises(UsageError, match=message):
            settings.load(None, [override])


def test_a_number_that_cannot_be_is_refused_as_with_set():
    error = refusal("train", "--preset", "quickstart", "--epochs", -1)
    assert isinstance(error, ConfigError) and "train.epochs" in str(error)
