"""Lock of a run folder: only one process at a time writes a run, on any number of hosts that share the folder.

The leader of a run creates `run.lock` with its host, its process and a random token, and rewrites the file every few
seconds with a higher count. `flock` is not used: on several network file systems it locks within one host only.

A lock is stale if its process has ended, or writes another folder, of which this one is a copy. On the same host the
process table and the number of the folder show that at once. From another host the count is watched: if it does not
rise for `SILENCE_S`, the host is gone. No clocks of different hosts are compared, and an outage of the file system, in
which no host can rewrite the file, does not count.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PositiveInt

from facetrain.distributed.process_lifetime import process_stat
from facetrain.errors import RunError, UsageError
from facetrain.files import os_errors_as, scratch_path
from facetrain.telemetry.log import warn

LOCK_FILE = "run.lock"
BEAT_S = 5.0
"""Seconds between two rewrites of the file."""
SILENCE_S = 30.0
"""Seconds without a rewrite after which the lock of another host is stale: several times `BEAT_S`, because network
file systems delay writes."""
OUTAGE_S = 10.0
"""Seconds between two looks after which the file system was silent, and maybe not the process: watch anew."""
_POLL_S = 0.5
_CLOCK_DIFFERENCE_S = 300.0
"""Seconds by which the clock of another host may differ, for a look that cannot wait for the next rewrite."""
_STOPPED, _ENDED = "Tt", "ZX"
"""Letters of process states, from proc(5)."""


class Holder(BaseModel, frozen=True):
    """Process that holds a lock."""

    token: str
    """Random, so that every lock is distinct."""
    host: str
    machine: str
    """Start of the host's kernel and namespace of its processes: only within both does `pid` name a process."""
    pid: PositiveInt
    """Positive, because `kill -1`, which a message could advise, ends all processes of the user."""
    pid_start: str
    """Start of the process in clock ticks: another process may get the same number later."""
    since: str
    launchers: tuple[str, ...]
    """Elastic agents of the job: after a failure they start its processes again."""
    folder: int = 0
    """Number of the folder on its file system (inode), which a moved folder keeps and a copy does not have; 0 before it
    is locked."""
    beat: int = 0

    @classmethod
    def of_this_process(cls, launchers: Sequence[str]) -> Holder:
        """Return this process as the holder of a new lock. `launchers` may contain empty ids, which are left out."""
        return cls(
            token=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=_this_machine(),
            pid=os.getpid(),
            pid_start=process_stat(os.getpid())[1],
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            launchers=tuple(name for name in launchers if name),
        )

    def dump(self) -> bytes:
        """Return the content of the file. Its length does not depend on the count, so that one write replaces it."""
        return json.dumps(self.model_dump() | {"beat": f"{self.beat:012d}"}).encode() + b"\n"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def writes_another(self, folder: Path) -> bool:
        """Return whether the process, if it is of this machine, writes another folder, whose copy this one is."""
        # Not for a process of another host: some network file systems number a folder differently on each.
        return self.folder != os.stat(folder).st_ino

    def state(self) -> str:
        """Return the state of the process, if it is of this machine: a letter of proc(5)."""
        state, start = process_stat(self.pid)
        if state:  # a later process that has got the number does not count
            return state if start in ("", self.pid_start) else _ENDED[0]
        with suppress(PermissionError):
            try:
                os.kill(self.pid, 0)  # signal 0 only checks that the process exists
            except (ProcessLookupError, OverflowError):
                return _ENDED[0]
        return "R"


class RunLock:
    """Lock of a run folder, for the leader."""

    def __init__(
        self,
        folder: Path,
        launchers: Sequence[str] = (),
        *,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
        outage_s: float = OUTAGE_S,
    ) -> None:
        """Prepare to lock a folder. `launchers` are the ids of the elastic agents that started this job."""
        self._folder, self._path = folder, folder / LOCK_FILE
        self._beat_s, self._silence_s, self._outage_s = beat_s, silence_s, outage_s
        self._me = Holder.of_this_process(launchers)
        self._end = threading.Event()
        self._renewal = threading.Lock()
        self._thread: threading.Thread | None = None
        self._place = (0, 0)

    @property
    def token(self) -> str:
        """Random text in the file, by which another host sees that it shares the folder."""
        return self._me.token

    def acquire(self) -> None:
        """Wait until this process has the lock.

        Raises:
            UsageError: a living process has it.
            RunError: the folder cannot be written to.
        """
        with os_errors_as(RunError, self._folder):
            self._place = _identity(self._folder)
            self._me = self._me.model_copy(update={"folder": self._place[1]})
            # Create first and read later: of two processes that both find no lock, only one can create the file.
            while not self._create():
                content = _read(self._path)
                if content is not None and self._is_stale(content[0]):
                    self._remove(content)
        # A daemon: a run that ends by an error in another thread must not wait for it.
        self._thread = threading.Thread(target=self._keep_alive, name="run-lock", daemon=True)
        self._thread.start()

    def require_held(self) -> None:
        """Check that the folder is still there, and that no other process has taken the lock.

        A process loses its lock if it was stopped for a long time, say.

        Raises:
            RunError: the folder was moved or deleted, or another process writes the run now.
        """
        if self._has_moved():
            # Open files follow a moved folder and new ones do not: the run would be split between two folders.
            raise RunError(
                f"{self._folder}: the run folder was moved or deleted while the run trains; this process ends. Move "
                "it back, or continue with `facetrain resume` and the path that it has now"
            )
        with suppress(OSError):  # if the disk is gone, the next save reports it
            if not self._renew():
                raise RunError(
                    f"{self._folder}: {_holder(self._path) or 'another process'} has taken over this run, because the "
                    f"lock of this process did not change for {self._silence_s:.0f} s; this process ends"
                )

    def release(self) -> None:
        """Give the lock back. Does nothing if this process does not have it."""
        # The thread first: it would create the removed file again.
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with suppress(OSError):
            holder = _holder(self._path)
            if holder is not None and holder.token == self.token:
                self._path.unlink()

    def _is_stale(self, content: bytes) -> bool:
        """Return whether a lock is to be removed; False if it has changed, without a word about its process.

        Raises:
            UsageError: its process is alive.
        """
        holder = _parse(content)
        # The agents of this job end its processes before they start new ones.
        if holder is not None and set(holder.launchers) & set(self._me.launchers):
            return True
        # The process table of another host cannot be seen from here.
        if holder is None or holder.machine != self._me.machine:
            return self._is_silent(
                content, f"{holder} has locked this run" if holder else f"{self._path} cannot be read"
            )
        state = holder.state()
        if state in _ENDED or holder.writes_another(self._folder):
            return True
        advice = f"wait until it ends, or end it with `kill {holder.pid}`"
        if state in _STOPPED:
            advice = (
                f"it is stopped (SIGSTOP): continue it with `kill -CONT {holder.pid}`, or end it with "
                f"`kill -KILL {holder.pid}`"
            )
        raise UsageError(
            f"{self._folder}: {holder} has been writing this run since {holder.since}, and is alive; {advice}"
        )

    def _is_silent(self, content: bytes, fact: str) -> bool:
        """Watch a lock whose process cannot be seen from this host; return whether it is silent.

        Raises:
            UsageError: the process rewrites the file.
        """
        warn(f"{self._folder}: {fact}: watching for {self._silence_s:.0f} s whether it is alive")
        if self._stays(lambda: (_read(self._path) or (None,))[0] == content):
            warn(
                f"{self._folder}: {fact}, but has not rewritten {LOCK_FILE} for {self._silence_s:.0f} s: it is gone"
            )
            return True
        if _read(self._path) is None:
            return False
        raise UsageError(
            f"{self._folder}: {fact}, and it is alive: it rewrites {LOCK_FILE}; wait until it ends, or end it"
        )

    def _stays(self, holds: Callable[[], bool]) -> bool:
        """Return whether something holds until the silence is over. Outages of the file system do not count."""
        since = last = time.monotonic()
        while holds():
            now = time.monotonic()
            # A file system that has blocked this process for so long may have blocked the other one, too.
            since, last = (now if now - last > self._outage_s else since), now
            if now - since >= self._silence_s:
                return True
            time.sleep(min(_POLL_S, self._silence_s / 10))
        return False

    def _remove(self, content: tuple[bytes, int]) -> None:
        """Remove a stale lock. Of several processes that try this, one does."""
        # Without the claim, a slow process could remove the new lock of a faster one.
        claim = self._folder / f".{LOCK_FILE}.{hashlib.sha256(content[0]).hexdigest()[:16]}.claim"
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            # Of another process, which has ended meanwhile if the claim stays.
            if self._stays(claim.exists):
                claim.unlink(missing_ok=True)
            return
        try:
            if _read(self._path) == content:
                self._path.unlink()
        finally:
            claim.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Create the file; return False if it exists."""
        try:
            file = self._path.open("xb")  # atomic, on NFS too
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._me.dump())
        except OSError:
            # Of a full disk: the next process would wait for the holder of an empty file.
            with suppress(OSError):
                self._path.unlink()
            raise
        return True

    def _has_moved(self) -> bool:
        with suppress(OSError):  # an outage of the file system, which may end
            return not self._folder.exists() or _identity(self._folder) != self._place
        return False

    def _keep_alive(self) -> None:
        while not self._end.wait(self._beat_s):
            # A full disk or a lost server must not end the run: `require_held` reports a lost lock.
            with suppress(OSError):
                if not self._renew():
                    return

    def _renew(self) -> bool:
        """Rewrite the file with a higher count; return False if it is the lock of another process."""
        # Of two threads that find no file, the slower one would take it for that of another process.
        with self._renewal:
            return self._rewrite()

    def _rewrite(self) -> bool:
        try:
            with _open(self._path, "r+b") as file:
                holder = _parse(file.read(1 << 16))
                if holder is not None and holder.token != self.token:
                    return False
                # In place: a new file under the name would not be seen by hosts that cache the folder.
                self._me = self._me.model_copy(update={"beat": self._me.beat + 1})
                file.seek(0)
                file.write(self._me.dump())
        except FileNotFoundError:  # the file was removed: the folder is locked again
            return not self._has_moved() and self._create()
        return True


def is_locked(folder: Path) -> bool:
    """Return whether a living process holds the lock of a run folder, by one look at it."""
    content = None
    with suppress(OSError):
        content = _read(folder / LOCK_FILE)
    if content is None:
        return False
    holder = _parse(content[0])
    if holder is not None and holder.machine == _this_machine():
        return not holder.writes_another(folder) and holder.state() not in _ENDED
    # One look cannot see the count rise, so the time of the last change decides here; the lock itself never compares
    # clocks.
    return time.time() - content[1] / 1e9 < SILENCE_S + _CLOCK_DIFFERENCE_S


def has_lock(folder: Path, token: str, *, within_s: float = 0.0) -> bool:
    """Return whether a folder is the one that the leader has locked, and so shared with it; look for so many seconds.

    Raises:
        RunError: the folder cannot be read.
    """
    deadline = time.monotonic() + within_s
    while True:
        with os_errors_as(RunError, folder):
            holder = _holder(folder / LOCK_FILE)
        if holder is not None and holder.token == token:
            return True
        if time.monotonic() >= deadline:
            return False
        _refresh(folder)
        time.sleep(_POLL_S)


def _refresh(folder: Path) -> None:
    """Change a folder, so that a network file system forgets which files it has found absent there."""
    scratch = scratch_path(folder / LOCK_FILE)
    with suppress(OSError):
        scratch.touch()
        scratch.unlink()


def _holder(path: Path) -> Holder | None:
    return _parse((_read(path) or (b"",))[0])


def _parse(content: bytes) -> Holder | None:
    """Return the holder that a file describes; None if it does not describe one."""
    try:
        return Holder.model_validate_json(content)
    except ValueError:
        return None


def _read(path: Path) -> tuple[bytes, int] | None:
    """Return content and modification time of the file; None if there is none."""
    # Opened again for each read: NFS shows the changes of other hosts to a file that is opened after them.
    with suppress(FileNotFoundError), _open(path, "rb") as file:
        return file.read(1 << 16), os.fstat(file.fileno()).st_mtime_ns
    return None


def _open(path: Path, mode: str) -> Any:
    # A read of a pipe would wait without end, and a link could lead to a file of another program.
    if not stat.S_ISREG(os.lstat(path).st_mode):
        reason = "not a regular file; remove it if no other process writes the run"
        raise OSError(errno.EINVAL, reason, str(path))
    return path.open(mode)


def _identity(folder: Path) -> tuple[int, int]:
    """Return what a folder keeps when it is moved, and another folder at its path does not have."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _this_machine() -> str:
    """Return host, start of the kernel and namespace of the processes; the host alone where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()
