"""One run on two hosts of which one has other files: it ends on both, and names the host and the file.

Two folders stand for the disks of the hosts; the run folder is shared.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import facetrain
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.errors import FacetrainError, UsageError
from facetrain.run.agree import _open_checkpoint
from facetrain.run.request import TrainRequest
from facetrain.run.train import train
from tests.support.command import TORCHRUN, start
from tests.support.datasets import encoded_image, write_records
from tests.support.ranks import free_ports, start_ranks
from tests.support.snapshots import snapshot


def other_bytes(host):
    """Exchange two images of equal size, so that labels, sizes and places stay."""
    path = host / "data" / "train.rec"
    content, first = path.read_bytes(), encoded_image(1, 32)
    same_size = next(image for n in range(1000, 9000) if len(image := encoded_image(n, 32)) == len(first))
    path.write_bytes(content.replace(first, same_size))


def other_version(host):
    place = host / "packages" / "safetensors-9.9.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 9.9\n")


def other_source(host):
    """Copy the package, with a comment more."""
    shutil.copytree(Path(facetrain.__file__).parent, host / "facetrain")
    with (host / "facetrain" / "errors.py").open("a") as file:
        file.write("# changed\n")


def edit(path, old, new):
    path.write_bytes(path.read_bytes().replace(old, new, 1))


DIFFERENCES = {
    "another config": (
        lambda host: edit(host / "tiny.yaml", b"lr: 0.05", b"lr: 0.06"),
        ["tiny.yaml", "optim.lr"],
    ),
    "no config": (lambda host: (host / "tiny.yaml").unlink(), ["tiny.yaml"]),
    "no dataset": (lambda host: shutil.rmtree(host / "data"), ["data"]),
    "other labels": (
        lambda host: write_records(host / "data", [n // 6 for n in range(120)][::-1], size=32),
        ["data"],
    ),
    "other bytes": (other_bytes, ["data.train", "other bytes"]),
    "no set": (lambda host: (host / "data" / "val.bin").unlink(), ["val.bin"]),
    "another set": (lambda host: edit(host / "data" / "val.bin", b"\x88\x89", b"\x89\x88"), ["val.bin"]),
    "other weights": (lambda host: (host / "weights.pt").write_text("b"), ["weights.pt", "model.init_from"]),
    "other code": (
        lambda host: edit(host / "my_margin.py", b"0.2", b"0.3"),
        ["my_margin:f (head.margin.type): other source files"],
    ),
    "other versions": (other_version, ["safetensors is 9.9"]),
    "another source": (other_source, ["source of facetrain"]),
}
OVERRIDES = {
    "other weights": ("model.init_from=weights.pt",),
    "other code": ("head.margin={type: my_margin:f, m2: null}",),
}


@pytest.fixture
def two_folders(dataset, describe, tmp_path):
    """Return a function that makes two folders with the same config and data, and changes the second one."""
    text = describe(steps=2).read_text().replace(f"{dataset}/data", "data")

    def make(name):
        for number in (0, 1):
            host = tmp_path / name / f"host{number}"
            host.mkdir(parents=True)
            shutil.copytree(dataset / "data", host / "data")
            (host / "weights.pt").write_text("a")
            (host / "my_margin.py").write_text("def f(cos):\n    return cos - 0.2\n")
            (host / "tiny.yaml").write_text(text)
        DIFFERENCES[name][0](tmp_path / name / "host1")
        return tmp_path / name

    return make


def be_a_host(rank, folders, ports):
    """Be the only rank of a host in one run after the other; write how each of them ended."""
    torch.set_num_threads(1)
    outcomes = {}
    for folder, port in zip(folders, ports, strict=True):
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        os.chdir(folder / f"host{rank}")
        packages, since = str(folder / f"host{rank}" / "packages"), time.monotonic()
        sys.path.insert(0, packages)
        installed = facetrain.__file__
        if (folder / f"host{rank}" / "facetrain").exists():
            facetrain.__file__ = str(folder / f"host{rank}" / "facetrain" / "__init__.py")
        overrides = OVERRIDES.get(folder.name, ())
        request = TrainRequest(config="tiny.yaml", run_dir=str(folder / "run"), overrides=overrides)
        try:
            outcomes[folder.name] = [train(request), "", 0]
        except FacetrainError as error:
            outcomes[folder.name] = [error.exit_code, str(error), time.monotonic() - since]
        sys.path.remove(packages)
        facetrain.__file__ = installed
    (folders[0].parent / f"outcomes{rank}.json").write_text(json.dumps(outcomes))


@pytest.mark.slow
def test_hosts_that_differ_end_together_and_name_the_host_and_the_file(two_folders, tmp_path):
    folders = [two_folders(name) for name in DIFFERENCES]
    start_ranks(be_a_host, (folders, free_ports(len(folders))), 2)
    for number in (0, 1):
        outcomes = json.loads((tmp_path / f"outcomes{number}.json").read_text())
        for name, (_, words) in DIFFERENCES.items():
            code, message, seconds = outcomes[name]
            assert code == 2 and "rank 1 on " in message and "\n" not in message, (name, message)
            assert all(word in message for word in words), (name, message)
            assert seconds < 300, name  # and not the 600 s in which ranks have to arrive
            assert not (tmp_path / name / "run").exists(), "nothing is written"


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "difference"), [("facetrain", "no config"), ("torchrun", "no set")])
def test_under_both_launchers_each_host_prints_one_line_and_exits_with_2(two_folders, launcher, difference):
    folder, (port,) = two_folders(difference), free_ports(1)
    command = ["train", "--config", "tiny.yaml", "--run-dir", folder / "run"]
    hosts = ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-endpoint", f"127.0.0.1:{port}"]
    if launcher == "facetrain":
        words, module = [*command, *hosts], "facetrain"
    else:
        words, module = [*hosts, "--rdzv-backend", "c10d", "-m", "facetrain", *command], TORCHRUN
    processes = [start(*words, module=module, cwd=folder / f"host{number}") for number in (0, 1)]
    printed = [process.communicate(timeout=120)[1] for process in processes]
    for process, text in zip(processes, printed, strict=True):
        # torchrun ends with 1 whatever its ranks end with.
        assert process.returncode == (2 if launcher == "facetrain" else 1)
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "rank " in lines[0], text
        assert all(word in lines[0] for word in DIFFERENCES[difference][1])
    assert not (folder / "run").exists()


def test_another_checkpoint_under_the_path_of_the_plan_is_refused(tmp_path):
    CheckpointWriter(tmp_path / "checkpoints", asynchronous=False).save(snapshot(2))
    plan = SimpleNamespace(folder=str(tmp_path), manifest="of another one")
    with pytest.raises(UsageError, match="not the checkpoint that rank 0 sees"):
        _open_checkpoint(plan, 2)
