"""A stopped or killed helper process ends the run and is named, whatever it is."""

import subprocess
import sys

import pytest

from tests.support.command import environment
from tests.support.processes import is_alive

PROGRAM = """
import os, signal, subprocess, sys, time
from facetrain.distributed.stopped_helpers import ended_if_helpers_stop
def start(seconds):
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
other = start(4)
with ended_if_helpers_stop(1.0, {other.pid}):
    helper = start(60)
    print(helper.pid, flush=True)
    time.sleep(0.5)
    number = signal.SIGKILL if sys.argv[1] == "killed" else signal.SIGSTOP
    os.kill((other if sys.argv[1] == "other" else helper).pid, number)
    if sys.argv[1] == "continued":
        time.sleep(0.5)
        os.kill(helper.pid, signal.SIGCONT)
    time.sleep(3)
for process in (helper, other):
    process.kill()
"""


@pytest.mark.parametrize("stopped", ["helper", "killed", "other", "continued"])
def test_a_helper_that_stays_stopped_or_was_killed_is_named_and_ends_the_run(stopped):
    command = [sys.executable, "-c", PROGRAM, stopped]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    assert not is_alive(pid)
    if stopped in ("other", "continued"):
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: process {pid} (") and "time.sleep(60)" in done.stderr
    fault = "has been ended by signal 9" if stopped == "killed" else "was stopped (SIGSTOP)"
    assert f"{fault} for 1 s; start the run again with `facetrain resume`" in done.stderr
