"""Training in a single process: signals, the grace period, and no launcher beside it."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from facetrain.checkpoint.load import Checkpoint
from tests.support.command import ROOT, facetrain, start
from tests.support.processes import (
    descendants,
    handles,
    kill,
    presses_until_the_end,
    shared_memory_of,
    wait_until_gone,
)
from tests.support.runs import BLOCKED_BY_SIGUSR2, LONG, wait_for_step
from tests.support.waiting import wait_until


@pytest.fixture
def started(describe, tmp_path):
    """Start a run of one process in a process group of its own; end what is left of it."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKED_BY_SIGUSR2)
    processes = []

    def start_run(**options):
        process = start(
            "train", "--config", describe(workers=1), "--run-dir", tmp_path / "run", *LONG,
            "--set", "checkpoint.every_steps=100000", new_session=True, PYTHONPATH=f"{tmp_path}:{ROOT}", **options,
        )  # fmt: skip
        processes.append(process)
        return process, tmp_path / "run"

    yield start_run
    for process in processes:
        kill([process.pid, *descendants(process.pid)])
        process.communicate()


@pytest.mark.slow
def test_the_process_of_the_command_trains_itself_and_starts_reading_processes_only(started):
    process, folder = started(fresh=True)
    wait_for_step(folder, 2, process)
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(process.pid)]
    assert commands and not [command for command in commands if b"facetrain" in command.split(b"\0")]
    libraries = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" in libraries
    # Reading processes ignore signals to the group: the run needs batches until it has saved.
    there = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(process.pid)}
    readers = [pid for pid, command in there.items() if b"spawn_main" in command]
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
    assert readers and all(handles(pid, number, "SigIgn") for pid in readers for number in numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130)],  # the other two are handled as the first one
)
def test_a_signal_to_the_whole_process_group_saves_once_and_ends_within_the_printed_time(
    started, number, code
):
    process, folder = started()
    wait_for_step(folder, 6, process)
    since = time.monotonic()
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=120)
    (limit,) = re.findall(rf"{number.name} received: saving step \d+ and stopping, within (\d+) s", stderr)
    assert time.monotonic() - since < int(limit) == 300
    assert process.returncode == code and "Traceback" not in stderr, stderr
    assert Checkpoint.open(folder).step >= 6
    Checkpoint.open(folder).verify()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGHUP, 129)]
)
def test_a_signal_before_the_first_step_ends_the_process_with_its_code(started, number, code):
    process, _ = started()
    wait_until(lambda: handles(process.pid, signal.SIGHUP), process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in stderr, stderr


def hang(process, folder):
    """Make the main thread wait for a lock without end."""
    wait_for_step(folder, 2, process)
    process.send_signal(signal.SIGUSR2)
    wait_until((folder.parent / "blocked").exists, process)


def fill_its_messages(process, folder):
    """Fill the pipe of the messages, which nobody reads: the next one waits."""
    wait_for_step(folder, 2, process)
    # A writing end of the same pipe, which does not block as that of the process does.
    end = os.open(f"/proc/self/fd/{process.stderr.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(end, b"x")
    os.close(end)


@pytest.mark.slow
@pytest.mark.parametrize("make_unable", [hang, fill_its_messages])
def test_a_process_that_hangs_or_that_nobody_reads_is_ended_when_the_grace_period_is_over(
    started, make_unable
):
    process, folder = started(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    make_unable(process, folder)
    process.terminate()
    process.wait(timeout=60)
    assert process.returncode == 143
    if make_unable is hang:
        last = process.stderr.read().splitlines()[-1]
        assert last.startswith(f"error: process {process.pid} still ran 1 s after SIGTERM, at ")


@pytest.mark.slow
@pytest.mark.parametrize("make_unable", [hang, fill_its_messages])
def test_a_second_ctrl_c_ends_even_a_process_that_hangs_or_that_nobody_reads(started, make_unable):
    process, folder = started()
    make_unable(process, folder)
    there = descendants(process.pid)
    assert presses_until_the_end(process) > 1, "it may be saving"
    assert process.returncode == 130
    assert there and not wait_until_gone(there)
    if make_unable is hang:
        assert process.stderr.read().count("error: interrupted") == 1


@pytest.mark.slow
def test_nothing_is_left_of_a_process_that_is_killed(started):
    process, folder = started()
    wait_for_step(folder, 2, process)
    there = descendants(process.pid)
    memory = shared_memory_of([process.pid, *there])
    kill([process.pid])
    assert there and not wait_until_gone(there)
    assert not any(path.exists() for path in memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message", "count"),
    [("data.train=empty", "empty: contains neither", 3), ("optim.accumulate=5", "use a multiple of 5", 1)],
)
def test_a_failure_is_repeated_as_often_as_restarts_are_allowed_unless_it_is_of_the_config(
    describe, tmp_path, setting, message, count
):
    # Faults that only a rank finds: a missing path is found before ranks start.
    (tmp_path / "empty").mkdir()
    command = ("train", "--config", describe(), "--set", setting, "--max-restarts", 2)
    done = facetrain(*command, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count(message) == count, done.stderr
