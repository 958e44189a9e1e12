"""Runs whose checkpoints go to an object store: killed, on a failing store, on a fresh disk, and on separate disks."""

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from facetrain.checkpoint.commit import complete_steps
from facetrain.checkpoint.load import Checkpoint
from facetrain.checkpoint.mirror import Mirror
from facetrain.config.loading import load_config, plain_config
from facetrain.errors import CheckpointError, DamagedCheckpointError, DataError, RunError, UsageError
from facetrain.run.folder.run_state import read_state
from facetrain.run.request import TrainRequest
from facetrain.run.train import train as train_request
from tests.support import command, training
from tests.support.checkpoints import flip_a_bit
from tests.support.object_store import BUCKET
from tests.support.processes import descendants, kill
from tests.support.ranks import free_ports
from tests.support.waiting import wait_until

URL = f"s3://{BUCKET}/runs"
MIRRORED = f"every_steps: 2, keep: 2, mirror: '{URL}'"
STORE = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


def start(folder, *arguments):
    """Start `facetrain ARGUMENTS` in a folder, which stands for the disk of a host."""
    folder.mkdir(exist_ok=True)
    variables = {name: os.environ[name] for name in STORE if name in os.environ}
    with (folder / "output.txt").open("a") as output:
        return command.start(*arguments, cwd=folder, output=output, **variables)


def wait_for_step(mirror, step, processes, timeout_s=120):
    """Wait until the mirror has a checkpoint of this step or a later one."""
    wait_until(lambda: max(mirror.steps(), default=-1) >= step, *processes, timeout_s=timeout_s, every_s=0.05)


def wait_for_ranks(mirror, ranks, processes):
    """Wait until the newest checkpoint of the mirror was written by so many ranks; return its step."""

    def newest_step():
        step = mirror.steps()[-1]
        with suppress(CheckpointError):  # a checkpoint may be removed between the two requests
            return step if mirror.manifest(step).world_size == ranks else None

    return wait_until(newest_step, *processes, every_s=0.1)


def finish(process, folder):
    assert process.wait(120) == 0, (folder / "output.txt").read_text()


@pytest.fixture
def expected(describe, tmp_path):
    """The weights of an undisturbed run without a mirror."""
    assert (
        training.train(load_config(describe(steps=24, checkpoint="every_steps: 2")), tmp_path / "plain") == 0
    )
    return load_file(tmp_path / "plain" / "model.safetensors")


@pytest.mark.slow
def test_a_run_killed_at_many_moments_continues_on_an_empty_disk_to_the_same_weights(
    object_store, describe, tmp_path, expected
):
    config, mirror = describe(steps=24, checkpoint=MIRRORED), Mirror(f"{URL}/one")
    object_store.latency_s, resumed = 0.005, []
    process = start(tmp_path / "host0", "train", "--config", config, "--run-dir", "one")
    for kills in range(1, 3):
        # At another request each time, which are those of an upload most of the time.
        count = len(object_store.requests) + 25 + 7 * kills
        wait_until(
            lambda count=count: len(object_store.requests) >= count and mirror.steps(), process, every_s=0.002
        )
        kill([process.pid, *descendants(process.pid)])
        process.wait()
        resumed.append(mirror.steps()[-1])
        process = start(tmp_path / f"host{kills}", "resume", f"{URL}/one")
    finish(process, tmp_path / "host2")
    assert resumed == sorted(resumed) and mirror.steps()[-1] == 24 and len(mirror.steps()) == 2
    folder = tmp_path / "host2" / "runs" / "one"
    # The tensors only: the header of the file has the config, in which the mirror differs.
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    Mirror(f"{URL}/one").fetch(24, tmp_path / "last" / "checkpoints")
    Checkpoint.open(tmp_path / "last").verify()


@pytest.mark.slow
def test_a_run_whose_last_upload_fails_has_failed_and_a_resume_uploads_what_is_missing(
    object_store, describe, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("facetrain.remote.filesystem.FIRST_WAIT_S", 0.001)
    object_store.full, folder = True, tmp_path / "one"
    with pytest.raises(RunError, match=f"not in checkpoint.mirror: {URL}/one.*resume"):
        training.train(load_config(describe(checkpoint=MIRRORED)), folder)
    assert "warning: the checkpoint of step" in capsys.readouterr().err
    assert Checkpoint.open(folder).step == 12 and (folder / "model.safetensors").is_file()
    assert read_state(folder).state == "failed" and Mirror(f"{URL}/one").steps() == []
    object_store.full = False
    assert training.go_on(folder) == 0
    assert read_state(folder).state == "finished" and Mirror(f"{URL}/one").steps() == [12]
    assert "model.safetensors" in Mirror(f"{URL}/one")._store.find("")


@pytest.mark.slow
def test_ctrl_c_leaves_the_wait_for_a_slow_store_and_a_resume_uploads_the_rest(
    object_store, describe, tmp_path
):
    object_store.latency_s = 2
    process, folder = start(tmp_path, "train", "--config", describe(checkpoint=MIRRORED)), tmp_path / "runs"
    wait_until(lambda: "uploading the last checkpoint" in (tmp_path / "output.txt").read_text(), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    (run,) = folder.iterdir()
    assert (run / "model.safetensors").is_file(), "the results come before the wait"
    assert (
        f"SIGINT received; `facetrain resume {run}` uploads the rest" in (tmp_path / "output.txt").read_text()
    )
    object_store.latency_s, mirror = 0, Mirror(f"{URL}/{run.name}")
    assert mirror.steps() != [10, 12]
    assert training.resume(load_config(run / "config.yaml"), run, None) == 0
    assert mirror.steps()[-1] == 12 and "model.safetensors" in mirror._store.find("")
    assert complete_steps(run / "checkpoints") == [10, 12], "step 2, whose upload was slow, is no longer kept"


@pytest.mark.slow
def test_the_results_are_in_the_mirror_and_a_run_goes_on_from_there_on_two_ranks(
    object_store, describe, tmp_path, monkeypatch
):
    config = load_config(describe(checkpoint=MIRRORED), ["log.report=true"])
    assert training.train(config, tmp_path / "one") == 0
    one = Mirror(f"{URL}/one")
    assert json.loads(one.read_text("state.json"))["state"] == "finished"
    assert "finished at step 12" in one.read_text("report.html")
    names = set(one._store.find(""))
    assert {"config.yaml", "metrics.jsonl", "log.txt", "run_id.txt", "model.safetensors"} <= names
    flip_a_bit(Checkpoint.open(tmp_path / "one").folder / "replicated.safetensors")
    more = TrainRequest(command="resume", run_dir=str(tmp_path / "one"), overrides=["train.max_steps=14"])
    with pytest.raises(DamagedCheckpointError, match=f"remove the folder .* downloads it from {URL}"):
        train_request(more)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="/gone: no such folder") as ended:
        train_request(TrainRequest(command="resume", run_dir=f"{URL}/one", overrides=["data.train=gone"]))
    assert ended.value.exit_code == 1, "the run has trained, although this disk has nothing of it"
    process = start(
        tmp_path / "other", "resume", f"{URL}/one", "--checkpoint", Mirror(f"{URL}/one").steps()[0],
        "--nproc-per-node", 2, "--set", "train.max_steps=14",
    )  # fmt: skip
    finish(process, tmp_path / "other")
    checkpoint = Checkpoint.open(tmp_path / "other" / "runs" / "one")
    assert checkpoint.step == 14 and checkpoint.manifest.world_size == 2
    assert Mirror(f"{URL}/one").steps()[-1] == 14


def content(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.slow
def test_a_run_of_the_same_name_in_the_mirror_is_refused_and_changes_nothing_here(
    object_store, describe, tmp_path, monkeypatch
):
    config = load_config(describe(checkpoint=MIRRORED, steps=4))
    assert training.train(config, tmp_path / "one") == 0
    assert complete_steps(tmp_path / "one" / "checkpoints") == [2, 4]
    with pytest.raises(UsageError, match=f"another run .*facetrain resume {URL}/one"):
        training.train(config, tmp_path / "elsewhere" / "one")
    assert not (tmp_path / "elsewhere").exists()

    here = tmp_path / "here" / "runs" / "one"
    short = load_config(describe(steps=2, checkpoint="every_steps: 2"))
    assert training.train(short, here) == 0
    before = content(here)
    monkeypatch.chdir(tmp_path / "here")
    mirrored = [f"checkpoint.mirror={URL}", "train.max_steps=6"]
    attempts = [
        TrainRequest(command="resume", run_dir=f"{URL}/one"),
        TrainRequest(command="resume", run_dir="runs/one", overrides=mirrored),
        TrainRequest(
            config=plain_config(short), run_dir="runs/one", resume_existing=True, overrides=mirrored
        ),
    ]
    for attempt in attempts:
        with pytest.raises(UsageError, match="another run"):
            train_request(attempt)
        assert content(here) == before
    assert training.go_on(here, changes=["train.max_steps=3"]) == 0


def start_hosts(folders, config, *options, port, nodes="1:2"):
    launch = ("--nnodes", nodes, "--nproc-per-node", 1, "--rdzv-endpoint", f"127.0.0.1:{port}")
    arguments = ("train", "--config", config, "--run-dir", "one", *launch, *options)
    return [start(folder, *arguments) for folder in folders]


@pytest.mark.long
def test_a_lost_host_with_its_own_disk_is_replaced_by_one_with_an_empty_disk(
    object_store, describe, tmp_path
):
    config, mirror = describe(steps=100000, checkpoint=MIRRORED), Mirror(f"{URL}/one")
    options = ("--set", "train.epochs=100000", "--set", "train.timeout_s=8", "--max-restarts", 3)
    hosts, (port,) = [tmp_path / "first", tmp_path / "second"], free_ports(1)
    # The first host alone until it trains: the agent that starts first hosts the rendezvous, and it must not be lost.
    agents = start_hosts(hosts[:1], config, *options, port=port)
    try:
        wait_for_step(mirror, 4, agents)
        agents += start_hosts(hosts[1:], config, *options, port=port)
        wait_for_ranks(mirror, 2, agents)
        kill([agents[1].pid, *descendants(agents[1].pid)])
        shutil.rmtree(hosts[1])
        steps = [wait_for_ranks(mirror, 1, agents[:1])]
        agents += start_hosts([tmp_path / "third"], config, *options, port=port)
        steps.append(wait_for_ranks(mirror, 2, [agents[0], agents[2]]))
        assert steps == sorted(steps)
        for agent in (agents[0], agents[2]):
            agent.send_signal(signal.SIGTERM)
        for agent in (agents[0], agents[2]):
            agent.wait(60)
    finally:
        kill(pid for agent in agents for pid in [agent.pid, *descendants(agent.pid)])
        for agent in agents:
            agent.wait()
    step = mirror.steps()[-1]
    mirror.fetch(step, tmp_path / "last" / "checkpoints")
    checkpoint = Checkpoint.open(tmp_path / "last", step)
    checkpoint.verify()
    assert checkpoint.manifest.world_size == 2
    own = {path.name for path in Path(hosts[0], "one", "checkpoints", f"step_{step:08d}").glob("rows_*")}
    assert len(own) == 1, "a host has the files of its own ranks"


@pytest.mark.slow
def test_hosts_with_separate_disks_need_a_mirror(describe, tmp_path):
    config, (port,) = describe(), free_ports(1)
    hosts = [tmp_path / "first", tmp_path / "second"]
    agents = start_hosts(hosts, config, port=port, nodes=2)
    assert [agent.wait(120) for agent in agents] == [2, 2]
    printed = "".join((folder / "output.txt").read_text() for folder in hosts)
    assert "does not share the run folder" in printed and "checkpoint.mirror" in printed
