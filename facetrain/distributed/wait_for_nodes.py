"""Report of the nodes that an elastic agent waits for, while the rendezvous blocks without a message."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from facetrain.distributed.topology import Topology, host_and_port

_QUIET_S = 10.0
_POLL_S = 1.0
_STORE_TIMEOUT_S = 5.0


@contextmanager
def reported_wait(where: Topology, run_id: str, log_dir: Path) -> Iterator[None]:
    """Print a line if the ranks of this node have not started within ten seconds, and again when it changes.

    The agent creates a folder in `log_dir` when it starts ranks. Nothing is printed for a single node.
    """
    if where.max_nodes == 1:
        yield
        return
    ended = threading.Event()
    args = (where, run_id, log_dir, ended)
    thread = threading.Thread(target=_report, args=args, name="rendezvous", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # Python aborts if it exits while a daemon thread is inside torch.
        thread.join(_STORE_TIMEOUT_S + 1)


def _report(where: Topology, run_id: str, log_dir: Path, ended: threading.Event) -> None:
    since, printed, nodes = time.monotonic(), "", _NodeCount(where.endpoint, run_id)
    while not ended.wait(_POLL_S) and not any(log_dir.glob("*/attempt_*")):
        line = nodes.describe(where)
        if time.monotonic() - since > _QUIET_S and line != printed:
            print(line, file=sys.stderr, flush=True)
            printed = line
    nodes.leave()


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
