"""File of a lock: the process that holds it, and a file that only one of several processes can create."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, PositiveInt

from facetrain.distributed.process_lifetime import process_stat

_NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
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
    beat: int = 0

    @classmethod
    def of_this_process(cls, launchers: Sequence[str]) -> Holder:
        """Return this process as the holder of a new lock. `launchers` may contain empty ids, which are left out."""
        return cls(
            token=secrets.token_hex(8),
            host=socket.gethostname(),
            machine=this_machine(),
            pid=os.getpid(),
            pid_start=process_start(os.getpid()),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            launchers=tuple(name for name in launchers if name),
        )

    @classmethod
    def parse(cls, content: bytes) -> Holder | None:
        """Return the holder that a file describes; None if it does not describe one."""
        try:
            return cls.model_validate_json(content)
        except ValueError:
            return None

    def dump(self) -> bytes:
        """Return the content of the file. Its length does not depend on the count, so that one write replaces it."""
        return json.dumps(self.model_dump() | {"beat": f"{self.beat:012d}"}).encode() + b"\n"


def process_state(pid: int, pid_start: str) -> str:
    """Return the state of a process of this machine: a letter of proc(5), one of `ENDED` or not.

    A later process that has got its number does not count.
    """
    state, start = _process(pid)
    return state if start in ("", pid_start) else ENDED[0]


def process_start(pid: int) -> str:
    """Return the start time of a process in clock ticks, as in proc(5); "" where it cannot be read."""
    return _process(pid)[1]


def this_machine() -> str:
    """Return host, start of the kernel and namespace of the processes; the host alone where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _process(pid: int) -> tuple[str, str]:
    """Return state and start time of a process, as in proc(5); the start is "" where it cannot be read."""
    state, start = process_stat(pid)
    if state:
        return state, start
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except (ProcessLookupError, OverflowError, ValueError):
        return ENDED[0], ""
    except PermissionError:
        pass
    return "R", ""


class LockFile:
    """File of a lock, as one process sees it."""

    def __init__(self, path: Path, token: str) -> None:
        """Take the path, and a name that no other process has."""
        self.path, self._token = path, token

    def create(self, content: bytes) -> bool:
        """Create the file with all of its content; return False if it exists."""
        scratch = self.path.with_name(f".{self.path.name}.{self._token}")
        try:
            with scratch.open("wb") as file:
                file.write(content)
                file.flush()
                # An empty lock, after a power cut, would be watched like the lock of another host.
                os.fsync(file.fileno())
            try:
                os.link(scratch, self.path)
            except OSError as error:
                if error.errno in _NO_HARD_LINKS:
                    return self._create_exclusively(content)
                # NFS repeats a request whose answer was lost: the link may exist in spite of the error.
                if error.errno != errno.EEXIST and os.stat(scratch).st_nlink != 2:
                    raise
            return os.stat(scratch).st_nlink == 2
        finally:
            with suppress(OSError):
                scratch.unlink()

    def read(self) -> tuple[bytes, int] | None:
        """Return content and modification time of the file; None if there is none."""
        try:
            # Opened again for each read: NFS shows the changes of other hosts to a file that is opened after them.
            with self.open("rb") as file:
                return file.read(1 << 16), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def open(self, mode: Literal["rb", "r+b"]) -> BinaryIO:
        """Open the file, unless something else has its name."""
        # A read of a pipe would wait without end, and a link could lead to a file of another program.
        if not stat.S_ISREG(os.lstat(self.path).st_mode):
            reason = "not a regular file; remove it if no other process writes the run"
            raise OSError(errno.EINVAL, reason, str(self.path))
        return self.path.open(mode)

    def _create_exclusively(self, content: bytes) -> bool:
        try:
            with self.path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True
