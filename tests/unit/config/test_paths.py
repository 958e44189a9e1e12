"""Paths and addresses in a config."""

from pathlib import Path

import pytest

from facetrain.config.loading import build_config, plain_config
from facetrain.config.paths import with_absolute_paths, with_downloads, with_paths_of_sets
from facetrain.errors import DataError

PATHS = (
    "run.dir",
    "data.train",
    "data.cache",
    "model.init_from",
    "distill.teacher",
    "distill.cache",
    "eval.dir",
)


def test_every_path_of_a_config_becomes_absolute_and_an_address_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"eval": {"targets": ["./own.bin", "lfw", "/sets/a.bin"]}}
    for key in PATHS:
        section, name = key.split(".")
        values.setdefault(section, {})[name] = f"folder/{name}"
    plain = plain_config(with_absolute_paths(build_config(values, "test")))
    for key in PATHS:
        section, name = key.split(".")
        assert plain[section][name] == f"{tmp_path}/folder/{name}", key
    assert plain["eval"]["targets"] == [f"{tmp_path}/own.bin", "lfw", "/sets/a.bin"]
    remote = build_config({"data": {"train": "s3://bucket/faces"}}, "test")
    assert with_absolute_paths(remote).data.train == "s3://bucket/faces"


def test_a_set_is_a_path_if_there_is_one_and_none_of_this_name_in_the_folder_of_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sets/own").mkdir(parents=True)
    Path("own").mkdir()
    for path in ("val.bin", "val.XZ", "both.bin", "sets/both.bin", "own/a.bin", "lfw"):
        Path(path).touch()
    targets = ["val.bin", "both.bin", "own/a.bin", "lfw", "absent.bin", "./val.bin", "val.XZ"]
    config = build_config({"data": {"train": "x"}, "eval": {"dir": "sets", "targets": targets}}, "test")
    found = with_paths_of_sets(config).eval.targets
    names = ["both.bin", "./own/a.bin", "lfw", "absent.bin"]
    assert list(found) == ["./val.bin", *names, "./val.bin", "./val.XZ"]


@pytest.mark.parametrize(
    "folder",
    ["data.train=s3://bucket/shards", "data.train=s3://bucket/shards/", "eval.dir=s3://bucket/shards/"],
)
def test_in_a_remote_folder_a_name_of_a_set_becomes_an_address_and_a_path_stays(folder):
    targets = ["agedb", "cfp.bin", "vgg.xz", "/sets/lfw.bin", "./own.bin", "hf://o/r/x.bin"]
    config = build_config({"data": {"train": "x"}, "eval": {"targets": targets}}, "test", [folder])
    found = with_downloads(config, lambda address: f"{address}#1").eval.targets
    names = [f"s3://bucket/shards/{file}#1" for file in ("agedb.bin", "cfp.bin", "vgg.xz")]
    assert list(found) == [*names, "/sets/lfw.bin", "./own.bin", "hf://o/r/x.bin#1"]


def test_an_address_that_cannot_be_used_is_named_with_its_key():
    config = build_config({"data": {"train": "s3://bucket/shards"}, "eval": {"targets": ["lfw"]}}, "test")

    def refuse(address):
        raise DataError(f"{address}: not found")

    with pytest.raises(
        DataError, match=r"^eval\.targets: s3://bucket/shards/lfw\.bin.*`eval\.targets: \[\]`"
    ):
        with_downloads(config, refuse)
