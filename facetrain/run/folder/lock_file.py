"""The file `run.lock` of a run folder: which process writes the run.

`RunLock` (`lock.py`) creates it, rewrites it and removes it. Here is what it says, and how other processes read it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PositiveInt

from facetrain.distributed.process_lifetime import process_stat
from facetrain.errors import RunError
from facetrain.files import os_errors_as, scratch_path

LOCK_FILE = "run.lock"
SILENCE_S = 30.0
"""Seconds without a rewrite after which the lock of another host is stale: several times the time between two, because
network file systems delay writes."""
POLL_S = 0.5
"""Seconds between two looks at the file."""
_CLOCK_DIFFERENCE_S = 300.0
"""Seconds by which the clock of another host may differ, for a look that cannot wait for the next rewrite."""
STOPPED, ENDED = "Tt", "ZX"
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
            return state if start in ("", self.pid_start) else ENDED[0]
        with suppress(PermissionError):
            try:
                os.kill(self.pid, 0)  # signal 0 only checks that the process exists
            except (ProcessLookupError, OverflowError):
                return ENDED[0]
        return "R"


def open_lock(path: Path, mode: str) -> Any:
    """Open the file; an OSError if it is none."""
    # A read of a pipe would wait without end, and a link could lead to a file of another program.
    if not stat.S_ISREG(os.lstat(path).st_mode):
        reason = "not a regular file; remove it if no other process writes the run"
        raise OSError(errno.EINVAL, reason, str(path))
    return path.open(mode)


def read_lock(path: Path) -> tuple[bytes, int] | None:
    """Return content and modification time of the file; None if there is none."""
    # Opened again for each read: NFS shows the changes of other hosts to a file that is opened after them.
    with suppress(FileNotFoundError), open_lock(path, "rb") as file:
        return file.read(1 << 16), os.fstat(file.fileno()).st_mtime_ns
    return None


def parse_holder(content: bytes) -> Holder | None:
    """Return the holder that a file describes; None if it does not describe one."""
    try:
        return Holder.model_validate_json(content)
    except ValueError:
        return None


def read_holder(path: Path) -> Holder | None:
    """Return the holder of a lock; None if there is no lock, or its file describes none."""
    return parse_holder((read_lock(path) or (b"",))[0])


def is_locked(folder: Path) -> bool:
    """Return whether a living process holds the lock of a run folder, by one look at it."""
    content = None
    with suppress(OSError):
        content = read_lock(folder / LOCK_FILE)
    if content is None:
        return False
    holder = parse_holder(content[0])
    if holder is not None and holder.machine == _this_machine():
        return not holder.writes_another(folder) and holder.state() not in ENDED
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
            holder = read_holder(folder / LOCK_FILE)
        if holder is not None and holder.token == token:
            return True
        if time.monotonic() >= deadline:
            return False
        refresh(folder)
        time.sleep(POLL_S)


def refresh(folder: Path) -> None:
    """Let a network file system forget that it has not found a folder, or a file in it, which another host has created.

    By default, a client of NFS believes this for 30 s, but not after a change of its own to the folder around.
    """
    nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    for place in dict.fromkeys((nearest, folder)):
        scratch = scratch_path(place / LOCK_FILE)
        with suppress(OSError):  # no folder of this host, or none that it may change
            scratch.touch()
            scratch.unlink()


def _this_machine() -> str:
    """Return host, start of the kernel and namespace of the processes; the host alone where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()
