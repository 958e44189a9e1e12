import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.command import environment
from tests.support.processes import descendants, wait_until_gone

PROGRAM = (
    "import time; from facetrain.distributed.watchdog import watched\n"
    "with watched(3, 1.0):\n    print('there', flush=True); time.sleep({})"
)


def guarded(seconds):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(seconds)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ignores(pid, number):
    (mask,) = re.findall(r"SigIgn:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(mask, 16) >> (number - 1) & 1


def test_a_process_that_is_stopped_is_ended_and_one_that_runs_is_not():
    busy, stopped = guarded(2), guarded(60)
    assert stopped.stdout.readline() == busy.stdout.readline() == "there\n"
    (guard,) = descendants(stopped.pid)
    while not ignores(guard, signal.SIGTERM):
        time.sleep(0.01)  # it has only begun
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(guard, signal.SIGTERM)  # as an agent does that ends its rank
    _, said = stopped.communicate(timeout=20)
    assert stopped.returncode == -signal.SIGKILL
    assert said == f"rank 3 (process {stopped.pid}) has not run for 1 s, and is ended\n"
    assert busy.wait(20) == 0 and busy.communicate() == ("", "")
    assert not wait_until_gone([guard], 5)


def test_a_guard_ends_with_whom_it_guards():
    process = guarded(60)
    process.stdout.readline()
    (guard,) = descendants(process.pid)
    process.kill()
    process.communicate()
    assert not wait_until_gone([guard], 5)
