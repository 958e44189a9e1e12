"""Damaged and crafted checkpoints: nothing in them runs, and nothing outside their folder is read."""

import os
import pickle
import threading

import pytest
from safetensors.torch import save_file

from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.manifest import MANIFEST
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.errors import CheckpointError, DamagedCheckpointError
from facetrain.files import sha256_of
from tests.support.checkpoints import edit, flip_a_bit, rewrite, saved, update_manifest
from tests.support.snapshots import snapshot


def replace_by_link(path, target):
    path.unlink()
    path.symlink_to(target)


DAMAGE = {
    "a file cut off": (lambda f: os.truncate(f / "replicated.safetensors", 50), r"checksum .*\(50 of "),
    "a bit changed": (lambda f: flip_a_bit(f / "replicated.safetensors"), "checksum"),
    "a file missing": (lambda f: (f / "rank_00000.safetensors").unlink(), "missing or not"),
    "a link to a file elsewhere": (
        lambda f: replace_by_link(f / "rank_00000.safetensors", "/etc/passwd"),
        "not a regular file",
    ),
    "a link to a file inside": (
        lambda f: replace_by_link(f / "rank_00000.safetensors", "replicated.safetensors"),
        "not a regular file",
    ),
    "a pipe that never ends": (
        lambda f: ((f / "rank_00000.safetensors").unlink(), os.mkfifo(f / "rank_00000.safetensors")),
        "not a regular file",
    ),
    "a manifest that is an endless device": (
        lambda f: replace_by_link(f / MANIFEST, "/dev/zero"),
        "not a regular file",
    ),
    "a manifest changed": (
        lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text().replace('"step": 1', '"step": 2')),
        "checksum of the manifest itself",
    ),
    "a name that leads out of the folder": (
        lambda f: edit(f, name="../../secret.safetensors"),
        r"files\.0\.name: ",
    ),
    "an absolute file name": (lambda f: edit(f, name="/etc/passwd"), r"files\.0\.name: "),
    "a name with a zero byte": (lambda f: edit(f, name="a\0.safetensors"), r"files\.0\.name: "),
    "a name that is a list": (lambda f: edit(f, name=["rank_00000.safetensors"]), r"files\.0\.name: "),
    "a negative size": (lambda f: edit(f, size=-1), r"files\.0\.size: "),
    "an absurd size": (lambda f: edit(f, size=1 << 80), r"files\.0\.size: "),
    "a size that is a word": (lambda f: edit(f, size="big"), r"files\.0\.size: "),
    "rows past the last class": (lambda f: edit(f, start=0, stop=1 << 40), "past the last class"),
    "rows without an end": (lambda f: edit(f, stop=None), "invalid rows"),
    "an unknown field": (lambda f: edit(f, extra=1), "not the manifest"),
    "a field with a line break": (lambda f: edit(f, **{"a\nb": 1}), r"files\.0\.a\\nb: "),
    "a field with the name of an argument": (
        lambda f: rewrite(f, lambda b: b.update(__dataclass_self__=1)),
        "not the manifest",
    ),
    "a file named twice": (
        lambda f: rewrite(f, lambda b: b["files"].append(b["files"][0])),
        "a file is listed twice",
    ),
    "a step that is a word": (lambda f: rewrite(f, lambda b: b.update(step="one")), "not the manifest"),
    "metrics that are words": (
        lambda f: rewrite(f, lambda b: b["metrics"].update(a="high")),
        r"metrics\.a: ",
    ),
    "nesting without end": (lambda f: (f / MANIFEST).write_text("[" * 100_000), "cannot be read"),
    "a manifest of 65 MiB": (lambda f: os.truncate(f / MANIFEST, (1 << 26) + 1), "that a manifest may have"),
    "a manifest that is a pickle": (
        lambda f: (f / MANIFEST).write_bytes(pickle.dumps({"format": 1})),
        "cannot be read",
    ),
    "another format": (lambda f: (f / MANIFEST).write_text('{"format": 2}'), "another version"),
    "no manifest at all": (lambda f: (f / MANIFEST).write_text("3"), "not the manifest"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_crafted_checkpoint_is_refused(tmp_path, damage):
    change, message = DAMAGE[damage]
    folder = saved(tmp_path)
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder).verify()


def test_a_damaged_file_ends_the_comparison_while_another_file_is_read(tmp_path, monkeypatch):
    folder, goes_on, read = saved(tmp_path), threading.Event(), []
    (folder / "rank_00000.safetensors").unlink()

    def slow_sha256_of(path):
        goes_on.wait(10)
        read.append(path)
        return sha256_of(path)

    monkeypatch.setattr("facetrain.checkpoint.load.sha256_of", slow_sha256_of)
    with pytest.raises(DamagedCheckpointError, match=r"rank_00000\.safetensors: missing"):
        Checkpoint(folder).verify()
    assert not read, "nothing has waited for it"
    goes_on.set()


def test_a_file_with_a_valid_checksum_that_is_not_safetensors_is_refused(tmp_path):
    folder = saved(tmp_path)
    path = folder / "replicated.safetensors"
    path.write_bytes(pickle.dumps({"w": 1}))
    update_manifest(folder, path)
    with pytest.raises(CheckpointError, match="replicated.safetensors"):
        Checkpoint.open(tmp_path).replicated()


def test_a_table_with_fewer_rows_than_the_manifest_lists_is_refused(tmp_path):
    folder = saved(tmp_path)
    path = folder / "rows_00000_of_00001.safetensors"
    save_file({"weight": snapshot(1).rows[0].tables["weight"][:5].contiguous()}, path)
    update_manifest(folder, path)
    with pytest.raises(CheckpointError, match="fewer rows"):
        Checkpoint.open(tmp_path).rows("weight", 0, 11)


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "step_1/../../..", "", "x" * 10_000])
def test_latest_can_only_name_a_checkpoint_in_the_same_folder(tmp_path, name):
    saved(tmp_path)
    (tmp_path / "latest").write_text(name)
    with pytest.raises(CheckpointError, match=r"/latest: "):
        Checkpoint.open(tmp_path / "latest")
    assert Checkpoint.open(tmp_path).step == 1


def test_a_sound_checkpoint_of_another_run_is_not_advised(tmp_path):
    (tmp_path / "run_id.txt").write_text("0123456789abcdef")
    writer = CheckpointWriter(tmp_path / "checkpoints", asynchronous=False)
    for step, run_id in ((1, "0123456789abcdef"), (2, "fedcba9876543210"), (3, "0123456789abcdef")):
        writer.save(snapshot(step, meta={"run_id": run_id}))
    flip_a_bit(tmp_path / "checkpoints" / "step_00000003" / "replicated.safetensors")
    with pytest.raises(CheckpointError, match="the newest sound checkpoint is step 1: "):
        Checkpoint.open(tmp_path).replicated("backbone.")


@pytest.mark.parametrize("code", [{}, {"code model.backbone": "9f86"}, {"code": {"model.backbone": "9f86"}}])
def test_the_advised_command_allows_the_code_of_the_run(tmp_path, code):
    writer = CheckpointWriter(tmp_path / "checkpoints", asynchronous=False)
    for step in (1, 2):
        writer.save(snapshot(step, meta=code))
    command = f"`facetrain resume {tmp_path} --checkpoint 1{' --allow-code' * bool(code)}`"
    flip_a_bit(tmp_path / "checkpoints" / "step_00000002" / "replicated.safetensors")
    with pytest.raises(CheckpointError, match=command):
        Checkpoint.open(tmp_path).replicated("backbone.")
