"""Crafted checkpoints: nothing in them runs, and nothing outside their folder is read."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from facetrain.checkpoint import manifest as manifests
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.manifest import NAME
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.errors import CheckpointError, ModelError
from facetrain.models.model_file import open_model
from facetrain.models.weight_files import read_weights
from tests.support.snapshots import snapshot


def saved(tmp_path):
    CheckpointWriter(tmp_path, asynchronous=False).save(snapshot(1))
    return tmp_path / "step_00000001"


def edit(folder, file=0, **changes):
    """Change a file's entry; the manifest's own checksum is made right again, as an attacker would."""
    rewrite(folder, lambda body: body["files"][file].update(changes))


def rewrite(folder, change):
    body = json.loads((folder / NAME).read_text())
    body = {key: body[key] for key in body if key not in ("format", "sha256")}
    change(body)
    (folder / NAME).write_text(json.dumps({"format": 1, "sha256": manifests._sum_of(body)} | body))


def replace_by_link(path, target):
    path.unlink()
    path.symlink_to(target)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a file cut off": (lambda f: os.truncate(f / "replicated.safetensors", 50), "has 50 bytes"),
    "a bit changed": (lambda f: flip_a_bit(f / "replicated.safetensors"), "checksum"),
    "a file missing": (lambda f: (f / "rank_00000.safetensors").unlink(), "is missing"),
    "a link to a file elsewhere": (
        lambda f: replace_by_link(f / "rank_00000.safetensors", "/etc/passwd"),
        "no plain file",
    ),
    "a link to a file inside": (
        lambda f: replace_by_link(f / "rank_00000.safetensors", "replicated.safetensors"),
        "no plain file",
    ),
    "a pipe that never ends": (
        lambda f: ((f / "rank_00000.safetensors").unlink(), os.mkfifo(f / "rank_00000.safetensors")),
        "no plain file",
    ),
    "a manifest that is an endless device": (
        lambda f: replace_by_link(f / NAME, "/dev/zero"),
        "no plain file",
    ),
    "a manifest changed": (
        lambda f: (f / NAME).write_text((f / NAME).read_text().replace('"step": 1', '"step": 2')),
        "own checksum",
    ),
    "a name that climbs": (lambda f: edit(f, name="../../secret.safetensors"), "which no checkpoint has"),
    "a name from the root": (lambda f: edit(f, name="/etc/passwd"), "which no checkpoint has"),
    "a name with a zero byte": (lambda f: edit(f, name="a\0.safetensors"), "which no checkpoint has"),
    "a name that is a list": (lambda f: edit(f, name=["rank_00000.safetensors"]), "which no checkpoint has"),
    "a negative size": (lambda f: edit(f, size=-1), "makes no sense"),
    "an absurd size": (lambda f: edit(f, size=1 << 80), "makes no sense"),
    "a size that is a word": (lambda f: edit(f, size="big"), "makes no sense"),
    "rows past the last class": (lambda f: edit(f, start=0, stop=1 << 40), "makes no sense"),
    "rows without an end": (lambda f: edit(f, stop=None), "makes no sense"),
    "an unknown field": (lambda f: edit(f, extra=1), "is no manifest"),
    "a file named twice": (lambda f: rewrite(f, lambda b: b["files"].append(b["files"][0])), "twice"),
    "a step that is a word": (lambda f: rewrite(f, lambda b: b.update(step="one")), "is no manifest"),
    "metrics that are words": (lambda f: rewrite(f, lambda b: b["metrics"].update(a="high")), "no numbers"),
    "nesting without end": (lambda f: (f / NAME).write_text("[" * 100_000), "cannot be read"),
    "a manifest of 65 MiB": (lambda f: os.truncate(f / NAME, (1 << 26) + 1), "too many"),
    "a manifest that is a pickle": (
        lambda f: (f / NAME).write_bytes(pickle.dumps({"format": 1})),
        "cannot be read",
    ),
    "another format": (lambda f: (f / NAME).write_text('{"format": 2}'), "another version"),
    "no manifest at all": (lambda f: (f / NAME).write_text("3"), "is no manifest"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_crafted_checkpoint_is_refused(tmp_path, damage):
    change, said = DAMAGE[damage]
    folder = saved(tmp_path)
    change(folder)
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(folder).verify()


def vouch_for(folder, path):
    """Make the manifest agree with a file that has been changed."""
    names = [entry["name"] for entry in json.loads((folder / NAME).read_text())["files"]]
    data = path.read_bytes()
    edit(folder, names.index(path.name), size=len(data), sha256=manifests.sha256_of(path))


def test_files_that_the_manifest_vouches_for_and_are_no_tensors_are_refused(tmp_path):
    folder = saved(tmp_path)
    path = folder / "replicated.safetensors"
    path.write_bytes(pickle.dumps({"w": 1}))
    vouch_for(folder, path)
    with pytest.raises(CheckpointError, match="replicated.safetensors"):
        Checkpoint.open(tmp_path).replicated()


def test_a_table_with_fewer_rows_than_the_manifest_says_is_refused(tmp_path):
    folder = saved(tmp_path)
    path = folder / "rows_00000_of_00001.safetensors"
    save_file({"weight": snapshot(1).rows["weight"][:5].contiguous()}, path)
    vouch_for(folder, path)
    with pytest.raises(CheckpointError, match="fewer rows"):
        Checkpoint.open(tmp_path).rows("weight", 0, 11)


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "step_1/../../..", "", "x" * 10_000])
def test_latest_leads_nowhere_but_to_a_checkpoint_beside_it(tmp_path, name):
    saved(tmp_path)
    (tmp_path / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        Checkpoint.open(tmp_path / "latest")
    assert Checkpoint.open(tmp_path).step == 1


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def torch_file(path, value):
    torch.save(value, path)


def bare_pickle(path, value):
    path.write_bytes(pickle.dumps(value, protocol=2))


@pytest.mark.parametrize("write", [torch_file, bare_pickle])
@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.safetensors"])
def test_a_weights_file_with_a_payload_is_refused_and_runs_nothing(tmp_path, write, name):
    proof = tmp_path / "proof"
    write(tmp_path / name, {"conv1.weight": torch.zeros(1), "payload": Payload(proof)})
    with pytest.raises(ModelError, match=name):
        read_weights(tmp_path / name)
    assert not proof.exists()


@pytest.mark.parametrize(
    "said",
    [
        "not JSON",
        "3",
        '{"backbone": "r50"}',
        '{"backbone": {"name": "../../r50"}}',
        '{"backbone": {"name": ["r50"]}}',
        '{"backbone": {"name": "iresnet", "layers": [1, 1], "widths": "many"}}',
        '{"backbone": {"name": "mbf", "embedding_size": -1}}',
    ],
)
def test_a_model_file_that_lies_about_its_network_is_refused(tmp_path, said):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1)}, path, metadata={"facetrain": said})
    with pytest.raises(ModelError, match="model"):
        open_model(path, torch.device("cpu"))
