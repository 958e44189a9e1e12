import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from facetrain.distributed import watchdog as watchdog_module
from facetrain.distributed.watchdog import read_reason
from facetrain.distributed.watchdog_process import Settings
from tests.support.command import environment
from tests.support.processes import descendants, handles, is_alive, kill, wait_until_gone
from tests.support.ranks import free_ports
from tests.support.sockets import unread_bytes
from tests.support.waiting import wait_until

PROGRAM = """
import json, os, socket, sys, threading, time
import signal, subprocess
from facetrain.distributed import watchdog as module, watchdog_process
from facetrain.distributed.watchdog import watchdog
from facetrain.errors import LostRankError, RankError, RunError
rank, port, timeout_s, work = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
listener = socket.create_server(("127.0.0.1", port)).detach() if port and rank == 0 else None
address = ("127.0.0.1", port) if port else None
places = [f"host, process {number}" for number in range(3 if rank >= 0 else 1)]
settings = watchdog_process.Settings(max(rank, 0), places, "token", address, timeout_s, listener)
other = subprocess.Popen(["sleep", "9"]) if rank < 0 and len(sys.argv) > 5 else None
try:
    with watchdog(settings):
        print("started", flush=True)
        exec(work)
except KeyError:
    print("goes on", flush=True)
    time.sleep(1.5)  # longer than one of several ranks may run after an error
"""
BLOCK = "lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=60)"
WAIT_FOR_FILE = """
end = time.monotonic() + 30  # a test that fails must not wait for ever
while not os.path.exists("go") and time.monotonic() < end:
    time.sleep(0.01)
"""
QUICK = {
    "_STOPPED_S": 1.0,
    "_ENDED_S": 0.3,
    "_FAILED_S": 0.6,
    "_FLUSH_S": 60.0,
    "_WARNS_S": 1.0,
    "_UNREACHABLE_S": 15,
    "_GRACE_S": 0.0,
    "_HELPER_S": 1.0,
}


@pytest.fixture
def start(tmp_path):
    """Start a program that does `work` on a rank, with a watchdog whose limits are short; return its process."""
    package = tmp_path / "quick"
    package.mkdir()
    original = Path(read_reason.__code__.co_filename).with_name("watchdog_process.py").read_text()
    processes = []

    def run(work, rank=0, port=0, timeout_s=60.0, arguments=(), **limits):
        source, program = original, package / f"watchdog_process_{len(processes)}.py"
        for name, seconds in (QUICK | limits).items():
            source, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {seconds}", source)
            assert count == 1
        program.write_text(source)
        quick = f"watchdog_process.__file__ = {str(program)!r}\n"
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.replace("rank, port", quick + "rank, port", 1),
             str(rank), str(port), str(timeout_s), work, *arguments],
            cwd=tmp_path, text=True, env=environment(TORCHELASTIC_ERROR_FILE=f"error_{rank}.json"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout.readline() == "started\n", process.communicate()
        return process

    yield run
    for process in processes:
        kill([process.pid, *descendants(process.pid)])
        process.communicate()


@pytest.fixture
def port():
    return free_ports(1)[0]


def wait_for_links(port, links):
    """Wait until the watchdog of rank 0 has read the first messages of so many others, which say who they are.

    `start` returns when a watchdog has sent its message: from then on an empty queue is one that was read.
    """
    wait_until(lambda: unread_bytes(port) == [0] * links)


SIGNALLED = """
import os, subprocess
from facetrain.distributed.watchdog import watchdog
from facetrain.distributed.watchdog_process import SIGNALS_OF_THE_GROUP, Settings
popen = subprocess.Popen

def popen_and_signal(*arguments, **options):
    global process
    process = popen(*arguments, **options)
    for number in SIGNALS_OF_THE_GROUP:
        os.kill(process.pid, number)
    return process

subprocess.Popen = popen_and_signal
with watchdog(Settings(0, ["this process"], "", None, 60.0)):
    pass
print("its exit code:", process.wait(60))
"""


def test_a_signal_to_the_group_does_not_end_a_watchdog_that_starts():
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr, done.returncode) == ("its exit code: 0\n", "", 0)


@pytest.mark.slow
def test_a_stopped_process_is_killed_and_a_running_one_is_not(start, tmp_path):
    running, stopped = start("time.sleep(3)", 1), start(BLOCK)
    (watchdog,) = descendants(stopped.pid)
    assert handles(watchdog, signal.SIGTERM, "SigIgn"), "`start` has waited until it is ready"
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(watchdog, signal.SIGTERM)  # as an agent does that ends its rank
    _, stderr = stopped.communicate(timeout=60)
    assert stopped.returncode == -signal.SIGKILL
    message = read_reason(tmp_path / "error_0.json", printed=True)
    assert stderr == f"error: {message}\n", "the agent reads it"
    assert message.startswith(f"rank 0 (process {stopped.pid}) was stopped (SIGSTOP, or Ctrl-Z) for 1 s")
    assert running.wait(60) == 0 and running.communicate() == ("", "")
    assert not wait_until_gone([watchdog])


@pytest.mark.slow
def test_a_process_that_holds_pythons_lock_for_too_long_is_killed(start):
    # ctypes.PyDLL calls without releasing the lock, so no thread of the process can run.
    held = start("import ctypes; ctypes.PyDLL(None).sleep(60)", timeout_s=2.0, _FLUSH_S=0.5)
    _, stderr = held.communicate(timeout=60)
    assert held.returncode == -signal.SIGKILL
    assert stderr.startswith(f"error: rank 0 (process {held.pid}) has not run for ")


def test_the_end_of_a_rank_ends_the_others_although_their_main_threads_are_blocked(start, port, tmp_path):
    first = start(BLOCK, 0, port)
    second, third = start(BLOCK, 1, port), start(BLOCK, 2, port)
    wait_for_links(port, 2)
    second.kill()
    for rank, process in ((0, first), (2, third)):
        _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (3, ""), "the agent prints the reason"
        lost = "rank 1 (host, process 1) has ended without a message"
        assert read_reason(tmp_path / f"error_{rank}.json", printed=False) == lost


def test_the_end_of_a_rank_is_noticed_where_a_process_that_it_has_forked_lives_on(start, port):
    first = start(BLOCK, 0, port)
    second = start(f"if os.fork() == 0: time.sleep(60)\n{BLOCK}", 1, port)
    wait_for_links(port, 1)
    children = descendants(second.pid)
    second.kill()
    assert first.wait(60) == 3
    kill(children)


def test_the_loss_of_rank_0_ends_the_others(start, port):
    first, second = start(BLOCK, 0, port), start(BLOCK, 1, port)
    wait_for_links(port, 1)
    kill([first.pid, *descendants(first.pid)])  # with its watchdog, as when a container is killed
    assert second.wait(60) == 3


@pytest.mark.slow
def test_a_rank_that_another_has_waited_for_in_vain_ends_and_reports_its_position(start, port):
    hanging = start(BLOCK, 0, port)
    waiting = start("time.sleep(1.5); raise RankError('rank 0 did not answer')", 1, port)
    _, stderr = hanging.communicate(timeout=60)
    assert re.search(
        r"error: rank 0 \(process \d+\) still ran 1 s after rank 1 had failed: rank 0 did not answer, at ",
        stderr,
    )
    assert hanging.returncode == 3 and waiting.wait(60) == 1


@pytest.mark.slow
def test_a_rank_that_is_about_to_report_an_error_reports_it_when_it_is_ended(start, port):
    unwinding = """
try:
    raise RunError("the disk is full")
finally:
    time.sleep(60)
"""
    first = start(unwinding, 0, port)
    other = start("time.sleep(1.5); raise RunError('the disk is full')", 1, port)
    _, stderr = first.communicate(timeout=60)
    assert (first.returncode, stderr) == (1, "error: the disk is full\n")
    assert other.wait(60) == 1


def test_ranks_that_finish_one_after_the_other_do_not_end_each_other(start, port, tmp_path):
    first = start(WAIT_FOR_FILE, 0, port)
    second = start(WAIT_FOR_FILE.replace('"go"', '"second"'), 1, port)
    wait_for_links(port, 1)
    (tmp_path / "second").touch()
    assert second.wait(60) == 0
    (tmp_path / "go").touch()
    assert first.wait(60) == 0
    assert second.communicate() == ("", "")


def test_a_rank_that_cannot_connect_to_rank_0_goes_on_with_a_warning(start, port, tmp_path):
    # The second one may take long to end.
    unconnected, ended_soon = start(WAIT_FOR_FILE, 1, port), start("pass", 1, port, _WARNS_S=60.0)
    warning = f"warning: rank 1 could not connect to rank 0 at 127.0.0.1:{port} (Connection refused)"
    assert unconnected.stderr.readline().startswith(warning)
    (tmp_path / "go").touch()
    assert unconnected.wait(60) == ended_soon.wait(60) == 0
    assert unconnected.communicate()[1] == ended_soon.communicate()[1] == ""


@pytest.mark.slow
def test_a_stranger_that_connects_to_the_watchdog_cannot_end_the_run(start, port, tmp_path):
    first = start(WAIT_FOR_FILE, 0, port)
    for greeting in ("hello wrong 1", "hello token \N{SUPERSCRIPT TWO}"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(f"{greeting}\nlost 1 ended\n".encode() + b"x" * 100_000)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "the watchdog closes the connection"
    (tmp_path / "go").touch()
    assert first.wait(60) == 0


def test_a_rank_ends_with_its_watchdog_and_the_watchdog_with_its_rank(start, tmp_path):
    process, orphaned = start(BLOCK), start(BLOCK, 1)
    (watchdog,) = descendants(process.pid)
    process.kill()
    assert not wait_until_gone([watchdog])
    (guard,) = descendants(orphaned.pid)
    kill([guard])
    _, stderr = orphaned.communicate(timeout=60)
    assert orphaned.returncode == 1
    assert (
        stderr == f"error: the watchdog of rank 1 (process {guard}) was killed, and the rank ends with it\n"
    )
    assert not read_reason(tmp_path / "error_0.json")


HELPER = """
(guard,) = set(watchdog_process.descendants(os.getpid())) - {other and other.pid}

def waits():
    with open(f"/proc/{guard}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))

code = f"import time; time.sleep(60)  # {sys.argv[-1]}"
helper = subprocess.Popen([sys.executable, "-c", code], start_new_session="session" in sys.argv[5:])
print(helper.pid, flush=True)
before = waits()
while waits() < before + 4:  # the watchdog has looked at the helper then
    time.sleep(0.05)
os.kill((other if "other" in sys.argv[5:] else helper).pid, getattr(signal, sys.argv[5]))
if "continued" in sys.argv[5:]:
    time.sleep(0.3)
    os.kill(helper.pid, signal.SIGCONT)
# The watchdog ends the process before, if it finds a fault.
time.sleep(4 if len(sys.argv) > 6 else 60)
helper.kill()
if other:
    other.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason", "rank"),
    [
        ("SIGSTOP", "was stopped (SIGSTOP) 1 s ago", -1),
        ("SIGSTOP", "was stopped (SIGSTOP) 1 s ago", 0),
        ("SIGKILL", "was ended by signal 9 1 s ago", -1),
        ("SIGSTOP continued", "", 0),
        ("SIGSTOP other", "", -1),
        ("SIGKILL wandb", "", -1),
        ("SIGKILL multiprocessing.resource_tracker", "", 0),
        ("SIGKILL session", "", 0),
    ],
)
def test_a_helper_that_stays_stopped_or_was_killed_is_named_and_ends_the_process(start, fault, reason, rank):
    # A process that is to continue its helper after 0.3 s may have to wait for a core.
    limits = {"_HELPER_S": 2.0} if "continued" in fault else {}
    process = start(HELPER, rank, arguments=fault.split(), **limits)
    helper = int(process.stdout.readline())
    _, stderr = process.communicate(timeout=60)
    assert not is_alive(helper)
    if not reason:
        assert (process.returncode, stderr) == (0, "")
        return
    assert process.returncode == (1 if rank < 0 else 3)
    who = f"process {process.pid}" if rank < 0 else f"rank 0 (process {process.pid})"
    assert stderr.startswith(f"error: {who} waits for process {helper} (") and "time.sleep(60)" in stderr
    assert f"which it has started and which {reason}, at " in stderr


@pytest.mark.slow
def test_a_single_process_may_be_stopped_and_is_ended_when_its_time_is_over(start, tmp_path):
    is_over = "module.end_within(0.5, 143, 'still ran 0.5 s after SIGTERM'); "
    process = start(WAIT_FOR_FILE + is_over + BLOCK, -1)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # longer than one of several ranks may be stopped
    process.send_signal(signal.SIGCONT)
    (tmp_path / "go").touch()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert stderr.startswith(f"error: process {process.pid} still ran 0.5 s after SIGTERM, ")


def test_after_an_error_of_a_single_process_the_program_that_has_called_it_goes_on(start):
    process = start("raise KeyError", -1)
    assert process.stdout.readline() == "goes on\n"
    assert process.wait(60) == 0


PYTHON_OF_A_MODULE = """#!/bin/sh
[ "$LD_LIBRARY_PATH$WANDB_API_KEY" = /apps/python/lib ] || { echo "cannot open shared object file"; exit 127; }
exec {python} "$@"
"""


def test_a_python_that_finds_its_library_by_a_variable_has_a_watchdog_which_gets_no_other_one(
    tmp_path, monkeypatch
):
    python = tmp_path / "python"
    python.write_text(PYTHON_OF_A_MODULE.replace("{python}", sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/apps/python/lib")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    process = watchdog_module._start(Settings(0, ["this host"], "token", None, 60.0))
    assert process.communicate(b"done\n", timeout=60)[0] == b"ready\n" and process.returncode == 0


def test_an_error_file_without_a_message_gives_no_reason(tmp_path):
    path = tmp_path / "error.json"
    for content in ("", "{", json.dumps([1]), json.dumps({"message_": 1})):
        path.write_text(content)
        assert read_reason(path) == ""
    path.write_text(json.dumps({"message": "stuck", "printed": False}))
    assert (read_reason(path), read_reason(path, printed=True)) == ("stuck", "")
