"""Rendezvous for torch's elastic agent that unpickles nothing, listens on loopback on one host, and never hangs.

torch's own (`c10d`) cannot do any of the three. It writes its state to the store as a pickle and unpickles what it
reads there, so that anyone who reaches the port runs code in every agent. Its store listens on all interfaces. And on a
host that is cut off, it waits for the store without end: the agent notices neither signals nor the end of its ranks.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from facetrain.distributed.host_agreement import LAST_CALL_S, GroupStart, Member, SignsOfLife
from facetrain.distributed.listening_sockets import listen, serve_store
from facetrain.distributed.network_interface import LOOPBACK
from facetrain.distributed.process_lifetime import Mark, has_mark
from facetrain.distributed.topology import host_and_port
from facetrain.errors import UsageError

BACKEND = "facetrain"
"""Name of this rendezvous in torch's registry."""
_JOIN_S = 600.0
"""Longest wait for the store and for enough hosts."""
_POLL_S = 0.5
_CONNECT_S = 1.0
_QUIET_S = 10.0
"""A wait is reported if it takes this long."""
_STORE_TIMEOUT_S = 60.0
_ANSWER_S = 10.0
"""Time in which the store must answer."""
_T = TypeVar("_T")


def create_rendezvous(parameters: RendezvousParameters) -> HostRendezvous:
    """Return the rendezvous that a `LaunchConfig` describes, for torch's registry."""
    hosts = parameters.min_nodes, parameters.max_nodes
    return HostRendezvous(parameters.endpoint, parameters.run_id, *hosts, Path(parameters.get("log_dir")))


class _SilentStoreError(RendezvousConnectionError):
    """The store's host is down or cut off, or its process is stopped."""

    def __init__(self, host: str) -> None:
        super().__init__(f"the store at {host} does not answer: its host or the network to it is down")


class FinalFailure(Exception):
    """Failure of a rank of this host that a restart would only repeat."""


class HostRendezvous(RendezvousHandler):
    """Rendezvous for the elastic agent of this host. The host that can listen at the endpoint serves the store."""

    def __init__(self, endpoint: str, run_id: str, min_hosts: int, max_hosts: int, log_dir: Path) -> None:
        """Prepare the rendezvous; nothing is opened before the first one.

        Args:
            endpoint: HOST:PORT of one host of the run, the same on all. A single host needs none.
            run_id: Name of the run, by which a store separates several runs.
            min_hosts: Number of hosts without which no rank starts.
            max_hosts: Number of hosts with which the ranks start at once.
            log_dir: Folder of the ranks' logs, in which a rank may forbid a restart, or leave the run to other hosts.
        """
        # A single host is closed to others, whatever its endpoint is.
        self._server, self._port = host_and_port(endpoint) if max_hosts > 1 else (LOOPBACK, 0)
        """Host that serves the store, and the port of the store."""
        self._run_id, self._log_dir = run_id, log_dir
        self._me = Member(f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}")
        self._first = GroupStart(min_hosts, max_hosts)
        """State of a run of which this is the first host."""
        self._signs = SignsOfLife()
        self._connected: TCPStore | None = None
        self._unanswered: threading.Thread | None = None
        """Call of the store that has not returned."""
        self._joined = 0
        """Number of the last start in which this host took part."""
        self._is_refused = False
        """Whether this host cannot take part, and the others go on without it."""
        self._asked_at = 0.0

    def get_backend(self) -> str:
        """Return the name in torch's registry."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the store of the agents: they do, so rank 0 opens no further port."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next start and wait until it is complete. A long wait is reported.

        Raises:
            FinalFailure: a rank of this host has forbidden a restart.
            RendezvousClosedError: the run has ended on another host.
            RendezvousConnectionError: the store does not answer.
            RendezvousStateError: the store holds something else.
            RendezvousTimeoutError: too few hosts have joined in time.
            UsageError: the run has other numbers of hosts.
        """
        # torch's agent restarts ranks whatever their exit code is, but asks for the hosts of the next start first.
        if has_mark(self._log_dir, Mark.NO_RESTART):
            raise FinalFailure
        report, deadline = _WaitReport(), time.monotonic() + _JOIN_S
        self._connected = self._connected or self._connect(report, deadline)
        while True:
            try:
                start = self._read()
                self._require_same_numbers(start)
                if self._takes_part_in(start):
                    return self._begin(start)
                deadline = self._advance(start, report, deadline)
            except _SilentStoreError as error:
                if time.monotonic() > deadline:
                    raise
                report.show(f"{error}; waiting")  # the network may return

    def _advance(self, start: GroupStart, report: _WaitReport, deadline: float) -> float:
        """Show that this host lives, and write what it makes of the state; return the deadline of the next round."""
        if start.is_closed:
            raise RendezvousClosedError("another host has ended the run")
        if start.is_complete and any(map(self._is_alive, start.hosts)):
            deadline = time.monotonic() + _JOIN_S  # a spare host waits as long as the others train
        if time.monotonic() > deadline:
            if not start.is_complete:
                raise RendezvousTimeoutError(f"too few hosts have joined within {_JOIN_S:.0f} s")
            # All hosts of this start are lost: none of them will open the next one.
            self._replace(start, start.opened_by(self._me.name))
            return time.monotonic() + _JOIN_S
        self._give_sign_of_life()
        wanted = self._me.advance(start, self._is_alive)
        if wanted == start:
            report.show(self._describe(start))
            time.sleep(_POLL_S)
        self._replace(start, wanted)
        return deadline

    def _begin(self, start: GroupStart) -> RendezvousInfo:
        self._joined = start.number
        # The keys by which torch's agents exchange their ranks, and wait for each other at the end, are the same in
        # every start: the prefix separates them.
        prefix = self._key(f"start/{start.number}")
        return RendezvousInfo(
            PrefixStore(prefix, self._store),
            start.hosts.index(self._me.name),
            len(start.hosts),
            RendezvousStoreInfo(self._server, self._port),
        )

    def num_nodes_waiting(self) -> int:
        """Return for how many hosts the ranks should start again. torch's agent asks ten times a second."""
        if time.monotonic() - self._asked_at < _POLL_S:
            return 0
        self._asked_at = time.monotonic()
        try:
            self._give_sign_of_life()
            start = self._read()
            # Another host has opened the next start, because its ranks have failed: the agent ends the ranks of this
            # one and joins.
            if start.number > self._joined:
                return len(start.hosts)
            if len(start.hosts) == start.most:
                return 0
            return sum(self._is_alive(host) for host in start.waiting)
        except (RendezvousConnectionError, RendezvousStateError):
            return 0  # no reason to end ranks that train: their watchdogs notice if the network is down

    def is_closed(self) -> bool:
        """Return whether the run has ended."""
        return self._connected is not None and self._read().is_closed

    def set_closed(self) -> None:
        """Let no host join any more."""
        # Again if another host has changed the state in between.
        while self._connected is not None and not (start := self._read()).is_closed:
            self._replace(start, replace(start, is_closed=True))

    def shutdown(self) -> bool:
        """End the run on all hosts, unless they go on without this one; return whether they can learn of it."""
        if self._is_refused or has_mark(self._log_dir, Mark.LEAVES):
            return True
        try:
            self.set_closed()
        except (RendezvousConnectionError, RendezvousStateError):
            return False  # the host that serves the store has ended first
        return True

    def _connect(self, report: _WaitReport, deadline: float) -> TCPStore:
        """Serve the store if the endpoint is on this host and free; otherwise connect to it.

        Raises:
            RendezvousConnectionError: no store answers until the deadline.
        """
        # Not by torch, which tries for a minute in C++ and answers neither Ctrl-C nor a report meanwhile.
        while (listener := listen(self._server, self._port)) is None and (reason := self._refusal()):
            if time.monotonic() > deadline:
                raise RendezvousConnectionError(reason)
            report.show_once(
                f"waiting for {self._server}:{self._port} (--rdzv-endpoint), which does not answer ({reason}): start "
                "the command on that host, and check that the port is open"
            )
            time.sleep(_POLL_S)  # then also listen again: the name of this host may not be known yet
        if listener is not None:
            self._port = listener.getsockname()[1]
            return self._call(lambda: serve_store(listener, self._server, _STORE_TIMEOUT_S))
        timeout = timedelta(seconds=_STORE_TIMEOUT_S)
        return self._call(lambda: TCPStore(self._server, self._port, is_master=False, timeout=timeout))

    def _refusal(self) -> str:
        """Return why the endpoint does not answer, or ""."""
        try:
            socket.create_connection((self._server, self._port), _CONNECT_S).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _require_same_numbers(self, start: GroupStart) -> None:
        if start.nnodes != self._first.nnodes:
            self._is_refused = True
            raise UsageError(
                f"--nnodes {self._first.nnodes}: the run at {self._server}:{self._port} has --nnodes {start.nnodes}; "
                "give the same value on all hosts"
            )

    def _takes_part_in(self, start: GroupStart) -> bool:
        is_new = start.number > self._joined and not start.is_closed
        return is_new and start.is_complete and self._me.name in start.hosts

    def _describe(self, start: GroupStart) -> str:
        count = len(start.hosts)
        joined = f"{count} of {start.most} hosts have joined at {self._server}:{self._port}"
        if self._me.name not in start.hosts:
            return f"waiting for a place in the run: {joined}"
        if count >= start.least:
            return f"waiting up to {LAST_CALL_S:.0f} s for more hosts: {joined}"
        return f"waiting for {start.least - count} more: {joined}; start the same command on the others"

    @property
    def _store(self) -> TCPStore:
        assert self._connected is not None, "the first rendezvous connects it"
        return self._connected

    def _give_sign_of_life(self) -> None:
        self._call(lambda: self._store.add(self._key(f"alive/{self._me.name}"), 1))

    def _is_alive(self, host: str) -> bool:
        # Adding 0 reads a counter, even one that does not exist yet; `get` would wait for it.
        return self._signs.is_alive(host, self._call(lambda: self._store.add(self._key(f"alive/{host}"), 0)))

    def _read(self) -> GroupStart:
        # Not `get`, which would wait for a first state: the first host to come writes it.
        text = self._call(lambda: self._store.compare_set(self._key("state"), "", self._first.encode()))
        try:
            return GroupStart.decode(text.decode(errors="replace"))
        except ValueError as error:
            raise RendezvousStateError(str(error)) from None

    def _replace(self, start: GroupStart, wanted: GroupStart) -> None:
        """Write a state, unless another host has changed the present one meanwhile."""
        # Compared and set at once by the store: of two hosts that write together, one reads the other's state and
        # tries again.
        if wanted != start:
            self._call(lambda: self._store.compare_set(self._key("state"), start.encode(), wanted.encode()))

    def _call(self, operation: Callable[[], _T]) -> _T:
        """Call the store, in a thread: its client waits without end for a host that is cut off, in C++.

        Raises:
            RendezvousConnectionError: the connection is broken, or the store does not answer in time.
        """
        if self._unanswered:
            self._unanswered.join(_ANSWER_S)
            if self._unanswered.is_alive():
                raise _SilentStoreError(self._server)
        answers: SimpleQueue[tuple[_T | None, Exception | None]] = SimpleQueue()

        def call() -> None:
            try:
                answers.put((operation(), None))
            except (RuntimeError, ValueError) as error:
                answers.put((None, error))

        self._unanswered = threading.Thread(target=call, name="store", daemon=True)
        self._unanswered.start()
        try:
            answer, error = answers.get(timeout=_ANSWER_S)
        except Empty:
            raise _SilentStoreError(self._server) from None
        if error is not None:
            raise RendezvousConnectionError(str(error).partition("\n")[0]) from error
        return cast("_T", answer)

    def _key(self, name: str) -> str:
        return f"facetrain/{self._run_id}/{name}"


class _WaitReport:
    """Report of a wait: a line on standard error if it takes long, and another one when the line changes."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._printed: list[str] = []

    def show(self, line: str) -> None:
        """Print a line if the wait is long and the last line was another one."""
        if time.monotonic() - self._since > _QUIET_S and self._printed[-1:] != [line]:
            print(line, file=sys.stderr, flush=True)
            self._printed.append(line)

    def show_once(self, line: str) -> None:
        """Print a line that may alternate with others: a network gives now one reason, now another."""
        if line not in self._printed:
            self.show(line)
