import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from facetrain.distributed.watchdog import read_reason
from tests.support.command import environment
from tests.support.processes import descendants, wait_until_gone

PROGRAM = """
import threading, time
from pathlib import Path
from facetrain.distributed.watchdog import watchdog
with watchdog(3, {}, lambda: "is useless" if Path("enough").exists() else ""):
    print("started", flush=True); {}
"""
BLOCK = "lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=60)"


def start(folder, patience_s, work):
    """Start a program that does `work` under a watchdog."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(patience_s, work)], cwd=folder, text=True,
        env=environment(TORCHELASTIC_ERROR_FILE="error.json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ignores(pid, number):
    (mask,) = re.findall(r"SigIgn:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(mask, 16) >> (number - 1) & 1


def test_a_stopped_process_is_killed_and_a_running_one_is_not(tmp_path):
    running, stopped = start(tmp_path, 1.0, "time.sleep(2)"), start(tmp_path, 1.0, BLOCK)
    assert stopped.stdout.readline() == running.stdout.readline() == "started\n"
    (watchdog,) = descendants(stopped.pid)
    while not ignores(watchdog, signal.SIGTERM):
        time.sleep(0.01)  # it has not set up its signals yet
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(watchdog, signal.SIGTERM)  # as an agent does that ends its rank
    _, stderr = stopped.communicate(timeout=20)
    assert stopped.returncode == -signal.SIGKILL
    message = f"rank 3 (process {stopped.pid}) has not run for 1 s and is ended"
    assert stderr == f"error: {message}\n"
    assert read_reason(tmp_path / "error.json") == message, "the agent reads it"
    assert running.wait(20) == 0 and running.communicate() == ("", "")
    assert not wait_until_gone([watchdog], 5)


def test_a_process_with_a_blocked_main_thread_is_killed_as_soon_as_there_is_a_reason(tmp_path):
    blocked = start(tmp_path, 4.0, BLOCK)
    assert blocked.stdout.readline() == "started\n"
    time.sleep(0.5)
    assert blocked.poll() is None, "a blocked thread alone is no reason: it looks like hard work"
    (tmp_path / "enough").touch()
    _, stderr = blocked.communicate(timeout=3)
    assert blocked.returncode == -signal.SIGKILL
    assert stderr == f"error: rank 3 (process {blocked.pid}) is useless and is ended\n"


def test_a_watchdog_ends_with_its_process(tmp_path):
    process = start(tmp_path, 1.0, BLOCK)
    process.stdout.readline()
    (watchdog,) = descendants(process.pid)
    process.kill()
    process.communicate()
    assert not wait_until_gone([watchdog], 5)
    assert not read_reason(tmp_path / "error.json")


def test_an_error_file_without_a_message_gives_no_reason(tmp_path):
    path = tmp_path / "error.json"
    for content in ("", "{", json.dumps([1]), json.dumps({"message_": 1})):
        path.write_text(content)
        assert read_reason(path) == ""
