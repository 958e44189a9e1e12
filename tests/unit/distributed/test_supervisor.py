"""The one process of a run and the one that stands by it, as two processes that are really there."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.command import environment
from tests.support.processes import descendants, kill, wait_until_gone

SUPERVISOR = """
import sys
from facetrain.distributed.supervisor import Supervisor
supervisor = Supervisor(grace_s=1)
code = supervisor.run([sys.executable, "-c", sys.argv[1]], int(sys.argv[2]))
print("came to", code, supervisor.stopped_by, flush=True)
"""
HEEDS = """
import signal, sys, time
heard = []
signal.signal(signal.{name}, lambda number, frame: heard.append(number))
print("ready", flush=True)
while not heard:
    time.sleep(0.01)
time.sleep(0.3)
print("heard", len(heard), flush=True)
"""
DEAF = """
import signal, time
from facetrain.distributed.process_lifetime import end_with_launcher
end_with_launcher()
for name in ("SIGTERM", "SIGINT"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def supervised():
    """Start a program under the supervisor, and leave nothing behind."""
    started = []

    def start(program, max_restarts=0):
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, program, str(max_restarts)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        kill([process.pid, *descendants(process.pid)])
        process.communicate()


def test_a_process_that_fails_is_started_again_as_often_as_allowed_and_its_last_code_counts(supervised):
    program = "import os; n = int(os.environ['TORCHELASTIC_RESTART_COUNT']); print(n); exit([5, 6, 0][n])"
    assert supervised(program, 2).communicate()[0].split() == ["0", "1", "2", "came", "to", "0", "0"]
    assert supervised(program, 1).communicate()[0].split() == ["0", "1", "came", "to", "6", "0"]


def test_the_signal_that_ended_a_process_is_told(supervised):
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert supervised(program).communicate()[0] == "came to -9 0\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_is_passed_on_once_also_where_the_terminal_sends_it_to_the_whole_group(supervised, name):
    process = supervised(HEEDS.format(name=name), 3)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, getattr(signal, name))
    assert process.communicate()[0] == f"heard 1\ncame to 0 {int(getattr(signal, name))}\n"


def test_what_is_still_there_when_its_time_is_over_is_killed(supervised):
    process = supervised(DEAF)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.communicate(timeout=20)[0] == "came to -9 15\n"


def test_ctrl_c_twice_ends_both_at_once(supervised):
    process = supervised(DEAF)
    assert process.stdout.readline() == "ready\n"
    there = descendants(process.pid)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert process.communicate(timeout=20)[1] == "error: interrupted\n" and process.returncode == 130
    assert len(there) == 1 and not wait_until_gone(there, 5)


def test_nothing_is_left_of_a_run_whose_supervisor_is_killed(supervised):
    process = supervised(DEAF)
    assert process.stdout.readline() == "ready\n"
    there = descendants(process.pid)
    kill([process.pid])
    assert len(there) == 1 and not wait_until_gone(there, 5)
