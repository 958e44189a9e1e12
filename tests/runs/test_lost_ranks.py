"""Ranks that die, hang, fail or are told to stop: the others go on or end, one of them says why, none stays behind."""

import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from facetrain.checkpoint.commit import complete_steps
from facetrain.checkpoint.load import Checkpoint
from facetrain.data.formats.bin import write_bin
from tests.runs.test_training import checked, metrics
from tests.support.command import ROOT, facetrain, start
from tests.support.datasets import encoded_image
from tests.support.processes import descendants, kill, wait_until_gone

LONG = ["--set", "train.max_steps=100000", "--set", "train.epochs=100000"]

BLOCKED_BY_SIGUSR2 = """
import signal, threading

def wait_without_end(number, frame):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

signal.signal(signal.SIGUSR2, wait_without_end)
"""


def ranks_of(agent):
    """The worker processes of an agent, by rank."""
    found = {}
    for pid in descendants(agent):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # one that has ended meanwhile
        if b"facetrain" in command and any(v.startswith(b"RANK=") for v in variables):
            (rank,) = (int(v.removeprefix(b"RANK=")) for v in variables if v.startswith(b"RANK="))
            found[rank] = pid
    return found


def wait_for_step(folder, step, process):
    deadline = time.monotonic() + 120
    path = folder / "metrics.jsonl"
    while not (path.exists() and re.search(rf'"step": {step}, "loss"', path.read_text())):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)


def wait_for_checkpoint(folder):
    """Wait until one stands: it is saved in the background."""
    while not complete_steps(folder / "checkpoints"):
        time.sleep(0.01)


def wait_for_handlers(process):
    """Wait until both ranks heed signals: they begin by verifying."""
    deadline = time.monotonic() + 120
    while True:
        masks = [Path(f"/proc/{pid}/status").read_text() for pid in ranks_of(process.pid).values()]
        caught = [
            int(re.search(r"SigCgt:\t(\w+)", mask)[1], 16) >> (signal.SIGUSR1 - 1) & 1 for mask in masks
        ]
        if len(caught) == 2 and all(caught):
            return
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)


@pytest.fixture
def begun(describe, tmp_path):
    """A run on two ranks that has come to its sixth step, and what belongs to it."""
    processes = []

    def begin(*options, **described):
        folder = tmp_path / "run"
        process = start(
            "train", "--config", describe(**described), "--run-dir", folder, "--nproc-per-node", 2, *options
        )
        processes.append(process)
        wait_for_step(folder, 6, process)
        return folder, process

    yield begin
    for process in processes:
        kill([process.pid, *descendants(process.pid)])
        process.communicate()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_dies_is_started_again_and_the_run_records_what_it_would_have(
    describe, tmp_path, begun, ranks
):
    whole, count = tmp_path / "whole", ("--nproc-per-node", ranks)
    checked(facetrain("train", "--config", describe(steps=40), "--run-dir", whole, *count))
    folder, process = begun("--max-restarts", 1, *count, steps=40)
    before = list(ranks_of(process.pid).values()) or descendants(process.pid)[:1]
    wait_for_checkpoint(folder)
    kill([before[-1]])
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0 and "resuming from step" in said, said
    assert metrics(folder) == metrics(whole)
    assert not wait_until_gone(before, 5)


@pytest.mark.parametrize("victim", ["agent", "rank"])
def test_nothing_outlives_what_it_belongs_to(begun, victim):
    memory = set(Path("/dev/shm").iterdir())
    folder, process = begun(*LONG)
    there = descendants(process.pid)
    ranks = ranks_of(process.pid)
    assert len(there) > len(ranks) == 2, "there must be reading processes too"
    wait_for_checkpoint(folder)
    kill([process.pid if victim == "agent" else ranks[1]])
    assert not wait_until_gone(there, 40)
    _, said = process.communicate(timeout=40)
    assert set(Path("/dev/shm").iterdir()) <= memory
    Checkpoint.open(folder).verify()
    if victim == "rank":
        assert f"error: rank 1 (process {ranks[1]}) was ended by SIGKILL" in said
        assert said.count("error:") == 1 and "Traceback" not in said


@pytest.mark.long
def test_a_rank_that_hangs_is_named_and_ended(begun):
    _, process = begun(*LONG, "--set", "train.timeout_s=5")
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and said.count("error:") == 1 and "Traceback" not in said, said
    assert re.search(rf"error: rank 1 \(\S+, process {ranks[1]}\) did not answer rank 0 for 5 s", said), said
    assert not wait_until_gone(ranks.values(), 5)


@pytest.fixture
def two_agents(describe, tmp_path):
    """A run on two agents of one rank each that has come to its sixth step: the agents and the processes, by rank."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKED_BY_SIGUSR2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []

    def begin(*options):
        folder = tmp_path / "run"
        started.extend(
            start(
                "train", "--config", describe(), "--run-dir", folder, *LONG, "--nproc-per-node", 1,
                "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--set", "train.timeout_s=5", *options,
                PYTHONPATH=f"{tmp_path}:{ROOT}",
            )
            for _ in range(2)
        )  # fmt: skip
        wait_for_step(folder, 6, started[0])
        owner = {rank: agent for agent in started for rank in ranks_of(agent.pid)}
        return owner, {rank: pid for agent in started for rank, pid in ranks_of(agent.pid).items()}

    yield begin
    kill(pid for agent in started for pid in [agent.pid, *descendants(agent.pid)])
    for agent in started:
        agent.communicate()


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGSTOP, "has not run for 35 s and is ended"),
        (
            signal.SIGUSR2,
            r"still ran 30 s after its process group broke, at \S+facetrain/\S+ .+, and is ended",
        ),
    ],
    ids=["stopped", "stuck"],
)
def test_where_there_are_two_machines_a_rank_that_hangs_is_named_by_the_other_and_ended_by_its_guard(
    two_agents, victim, number, reason
):
    owner, ranks = two_agents()
    os.kill(ranks[victim], number)
    said = {rank: agent.communicate(timeout=90)[1] for rank, agent in owner.items()}
    assert [agent.returncode for agent in owner.values()] == [1, 1]
    named = rf"error: rank {victim} \(\S+, process {ranks[victim]}\) did not answer rank {1 - victim} for 5 s"
    assert re.search(named, said[1 - victim]), said
    last = said[victim].splitlines()[-1]
    assert re.search(rf"rank {victim} \(process {ranks[victim]}\) {reason}", last), said
    assert "Traceback" not in "".join(said.values()) and not wait_until_gone(ranks.values(), 5)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 138), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_saves_and_ends_within_the_bound_that_is_said(begun, number, code):
    folder, process = begun(*LONG, "--set", "checkpoint.every_steps=100000")
    since = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    (bound,) = re.findall(rf"{number.name}: saving step \d+ and stopping, within (\d+) s", said)
    assert time.monotonic() - since < int(bound) == 300
    assert process.returncode == code and "facetrain resume" in said and "Traceback" not in said, said
    Checkpoint.open(folder).verify()


@pytest.mark.long
def test_a_signal_in_the_middle_of_a_verification_ends_it_and_the_run_records_what_it_would_have(
    describe, dataset, tmp_path
):
    write_bin(dataset / "data" / "long.bin", [encoded_image(n, 32) for n in range(1200)], [True, False] * 300)
    both = ["--set", "eval.targets=[long]", "--set", "eval.batch_size=1", "--nproc-per-node", 2]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    checked(facetrain("train", "--config", describe(), "--run-dir", whole, *both))
    command = ["train", "--config", describe(), "--run-dir", folder, *both]
    for step, wait in ((0, wait_for_handlers), (6, lambda process: wait_for_step(folder, 6, process))):
        process = start(*command)
        wait(process)
        process.terminate()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 143 and "Traceback" not in said, said
        assert (
            f"saving step {step} and stopping" in said
            and "verification is left to `facetrain resume`" in said
        )
        assert Checkpoint.open(folder).step == step
        assert not [r for r in metrics(folder) if r["step"] == step and "long/accuracy" in r]
        command = ["resume", folder, "--nproc-per-node", 2]
    checked(facetrain(*command))
    assert metrics(folder) == metrics(whole)
    assert not Checkpoint.open(folder).meta["unverified"]


def test_ctrl_c_twice_ends_even_what_hangs_at_once(begun):
    _, process = begun(*LONG)
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None, "it waits for ranks that may be saving"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 130 and said.count("error: interrupted") == 1, said
    assert not wait_until_gone(ranks.values(), 5)


def test_a_record_that_one_rank_cannot_read_ends_all_with_one_message(describe, dataset, tmp_path):
    shutil.copytree(dataset / "data", tmp_path / "data")
    path = tmp_path / "data" / "train.rec"
    data = bytearray(path.read_bytes())
    at = [match.start() for match in re.finditer(rb"\x89PNG", data)][50]
    data[at : at + 4] = b"none"
    path.write_bytes(data)
    done = facetrain(
        "train", "--config", describe(), "--run-dir", tmp_path / "run", "--nproc-per-node", 2,
        "--set", f"data.train={tmp_path / 'data'}", "--set", "train.timeout_s=60",
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
    assert f"{path}: key 51" in done.stderr.replace("\n", " "), done.stderr
