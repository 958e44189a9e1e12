"""Lock of a run folder: living, ended, stopped and reused processes, and hosts that cannot be seen."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from facetrain.distributed.ranks import Ranks
from facetrain.errors import RunError, UsageError
from facetrain.run.folder import lock as lock_module
from facetrain.run.folder.hosts import owns_folder
from facetrain.run.folder.lease import Lease
from facetrain.run.folder.lock import RunLock
from facetrain.run.folder.lock_file import LOCK_FILE, Holder, has_lock, is_locked, read_lock
from tests.support.faults import full, small_disk
from tests.support.waiting import set_time

FAST = {"beat_s": 0.02, "silence_s": 0.3}


@pytest.fixture
def sleeper():
    """A process that does nothing; its lock is written by `lock_of`."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def lock_of(folder, **changes):
    """Leave the lock of a process: of this one, with some fields changed."""
    lock = RunLock(folder)
    lock.acquire()
    content = json.loads((folder / LOCK_FILE).read_text())
    lock.release()
    (folder / LOCK_FILE).write_text(json.dumps(content | changes))


def start_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def test_a_folder_is_locked_once_and_free_after_the_release(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    with pytest.raises(UsageError, match=rf"process {os.getpid()} on "):
        second.acquire()
    first.require_held()
    first.release()
    assert list(tmp_path.iterdir()) == []
    second.acquire()
    first.release()
    second.require_held()
    second.release()


def test_a_stopped_process_is_alive_and_the_error_names_its_state(tmp_path, sleeper):
    lock_of(tmp_path, pid=sleeper.pid, pid_start=start_of(sleeper.pid))
    with pytest.raises(UsageError, match=f"process {sleeper.pid} .* end it with `kill {sleeper.pid}`"):
        RunLock(tmp_path).acquire()
    sleeper.send_signal(signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    with pytest.raises(UsageError, match=f"is stopped .SIGSTOP.: .*`kill -CONT {sleeper.pid}`"):
        RunLock(tmp_path).acquire()


def test_the_lock_in_a_copy_of_a_folder_does_not_count_and_that_in_a_moved_folder_does(tmp_path):
    run, copy, moved = (tmp_path / name for name in ("run", "copy", "moved"))
    run.mkdir()
    original = RunLock(run)
    original.acquire()
    shutil.copytree(run, copy)
    assert is_locked(run) and not is_locked(copy)
    lock = RunLock(copy)
    lock.acquire()
    lock.release()
    run.rename(moved)
    with pytest.raises(UsageError, match="is alive"):
        RunLock(moved).acquire()
    moved.rename(run)
    original.release()


@pytest.mark.parametrize("ended", [True, False])
def test_the_lock_of_an_ended_process_or_of_one_that_has_its_number_now_is_stale_at_once(
    tmp_path, sleeper, ended
):
    lock_of(tmp_path, pid=sleeper.pid, pid_start=start_of(sleeper.pid) if ended else "1")
    if ended:
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie from now on
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_another_host_is_stale_when_it_does_not_change(tmp_path, capfd):
    lock_of(tmp_path, host="node7", machine="node7 boot 1", pid=123)
    os.utime(tmp_path / LOCK_FILE, (2e9, 2e9))  # its clock is years ahead
    lock, since = RunLock(tmp_path, **FAST), time.monotonic()
    lock.acquire()
    assert time.monotonic() - since >= FAST["silence_s"]
    printed = capfd.readouterr().err
    assert "process 123 on node7 has locked this run: watching" in printed
    assert "process 123 on node7 has locked this run, but has not rewritten run.lock" in printed
    lock.release()


def test_an_outage_of_the_file_system_does_not_make_the_lock_of_another_host_stale(tmp_path, monkeypatch):
    lock_of(tmp_path, host="node7", machine="node7 boot 1", pid=123)
    looks = []
    lock = RunLock(tmp_path, silence_s=0.5, outage_s=0.2)

    def pause(seconds):
        looks.append(time.monotonic())
        # At first the server answers no read, and takes no rewrite.
        time.sleep(0.6 if len(looks) == 1 else seconds)

    set_time(monkeypatch, lock_module.__name__, sleep=pause)
    lock.acquire()
    assert time.monotonic() - looks[0] >= 0.6 + 0.5
    lock.release()


def test_a_lock_of_another_host_that_is_released_while_it_is_watched_is_free(tmp_path, monkeypatch):
    lock_of(tmp_path, host="node7", machine="node7 boot 1", pid=123)
    lock = RunLock(tmp_path, silence_s=60.0)

    def release(seconds):
        monkeypatch.undo()
        (tmp_path / LOCK_FILE).unlink()

    set_time(monkeypatch, lock_module.__name__, sleep=release)
    lock.acquire()
    assert has_lock(tmp_path, lock.token)
    lock.release()


def test_a_host_that_does_not_see_the_lock_yet_looks_again_and_changes_the_folder_before(
    tmp_path, monkeypatch
):
    lock, looks = RunLock(tmp_path, beat_s=60.0), []
    lock.acquire()
    shown = (tmp_path / LOCK_FILE).rename(tmp_path / "hidden")
    os.utime(tmp_path, (0, 0))

    def look_again(seconds):
        looks.append(os.stat(tmp_path).st_mtime > 0)
        os.utime(tmp_path, (0, 0))
        if len(looks) == 3:
            shown.rename(tmp_path / LOCK_FILE)

    set_time(monkeypatch, has_lock.__module__, sleep=look_again)
    assert not has_lock(tmp_path, lock.token) and not looks
    assert has_lock(tmp_path, lock.token, within_s=60.0) and looks == [True] * 3
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
    lock.release()


@pytest.mark.parametrize("has_mirror", [False, True])
def test_a_host_whose_file_system_believes_that_a_new_folder_is_absent_shares_it_all_the_same(
    tmp_path, monkeypatch, has_mirror
):
    folder, ranks = tmp_path / "runs" / "new", Ranks(rank=1, local_rank=0, size=2, local_size=1)
    folder.mkdir(parents=True)
    lock, touch = RunLock(folder, beat_s=60.0), Path.touch
    lock.acquire()
    # A client of NFS looks again in a folder after a change of its own to it.
    unseen = {folder: folder / LOCK_FILE, tmp_path: folder.parent}
    for path in unseen.values():
        path.rename(path.with_name("unseen"))

    def touch_and_see(path):
        touch(path)
        if seen := unseen.pop(path.parent, None):
            seen.with_name("unseen").rename(seen)

    monkeypatch.setattr(Path, "touch", touch_and_see)
    set_time(monkeypatch, has_lock.__module__, sleep=lambda seconds: pytest.fail("it waits"))
    assert not owns_folder(ranks, folder, lock.token, has_mirror=has_mirror)
    assert owns_folder(ranks, tmp_path / "own" / "new", lock.token, has_mirror=has_mirror)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", LOCK_FILE, "runs"]
    lock.release()


def test_a_lock_that_a_host_cannot_read_is_an_error_of_the_run(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(RunError, match=rf"{LOCK_FILE}: not a regular file"):
        has_lock(tmp_path, "token", within_s=60.0)


def test_the_lock_of_another_host_that_changes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("facetrain.run.folder.lock_file._this_machine", lambda: "node7 boot 1")
    there = RunLock(tmp_path, beat_s=0.02)
    there.acquire()
    monkeypatch.undo()
    here = RunLock(tmp_path, silence_s=60.0)
    with pytest.raises(UsageError, match=r"process \d+ on .*run\.lock"):
        here.acquire()
    there.require_held()
    there.release()


def hostile_json(**changes):
    return json.dumps(json.loads(Holder.of_this_process([]).dump()) | changes).encode()


# `kill -1`, which a message would advise for the process -1, ends all processes of the user.
UNREADABLE = [hostile_json(pid=number) for number in (float("inf"), -1, 0)]


@pytest.mark.parametrize("content", [b"\0" * 100, b"[" * 60_000, b"\xff" * 10, *UNREADABLE])
def test_a_lock_that_cannot_be_read_is_stale_when_it_does_not_change(tmp_path, content, capfd):
    (tmp_path / LOCK_FILE).write_bytes(content)
    lock = RunLock(tmp_path, **FAST)
    lock.acquire()
    assert "cannot be read" in capfd.readouterr().err
    lock.release()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("absent")])
def test_something_else_than_a_file_in_place_of_the_lock_is_refused_at_once(tmp_path, make):
    make(tmp_path / LOCK_FILE)
    with pytest.raises(RunError, match=r"run\.lock: "):
        RunLock(tmp_path).acquire()


def test_a_lock_that_cannot_be_read_while_the_run_writes_does_not_end_it(tmp_path):
    lock = RunLock(tmp_path, beat_s=60.0)
    lock.acquire()
    (tmp_path / LOCK_FILE).unlink()
    (tmp_path / LOCK_FILE).mkdir()
    lock.require_held()
    assert (tmp_path / LOCK_FILE).is_dir()
    lock.release()


def test_a_job_that_its_elastic_agent_starts_again_takes_its_own_lock(tmp_path):
    lock_of(tmp_path, host="node7", machine="node7 boot 1", launchers=["node7-agent", "node8-agent"])
    lock = RunLock(tmp_path, ["", "node8-agent"])
    lock.acquire()
    assert has_lock(tmp_path, lock.token)
    lock.release()


def test_a_process_whose_lock_was_taken_over_finds_out_and_keeps_the_lock_of_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr("facetrain.run.folder.lock_file._this_machine", lambda: "node7 boot 1")
    stopped = RunLock(tmp_path, beat_s=60.0)  # as if by SIGSTOP
    stopped.acquire()
    monkeypatch.undo()
    other = RunLock(tmp_path, **FAST | {"beat_s": 60.0})  # it would create a lock again that it misses
    other.acquire()
    with pytest.raises(RunError, match=rf"process {os.getpid()} on "):
        stopped.require_held()
    stopped.release()
    assert (tmp_path / LOCK_FILE).exists()
    other.require_held()
    # Another way to lose it: a user removes the file, and starts the run once more.
    (tmp_path / LOCK_FILE).unlink()
    third = RunLock(tmp_path, beat_s=60.0)
    third.acquire()
    with pytest.raises(RunError, match=r"the lock of this process was removed, or did not change for"):
        other.require_held()
    third.release()
    other.release()


def test_a_lock_that_was_removed_by_hand_is_created_again(tmp_path):
    lock = RunLock(tmp_path, beat_s=0.01)
    lock.acquire()
    (tmp_path / LOCK_FILE).unlink()
    lock.require_held()
    with pytest.raises(UsageError):
        RunLock(tmp_path).acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_process_whose_folder_was_moved_finds_out_and_does_not_lock_another_one_in_its_place(
    tmp_path, replaced
):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = RunLock(folder, beat_s=0.01)
    lock.acquire()
    folder.rename(tmp_path / "moved")
    if replaced:
        folder.mkdir()
    time.sleep(0.1)
    with pytest.raises(RunError, match=r"/run: .* moved or deleted"):
        lock.require_held()
    assert not replaced or list(folder.iterdir()) == []
    lock.release()


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path):
    lock_of(tmp_path, pid=1, pid_start="0")
    got, refused, start = [], [], threading.Barrier(8)

    def take():
        lock = RunLock(tmp_path)
        start.wait()
        try:
            lock.acquire()
            got.append(lock)
        except UsageError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 7
    got[0].require_held()
    got[0].release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    with pytest.raises(RunError, match="absent"):
        RunLock(tmp_path / "absent").acquire()


def test_a_full_disk_leaves_no_lock_that_the_next_start_would_wait_for(tmp_path):
    with small_disk(tmp_path / "disk", size_kib=64):
        with full(tmp_path / "disk"), pytest.raises(RunError, match="No space left"):
            RunLock(tmp_path / "disk").acquire()
        assert not (tmp_path / "disk" / LOCK_FILE).exists()


def test_the_lock_is_released_when_the_run_ends_by_a_signal(tmp_path):
    with pytest.raises(SystemExit), Lease() as lease:
        lease.lock(tmp_path, [])
        lease.require_lock()
        sys.exit(143)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_process_does_not_remove_the_lock_of_a_faster_one(tmp_path):
    lock_of(tmp_path, pid=1, pid_start="0")
    stale = read_lock(tmp_path / LOCK_FILE)
    (tmp_path / LOCK_FILE).unlink()
    faster, slower = RunLock(tmp_path), RunLock(tmp_path)
    faster.acquire()
    slower._remove(stale)
    assert has_lock(tmp_path, faster.token)
    faster.release()


def test_the_claim_of_a_process_that_has_ended_is_removed(tmp_path, monkeypatch):
    lock_of(tmp_path, pid=1, pid_start="0")
    lock, touch = RunLock(tmp_path, **FAST), Path.touch

    def end_after(path, **options):
        """Leave the claim as a process does that is killed behind it."""
        monkeypatch.undo()
        touch(path)
        touch(path, **options)

    monkeypatch.setattr(Path, "touch", end_after)
    lock.acquire()
    assert has_lock(tmp_path, lock.token)
    lock.release()
    assert list(tmp_path.iterdir()) == []
