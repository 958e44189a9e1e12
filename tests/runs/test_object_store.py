"""Runs whose training data are in an object store."""

import json
import os

import pytest
from safetensors.torch import load_file

from facetrain.cli.app import app
from facetrain.config.loading import load_config
from facetrain.errors import ConfigError
from tests.support import training
from tests.support.command import facetrain
from tests.support.datasets import write_records
from tests.support.object_store import upload
from tests.support.runs import checked, losses

KEYS = ("AKIAPLANTEDKEY", "planted-word-of-the-secret")


@pytest.fixture
def url(dataset, object_store, monkeypatch, tmp_path):
    """Address of the dataset in a store that needs 50 ms for an answer, and fails at one request of twenty."""
    for name, value in zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), KEYS, strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    url = upload(dataset / "data")
    object_store.latency_s, object_store.failing = 0.05, 0.05
    return url


def weights(run):
    """Return the bytes of each weight; the file also has the name of the dataset."""
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(run / "model.safetensors").items()}


@pytest.mark.slow
def test_a_run_from_a_slow_failing_store_equals_one_from_the_disk_also_after_a_resume(
    url, dataset, describe, tmp_path, object_store, capfd
):
    config, settings = describe(), ["data.shuffle=blocks", f"eval.dir={dataset}/data"]
    assert training.train(load_config(config, settings), tmp_path / "disk") == 0
    cache = [f"data.cache={tmp_path}/cache", "data.cache_bytes=300000"]
    remote = [*settings, f"data.train={url}", *cache, "data.workers=1"]
    assert training.train(load_config(config, remote), tmp_path / "store") == 0
    expected = weights(tmp_path / "disk")
    assert losses(tmp_path / "store") == losses(tmp_path / "disk")
    assert weights(tmp_path / "store") == expected
    assert training.resume(load_config(config, remote), tmp_path / "store", 4) == 0
    assert losses(tmp_path / "store") == losses(tmp_path / "disk")
    assert weights(tmp_path / "store") == expected
    assert object_store.failures
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    printed = "".join(capfd.readouterr()).encode()
    assert url.encode() in b"".join(written)
    assert not any(key.encode() in text for key in KEYS for text in [*written, printed])

    other = write_records(tmp_path / "other", [n // 6 for n in range(120)], size=32)
    (other / "train.rec").write_bytes((other / "train.rec").read_bytes()[:-1] + b"1")
    upload(other)
    with pytest.raises(ConfigError, match="was trained with other objects in the store"):
        training.resume(load_config(config, remote), tmp_path / "store", 4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_that_share_a_small_cache_see_the_images_of_the_disk(ranks, url, dataset, describe, tmp_path):
    variables = {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "XDG_CACHE"))}
    settings = ["data.shuffle=blocks", f"eval.dir={dataset}/data", "train.global_batch_size=24"]
    cache = [f"data.cache={tmp_path}/cache", "data.cache_bytes=300000"]
    remote = [f"data.train={url}", *cache, "data.workers=1"]
    for name, changes in (("disk", [*settings, "data.workers=0"]), ("store", [*settings, *remote])):
        sets = [word for change in changes for word in ("--set", change)]
        arguments = ("--config", describe(steps=6), "--run-dir", tmp_path / name, "--nproc-per-node", ranks)
        checked(facetrain("train", *arguments, *sets, variables=variables))
    assert losses(tmp_path / "store") == losses(tmp_path / "disk")
    assert weights(tmp_path / "store") == weights(tmp_path / "disk")


@pytest.mark.slow
def test_plan_doctor_and_inspect_read_the_numbers_of_a_remote_dataset(url, dataset, describe, capsys):
    settings = [f"data.train={url}", f"eval.dir={dataset}/data"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert not app(["data", "inspect", url, "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["images"] == 120
    plan = ["plan", "--config", str(describe()), "--memory", "8", "--json"]
    assert not app([*plan, *arguments], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["fits"]
    with pytest.raises(SystemExit, match="0"):
        app(["doctor", "--config", str(describe()), *arguments], standalone_mode=False)
    assert "20 identities" in capsys.readouterr().out
