"""Runs and evaluations whose models and sets are addresses."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from facetrain.remote.filesystem import open_filesystem
from tests.support.command import FOR_ADDRESSES, environment, facetrain
from tests.support.runs import checked

SECRET = "planted1234"
KEYS = {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ACCESS_KEY_ID": f"id{SECRET}", "HF_TOKEN": f"hf_{SECRET}"}


@pytest.fixture
def finish(object_store, tmp_path):
    """Run a command with an empty cache and planted keys; return exit code and everything that it prints."""

    def run(*arguments, **variables):
        names = ("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")
        given = (
            {name: os.environ[name] for name in names} | KEYS | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        )
        done = facetrain(*arguments, variables=given | variables)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def model(dataset, describe, object_store, tmp_path):
    """A trained model and a verification set in the store; the config of a run that begins with them."""
    config = describe(steps=2, checkpoint="every_steps: 9")
    checked(facetrain("train", "--config", config, "--run-dir", tmp_path / "first"))
    store, _ = open_filesystem("s3://bucket")
    store.put_file(str(tmp_path / "first" / "model.safetensors"), "bucket/m.safetensors")
    store.put_file(str(dataset / "data" / "val.bin"), "bucket/sets/far.bin")
    values = yaml.safe_load(config.read_text())
    values["model"]["init_from"] = "s3://bucket/m.safetensors"
    values["eval"]["targets"] = ["s3://bucket/sets/far.bin"]
    config.write_text(yaml.safe_dump(values))
    object_store.requests.clear()
    return config


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def downloads(object_store):
    return [path for method, path, span in object_store.requests if method == "GET" and span]


@pytest.mark.slow
def test_a_run_on_two_ranks_downloads_once_records_versions_and_resumes_without_the_store(
    model, finish, object_store, tmp_path
):
    run = tmp_path / "run"
    code, text = finish("train", "--config", model, "--run-dir", run, "--nproc-per-node", 2)
    assert code == 0, text
    assert sorted(downloads(object_store)) == ["/bucket/m.safetensors", "/bucket/sets/far.bin"]
    assert "--data-dir" not in text, "the command that evaluates the run needs none"
    assert text.count("terms: unknown") == 2 and "far" in (run / "metrics.jsonl").read_text()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["init_from"].startswith("s3://bucket/m.safetensors#sha256=")
    object_store.requests.clear()
    shutil.rmtree(tmp_path / "cache" / "facetrain" / "downloads")
    code, text = finish("resume", run, "--set", "train.max_steps=4")
    assert code == 0, text
    assert downloads(object_store) == ["/bucket/sets/far.bin"], "the weights are those of the checkpoint"
    store, _ = open_filesystem("s3://bucket")
    store.pipe_file("bucket/sets/far.bin", b"changed")
    shutil.rmtree(tmp_path / "cache" / "facetrain" / "downloads")
    code, text = finish("resume", run, "--set", "train.max_steps=6")
    assert code == 1 and "s3://bucket/sets/far.bin: its checksum is not the expected one" in text


@pytest.mark.slow
def test_keys_are_in_no_file_and_no_output_of_a_run_an_eval_and_a_download(
    model, finish, web_server, object_store, tmp_path
):
    web_server.files["/m.safetensors"] = (tmp_path / "first" / "model.safetensors").read_bytes()
    signed = f"http://user:{SECRET}@{web_server.address.removeprefix('http://')}/m.safetensors?sig={SECRET}"
    evaluation = ("eval", signed, "--target", "s3://bucket/sets/far.bin", "--report", tmp_path / "report")
    mirrored, secret = ("--set", "checkpoint.mirror=s3://bucket/runs"), f"s3://id:{SECRET}@bucket/runs"
    full = ("--set", "checkpoint.mirror=s3://bucket/full")
    printed = []
    for expected, arguments in (
        (1, ("train", "--config", model, "--run-dir", tmp_path / "run", *full)),
        (0, ("train", "--config", model, "--run-dir", tmp_path / "mirrored", *mirrored)),
        (2, ("train", "--config", model, "--set", f"checkpoint.mirror={secret}")),
        (2, ("resume", f"{secret}/run")),
        (0, evaluation),
        (0, ("get", signed, "--output", tmp_path / "copy.safetensors")),
        (2, ("get", signed.replace("m.safetensors", "none"), "--debug")),
        (2, ("get", f"s3://{SECRET}:{SECRET}@bucket/none", "--debug")),
        (2, ("train", "--config", model, "--set", f"model.init_from={signed}")),
        (2, ("plan", signed, "--config", model)),
        (2, ("train", "--config", model, "--data", f"s3://user:{SECRET}@bucket/none")),
    ):
        object_store.full = full[1] in arguments
        code, text = finish(*arguments)
        assert code == expected or (code == 1 and "--debug" in arguments), text
        printed.append(text)
    assert not [text for text in printed if SECRET in text] and "not in checkpoint.mirror" in printed[0]
    leaks = [path for path, content in contents(tmp_path).items() if SECRET in f"{path}{content!r}"]
    assert leaks == []
    store, _ = open_filesystem("s3://bucket")
    uploaded = {path: store.cat_file(path) for path in store.find("bucket/runs")}
    assert any(path.endswith("log.txt") for path in uploaded) and any(
        "checkpoints" in path for path in uploaded
    )
    assert not [path for path, content in uploaded.items() if SECRET in f"{path}{content!r}"]


def test_without_an_address_nothing_of_the_extra_is_imported():
    every_import = environment(PYTHONPROFILEIMPORTTIME="1")
    for arguments in (["--help"], ["get"]):
        command = [sys.executable, "-m", "facetrain", *arguments]
        done = subprocess.run(command, env=every_import, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M))
        assert "facetrain.cli.app" in imported and not imported & FOR_ADDRESSES
