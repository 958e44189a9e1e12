import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from facetrain.distributed.watchdog import last_words
from tests.support.command import environment
from tests.support.processes import descendants, wait_until_gone

PROGRAM = """
import threading, time
from pathlib import Path
from facetrain.distributed.watchdog import watched
with watched(3, {}, lambda: "is of no use" if Path("enough").exists() else ""):
    print("there", flush=True); {}
"""
STUCK = "lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=60)"


def guarded(folder, patience_s, work):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(patience_s, work)], cwd=folder, text=True,
        env=environment(TORCHELASTIC_ERROR_FILE="error.json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ignores(pid, number):
    (mask,) = re.findall(r"SigIgn:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(mask, 16) >> (number - 1) & 1


def test_a_process_that_is_stopped_is_ended_and_one_that_runs_is_not(tmp_path):
    busy, stopped = guarded(tmp_path, 1.0, "time.sleep(2)"), guarded(tmp_path, 1.0, STUCK)
    assert stopped.stdout.readline() == busy.stdout.readline() == "there\n"
    (guard,) = descendants(stopped.pid)
    while not ignores(guard, signal.SIGTERM):
        time.sleep(0.01)  # it has only begun
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(guard, signal.SIGTERM)  # as an agent does that ends its rank
    _, said = stopped.communicate(timeout=20)
    assert stopped.returncode == -signal.SIGKILL
    line = f"rank 3 (process {stopped.pid}) has given no sign of life for 1 s and is ended"
    assert said == f"error: {line}\n"
    assert last_words(tmp_path / "error.json") == line, "which the launcher reads"
    assert busy.wait(20) == 0 and busy.communicate() == ("", "")
    assert not wait_until_gone([guard], 5)


def test_a_process_whose_main_thread_is_stuck_is_ended_as_soon_as_there_is_a_reason(tmp_path):
    stuck = guarded(tmp_path, 4.0, STUCK)
    assert stuck.stdout.readline() == "there\n"
    time.sleep(0.5)
    assert stuck.poll() is None, "to be stuck is no reason: nobody can tell it from hard work"
    (tmp_path / "enough").touch()
    _, said = stuck.communicate(timeout=3)
    assert stuck.returncode == -signal.SIGKILL
    assert said == f"error: rank 3 (process {stuck.pid}) is of no use and is ended\n"


def test_a_guard_ends_with_whom_it_guards(tmp_path):
    process = guarded(tmp_path, 1.0, STUCK)
    process.stdout.readline()
    (guard,) = descendants(process.pid)
    process.kill()
    process.communicate()
    assert not wait_until_gone([guard], 5)
    assert not last_words(tmp_path / "error.json")


def test_what_is_no_guards_word_is_none(tmp_path):
    path = tmp_path / "error.json"
    for content in ("", "{", json.dumps([1]), json.dumps({"message_": 1})):
        path.write_text(content)
        assert last_words(path) == ""
