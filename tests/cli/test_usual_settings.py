"""Options of `facetrain train` for the settings that everybody changes."""

import numpy as np
import pytest

from facetrain.cli.usual_settings import UsualSettings
from facetrain.config.paths import with_downloads
from facetrain.data.formats.bin import write_bin
from facetrain.errors import ConfigError, DataError, UsageError
from facetrain.run.asked_config import asked_config
from facetrain.run.request import TrainRequest
from tests.support.command import refusal
from tests.support.datasets import encoded_image, write_records
from tests.support.object_store import upload


@pytest.fixture
def data(tmp_path):
    write_records(tmp_path / "a: b", [0, 0, 1])
    return tmp_path / "a: b"


def asked(settings, config=None, overrides=()):
    request = TrainRequest(
        config=config,
        overrides=(*settings.overrides(), *overrides),
        own_data=settings.data is not None,
        choose=settings.choose(),
    )
    return asked_config(request)


def write_set(path):
    write_bin(path, [encoded_image(n) for n in range(4)], np.array([True, False]))


def test_a_preset_is_trained_on_another_dataset_without_its_counts_and_missing_sets(data):
    write_set(data / "cfp_fp.bin")
    found = asked(UsualSettings(str(data), epochs=3, batch="64", lr="0.05"), "glint360k", ["optim.lr=0.2"])
    config = found.config
    assert (config.data.train, config.data.num_classes, config.data.num_images) == (str(data), None, None)
    assert (config.train.epochs, config.train.batch_size, config.optim.lr) == (3, 64, 0.2), "--set wins"
    assert (
        config.eval.targets == ("cfp_fp",)
        and {"data.train", "eval.targets", "train.epochs"} <= found.set_keys
    )
    assert found.remarks == (f"{data} has no verification sets lfw, agedb_30: training goes without",)


def test_if_the_sets_of_the_config_are_missing_those_beside_the_data_are_used(data):
    assert asked(UsualSettings(str(data)), "glint360k").config.eval.targets == ()
    write_set(data / "own.bin")
    found = asked(UsualSettings(str(data)), "glint360k")
    assert found.config.eval.targets == ("own",) and "own" in found.remarks[0]
    assert found.given["eval"]["targets"] == ["lfw", "cfp_fp", "agedb_30"], "another host may give the same"


@pytest.mark.parametrize("ending", [".bin", ".xz", ".bin.xz"])
def test_a_set_beside_the_data_may_be_compressed(data, ending):
    (data / f"lfw{ending}").touch()  # it is looked for, and not read yet
    assert asked(UsualSettings(str(data)), "glint360k").config.eval.targets == ("lfw",)
    (data / f"lfw{ending}").rename(data / f"own{ending}")
    assert asked(UsualSettings(str(data)), "glint360k").config.eval.targets == ("own",)


def test_a_folder_with_the_name_of_a_set_is_no_set(data, monkeypatch):
    monkeypatch.chdir(data)
    for folder in ("lfw", "CFP_FP", "own.bin"):
        (data / folder).mkdir()
    assert asked(UsualSettings(str(data)), "glint360k").config.eval.targets == ()
    write_set(data / "lfw.bin")
    assert asked(UsualSettings(str(data)), "glint360k").config.eval.targets == ("lfw",)
    (data / "cfp_fp").touch()  # the run says that it is no set
    assert asked(UsualSettings(str(data)), "glint360k").config.eval.targets == ("lfw", "cfp_fp")


def test_sets_that_are_chosen_stay(data):
    found = asked(UsualSettings(str(data)), "glint360k", ["eval.dir=sets"])
    assert found.config.eval.targets == ("lfw", "cfp_fp", "agedb_30") and not found.remarks


def test_the_sets_beside_data_in_a_store_are_used(data, store):
    upload(data, "ms1m")
    address = "s3://bucket/ms1m"
    none = asked(UsualSettings(address), "glint360k")
    assert none.config.eval.targets == () and f"{address} has no verification sets lfw" in none.remarks[0]
    write_set(data / "own.bin")
    (data / "other.XZ").touch()
    upload(data, "ms1m")
    assert asked(UsualSettings(address), "glint360k").config.eval.targets == ("other.XZ", "own")
    write_set(data / "cfp_fp.bin")
    upload(data, "ms1m")
    for name in ("lfw.xz", "agedb_30.bin.xz", "cfp_fp.xz"):
        (data / name).touch()  # it is looked for, and not read yet
    upload(data, "ms1m")
    found = asked(UsualSettings(address), "glint360k").config
    assert found.eval.targets == ("lfw.xz", "cfp_fp", "agedb_30.bin.xz"), "the .bin of two files"
    files = ("lfw.xz", "cfp_fp.bin", "agedb_30.bin.xz")
    assert with_downloads(found, pin=str).eval.targets == tuple(f"{address}/{file}" for file in files)
    with pytest.raises(DataError, match="s3://bucket/none: not found"):
        asked(UsualSettings("s3://bucket/none"))


def test_a_set_at_an_address_and_those_beside_data_that_cannot_be_listed_stay(data):
    address, target = "hf://datasets/org/faces", "s3://bucket/lfw.bin"
    config = {"data": {"train": "x"}, "eval": {"targets": [target]}}
    assert asked(UsualSettings(str(data)), config).config.eval.targets == (target,)
    found = asked(UsualSettings(address), "glint360k")
    assert found.config.eval.targets == ("lfw", "cfp_fp", "agedb_30") and not found.remarks


def test_a_dataset_alone_is_trained_with_the_default_of_each_key(data):
    config = asked(UsualSettings(str(data))).config
    assert (config.data.train, config.eval.targets, config.model.backbone) == (str(data), (), "r50")


def test_a_batch_replaces_the_batch_of_all_processes_and_data_the_drawn_faces(data):
    config = asked(UsualSettings(str(data), batch="8"), "quickstart").config
    assert (config.train.batch_size, config.train.global_batch_size) == (8, None)


def test_without_data_there_is_no_training():
    assert isinstance(refusal("train"), UsageError)


def test_a_setting_is_chosen_or_given(data):
    settings = UsualSettings(str(data), batch="auto", lr="find")
    assert settings.choose() == ("batch", "lr") and asked(settings).config.train.batch_size is None
    for settings, override, message in (
        (
            UsualSettings(str(data), batch="auto"),
            "train.batch_size=8",
            "--batch auto and --set train.batch_size",
        ),
        (UsualSettings(str(data), lr="find"), "optim.lr=1", "--lr find and --set optim.lr"),
        (UsualSettings(str(data), lr="0,1"), "seed=1", "--lr 0,1: give a number or find"),
    ):
        with pytest.raises(UsageError, match=message):
            asked(settings, None, [override])


def test_a_number_that_cannot_be_is_refused_as_with_set():
    error = refusal("train", "--preset", "quickstart", "--epochs", -1)
    assert isinstance(error, ConfigError) and "train.epochs" in str(error)
