"""Ranks that are killed, hang, fail or receive a signal: one message gives the reason, and no process is left."""

import os
import re
import shutil
import signal
import time

import pytest

from facetrain.checkpoint.load import Checkpoint
from facetrain.data.formats.bin import write_bin
from tests.support.command import ROOT, TORCHRUN, facetrain, start
from tests.support.datasets import damage_records, encoded_image
from tests.support.processes import (
    descendants,
    handles,
    kill,
    presses_until_the_end,
    ranks_of,
    shared_memory_of,
    wait_until_gone,
)
from tests.support.ranks import free_ports
from tests.support.runs import BLOCKED_BY_SIGUSR2, LONG, checked, metrics, wait_for_checkpoint, wait_for_step
from tests.support.waiting import wait_until

# NCCL's collectives do not fail when a rank has ended: those of gloo are made to block as they do, in a C call.
LIKE_NCCL = """
import threading
import torch.distributed as dist

def patient(collective):
    def call(*args, **options):
        try:
            return collective(*args, **options)
        except RuntimeError:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
    return call

for name in ("all_reduce", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single",
             "reduce_scatter_tensor"):
    if hasattr(dist, name):
        setattr(dist, name, patient(getattr(dist, name)))
"""


def wait_for_handlers(process):
    """Wait until both ranks have installed their signal handlers, which they do before the first verification."""

    def are_installed():
        ranks = ranks_of(process.pid).values()
        return len(ranks) == 2 and all(handles(pid, signal.SIGUSR1) for pid in ranks)

    wait_until(are_installed, process)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_after_the_restart_of_a_killed_rank_the_metrics_equal_those_of_an_uninterrupted_run(
    describe, tmp_path, started_run, ranks
):
    whole, count = tmp_path / "whole", ("--nproc-per-node", ranks)
    checked(facetrain("train", "--config", describe(steps=24), "--run-dir", whole, *count))
    folder, process = started_run("--max-restarts", 1, *count, steps=24)
    before = list(ranks_of(process.pid).values())
    assert len(before) == ranks
    wait_for_checkpoint(folder, process)
    kill([before[-1]])
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0 and "resuming from step" in stderr, stderr
    assert metrics(folder) == metrics(whole)
    assert not wait_until_gone(before)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["agent", "rank"])
def test_no_process_outlives_its_run(started_run, victim):
    folder, process = started_run(*LONG, workers=1)
    processes = descendants(process.pid)
    ranks = ranks_of(process.pid)
    assert len(processes) > len(ranks) == 2, "there must be reading processes, too"
    wait_for_checkpoint(folder, process)
    memory = shared_memory_of(processes)
    kill([process.pid if victim == "agent" else ranks[1]])
    assert not wait_until_gone(processes)
    _, stderr = process.communicate(timeout=60)
    assert not any(path.exists() for path in memory)
    Checkpoint.open(folder).verify()
    if victim == "rank":
        assert f"error: rank 1 (process {ranks[1]}) was ended by SIGKILL" in stderr
        assert stderr.count("error:") == 1 and "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        {"sample_rate": 0.5},
        pytest.param({"sample_rate": 0.5, "head": "placement: disk"}, marks=pytest.mark.long),
        pytest.param({"sample_rate": 0.5, "head": "placement: host"}, marks=pytest.mark.long),
        pytest.param({"head": "placement: host"}, marks=pytest.mark.long),
    ],
    ids=["sampled", "sampled from disk", "sampled from host memory", "staged from host memory"],
)
def test_survivors_that_are_blocked_in_a_collective_end_and_the_killed_rank_is_named(started_run, head):
    _, process = started_run(*LONG, site=LIKE_NCCL, **head)
    ranks = ranks_of(process.pid)
    kill([ranks[1]])
    assert not wait_until_gone([ranks[0]])
    _, stderr = process.communicate(timeout=60)
    assert f"error: rank 1 (process {ranks[1]}) was ended by SIGKILL" in stderr
    assert stderr.count("error:") == 1 and "Traceback" not in stderr


@pytest.mark.long
def test_a_rank_that_hangs_is_named_and_ended(started_run):
    _, process = started_run(*LONG, "--set", "train.timeout_s=5")
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1 and stderr.count("error:") == 2 and "Traceback" not in stderr, stderr
    assert re.search(rf"error: rank 1 \(\S+, process {ranks[1]}\) did not answer rank 0 for 5 s", stderr), (
        stderr
    )
    assert re.search(
        rf"error: rank 1 \(process {ranks[1]}\) was stopped \(SIGSTOP.*, last seen at \S+facetrain/", stderr
    )
    assert not wait_until_gone(ranks.values())


@pytest.fixture
def two_agents(describe, tmp_path):
    """Start a run on two agents with one rank each and wait for its sixth step.

    Return rank -> agent and rank -> process.
    """
    (tmp_path / "sitecustomize.py").write_text(BLOCKED_BY_SIGUSR2)
    (port,), started = free_ports(1), []

    def start_run(*options):
        folder = tmp_path / "run"
        started.extend(
            start(
                "train", "--config", describe(workers=1), "--run-dir", folder, *LONG, "--nproc-per-node", 1,
                "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--set", "train.timeout_s=5", *options,
                PYTHONPATH=f"{tmp_path}:{ROOT}",
            )
            for _ in range(2)
        )  # fmt: skip
        wait_for_step(folder, 6, started[0])
        agent_of = {rank: agent for agent in started for rank in ranks_of(agent.pid)}
        return agent_of, {rank: pid for agent in started for rank, pid in ranks_of(agent.pid).items()}

    yield start_run
    kill(pid for agent in started for pid in [agent.pid, *descendants(agent.pid)])
    for agent in started:
        agent.communicate()


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (
            signal.SIGSTOP,
            r"was stopped \(SIGSTOP, or Ctrl-Z\) for \d+ s, last seen at \S+facetrain/\S+ .+, and is ended",
        ),
        (
            signal.SIGUSR2,
            r"still ran 18 s after rank \d had failed: .+, at \S+facetrain/\S+ .+, and is ended",
        ),
    ],
    ids=["stopped", "stuck"],
)
def test_with_two_agents_a_rank_that_hangs_is_named_by_the_other_and_ended_by_its_watchdog(
    two_agents, victim, number, reason
):
    agent_of, ranks = two_agents()
    os.kill(ranks[victim], number)
    stderr = {rank: agent.communicate(timeout=90)[1] for rank, agent in agent_of.items()}
    assert [agent.returncode for agent in agent_of.values()] == [1, 1]
    # A stopped rank that hosts the store is found by its watchdog first.
    found = rf"(did not answer rank {1 - victim} for 5 s|was stopped \(SIGSTOP)"
    named = rf"error: .*rank {victim} \(\S+, process {ranks[victim]}\) {found}"
    assert re.search(named, stderr[1 - victim]), stderr
    last = stderr[victim].splitlines()[-1]
    assert re.search(rf"rank {victim} \(process {ranks[victim]}\) {reason}", last), stderr
    assert "Traceback" not in "".join(stderr.values()) and not wait_until_gone(ranks.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGUSR1, 138), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long)]
)
def test_a_signal_to_the_launcher_saves_and_ends_within_the_printed_time(started_run, number, code):
    folder, process = started_run(*LONG, "--set", "checkpoint.every_steps=100000")
    since = time.monotonic()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    (limit,) = re.findall(rf"{number.name} received: saving step \d+ and stopping, within (\d+) s", stderr)
    assert time.monotonic() - since < int(limit) == 300
    assert process.returncode == code and "Traceback" not in stderr, stderr
    for text in (stderr, (folder / "log.txt").read_text()):
        assert f"{number.name} received" in text and "`facetrain resume" in text
    # Neither torch's agent nor a rank adds anything.
    last = stderr[stderr.index(f"{number.name} received") :].splitlines()
    assert len([line for line in last if not line.startswith("step ")]) == 2, stderr
    Checkpoint.open(folder).verify()


@pytest.mark.slow
def test_under_torchrun_the_last_line_before_its_traceback_says_that_this_is_no_failure(describe, tmp_path):
    config = describe(workers=1)
    command = ["--standalone", "--nproc-per-node", 2, "-m", "facetrain", "train", "--config", config]
    process = start(*command, "--run-dir", tmp_path / "run", *LONG, module=TORCHRUN, new_session=True)
    try:
        wait_for_step(tmp_path / "run", 6, process)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    finally:
        kill([process.pid, *descendants(process.pid)])
    before = stderr.partition("Traceback")[0].splitlines()[-1]
    assert re.search(
        r"continues from step \d+; the traceback that torchrun prints now is no failure$", before
    )


@pytest.mark.slow
def test_further_signals_to_the_launcher_do_not_keep_the_ranks_from_saving(started_run):
    # The end of a terminal sends several: the shell sends SIGHUP to its jobs, and the kernel does when the shell ends.
    folder, process = started_run(*LONG, "--set", "checkpoint.every_steps=100000")
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)  # as a rank whose step takes long
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
        time.sleep(0.3)
    os.kill(ranks[1], signal.SIGCONT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 129 and "Traceback" not in stderr, stderr
    assert "SIGHUP received: saving step" in stderr and "SIGTERM" not in stderr
    Checkpoint.open(folder).verify()


@pytest.mark.long
def test_a_verification_that_a_signal_interrupts_is_repeated_after_the_resume(describe, dataset, tmp_path):
    data = shutil.copytree(dataset / "data", tmp_path / "data")
    write_bin(data / "long.bin", [encoded_image(n, 32) for n in range(1200)], [True, False] * 300)
    both = ["--set", f"data.train={data}", "--set", "eval.targets=[long]", "--set", "eval.batch_size=1",
            "--nproc-per-node", 2]  # fmt: skip
    whole, folder = tmp_path / "whole", tmp_path / "run"
    checked(facetrain("train", "--config", describe(), "--run-dir", whole, *both))
    command = ["train", "--config", describe(), "--run-dir", folder, *both]
    for step, wait in ((0, wait_for_handlers), (6, lambda process: wait_for_step(folder, 6, process))):
        process = start(*command)
        wait(process)
        process.terminate()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 143 and "Traceback" not in stderr, stderr
        assert f"saving step {step} and stopping" in stderr and "`facetrain resume` will verify it" in stderr
        assert Checkpoint.open(folder).step == step
        assert not [r for r in metrics(folder) if r["step"] == step and "long/accuracy" in r]
        command = ["resume", folder, "--nproc-per-node", 2]
    checked(facetrain(*command))
    assert metrics(folder) == metrics(whole)
    assert not Checkpoint.open(folder).meta["unverified"]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_even_ranks_that_hang_at_once(started_run):
    _, process = started_run(*LONG)
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    assert presses_until_the_end(process) > 1, "it waits for ranks that may be saving"
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and stderr.count("error: interrupted") == 1, stderr
    assert not wait_until_gone(ranks.values())


@pytest.mark.slow
def test_a_record_that_one_rank_cannot_read_ends_all_ranks_with_one_message(describe, dataset, tmp_path):
    shutil.copytree(dataset / "data", tmp_path / "data")
    path = tmp_path / "data" / "train.rec"
    damage_records(path, (50,))
    done = facetrain(
        "train", "--config", describe(workers=1), "--run-dir", tmp_path / "run", "--nproc-per-node", 2,
        "--set", f"data.train={tmp_path / 'data'}", "--set", "train.timeout_s=60",
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
    assert f"{path}: key 51" in done.stderr.replace("\n", " "), done.stderr
