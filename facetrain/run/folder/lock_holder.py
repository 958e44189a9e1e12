"""Process that holds the lock of a run folder: its description in the lock, and its state in the process table."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from facetrain.files import parse_json

STOPPED, ENDED = "Tt", "ZX"
"""Letters of process states, from proc(5)."""


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock."""

    token: str
    """Random, so that every lock is distinct."""
    host: str
    machine: str
    """Start of the host's kernel and namespace of its processes: only within both does `pid` name a process."""
    pid: int
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
            values: dict[str, Any] = parse_json(content.decode())
            if int(values["pid"]) <= 0:  # no process has such a number: `kill -1` would end all of the user's
                return None
            return cls(
                **{name: str(values[name]) for name in ("token", "host", "machine", "pid_start", "since")},
                pid=int(values["pid"]),
                launchers=tuple(map(str, values["launchers"])),
                beat=int(values["beat"]),
            )
        except (ValueError, TypeError, KeyError, OverflowError):  # a number of JSON may be infinite
            return None

    def dump(self) -> bytes:
        """Return the content of the file. Its length does not depend on the count, so that one write replaces it."""
        return json.dumps(vars(self) | {"beat": f"{self.beat:012d}"}).encode() + b"\n"

    def process_state(self) -> str:
        """Return the state of the process, which must be on this machine; see the function `process_state`."""
        return process_state(self.pid, self.pid_start)


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
    try:
        # The name of the program, in parentheses, may contain spaces and parentheses.
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
        return fields[0], fields[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except (ProcessLookupError, OverflowError, ValueError):
        return ENDED[0], ""
    except PermissionError:
        pass
    return "R", ""
