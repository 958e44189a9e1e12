"""Report of the nodes that an elastic agent waits for, while the rendezvous blocks without a message."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from facetrain.distributed.process_lifetime import exit_with_message
from facetrain.distributed.topology import Topology, host_and_port

_QUIET_S = 10.0
_POLL_S = 1.0
_STORE_TIMEOUT_S = 5.0


@contextmanager
def reported_wait(where: Topology, run_id: str, log_dir: Path) -> Iterator[None]:
    """Print a line if the ranks of this node have not started within ten seconds, and again when it changes.

    Until then, Ctrl-C ends this process even while torch waits for a host that does not answer. The agent creates a
    folder in `log_dir` when it starts ranks. For a single node, nothing is done.
    """
    if where.max_nodes == 1:
        yield
        return
    ended = threading.Event()
    with _signal_numbers() as numbers:
        args = (where, run_id, log_dir, ended, numbers)
        thread = threading.Thread(target=_report, args=args, name="rendezvous", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            # Python aborts if it exits while a daemon thread is inside torch.
            thread.join(_STORE_TIMEOUT_S + 1)


@contextmanager
def _signal_numbers() -> Iterator[socket.socket]:
    """Yield a socket that gets the number of a signal at once, even while the main thread is inside torch."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(before)


def _report(
    where: Topology, run_id: str, log_dir: Path, ended: threading.Event, numbers: socket.socket
) -> None:
    since, printed, nodes = time.monotonic(), "", _NodeCount(where.endpoint, run_id)
    while not _is_over(log_dir, ended):
        if _is_interrupted(numbers) and not _is_over(log_dir, ended):
            # torch tries to reach the host for a minute, in which the handler of the signal does not run.
            nodes.leave()
            shutil.rmtree(log_dir, ignore_errors=True)
            exit_with_message("error: interrupted", 128 + signal.SIGINT)
        line = nodes.describe(where)
        if time.monotonic() - since > _QUIET_S and line != printed:
            print(line, file=sys.stderr, flush=True)
            printed = line
    nodes.leave()


def _is_over(log_dir: Path, ended: threading.Event) -> bool:
    """Wait for a moment; return whether the ranks have started, or will not."""
    return ended.wait(_POLL_S) or any(log_dir.glob("*/attempt_*"))


def _is_interrupted(numbers: socket.socket) -> bool:
    with suppress(BlockingIOError):
        return signal.SIGINT in numbers.recv(64)
    return False


class _NodeCount:
    """Number of nodes that wait in the same rendezvous, counted in its store."""

    def __init__(self, endpoint: str, run_id: str) -> None:
        self._host, self._port = host_and_port(endpoint)
        self._key = f"facetrain/{run_id}/waiting"
        self._store: TCPStore | None = None

    def describe(self, where: Topology) -> str:
        """Return whom this node waits for."""
        at = f"{self._host}:{self._port}"
        needed = f"{where.min_nodes}" if where.min_nodes == where.max_nodes else f"at least {where.min_nodes}"
        try:
            if self._store is None:
                socket.create_connection((self._host, self._port), _POLL_S).close()
                self._store = TCPStore(self._host, self._port, timeout=timedelta(seconds=_STORE_TIMEOUT_S))
                self._store.add(self._key, 1)
            return (
                f"waiting for other nodes: {self._store.add(self._key, 0)} of {needed} have joined at {at}; start the "
                "same command on the others"
            )
        except (OSError, RuntimeError) as error:
            self._store = None
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            return (
                f"waiting for {at} (--rdzv-endpoint), which does not answer ({reason}): start the command on that "
                "host, and check that the port is open"
            )

    def leave(self) -> None:
        """Count this node no more."""
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.add(self._key, -1)
