"""Agreement of the hosts on who takes part in a start of the ranks, as JSON: the state of `host_rendezvous`.

The state has a number, which grows by one with every start, and the hosts of this start. A host whose ranks have failed
opens the next start; the others see the larger number, end their ranks and join. A host that comes later is listed as
waiting, and the others open a start that includes it. The first host writes how many hosts a start has: with other
numbers on each, one would complete a start that another never takes part in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

LAST_CALL_S = 30.0
"""Time for further hosts to join after the least number has joined."""
_SILENT_S = 15.0
"""A host that has sent nothing for this time is not waited for."""


@dataclass(frozen=True)
class GroupStart:
    """State of the agreement: the hosts of one start of the ranks."""

    least: int
    """Number of hosts without which no rank starts."""
    most: int
    """Number of hosts with which the ranks start at once."""
    number: int = 1
    hosts: tuple[str, ...] = ()
    """Hosts of this start, in the order of their group ranks."""
    is_complete: bool = False
    """Whether the ranks may start: no host joins this start any more."""
    waiting: tuple[str, ...] = ()
    """Hosts that came when the start was complete."""
    is_closed: bool = False
    """Whether the run has ended: no host may join again."""

    @property
    def nnodes(self) -> str:
        """Numbers of hosts as `--nnodes` has them."""
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"

    def opened_by(self, host: str) -> GroupStart:
        """Return the next start, with its first host."""
        return GroupStart(self.least, self.most, self.number + 1, (host,))

    def encode(self) -> str:
        """Return the state as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> GroupStart:
        """Return the state of a text from the store, which anyone who reaches its port can have written.

        Raises:
            ValueError: it is no such state.
        """
        try:
            # Strict: JSON's true would pass for a number.
            return TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError:
            raise ValueError("its store holds something else than the hosts of a run") from None


class Member:
    """Host that takes part."""

    def __init__(self, name: str) -> None:
        """Begin to watch who joins."""
        self.name = name
        self._joined: tuple[int, tuple[str, ...]] = (0, ())
        """The start that this host has seen last, and its hosts."""
        self._joined_at = time.monotonic()

    def advance(self, start: GroupStart, is_alive: Callable[[str], bool]) -> GroupStart:
        """Return what this host makes of the state: it joins a start, completes it, or opens the next one."""
        if not start.is_complete:
            return self._join(start, is_alive)
        if self.name in start.hosts:  # the ranks of this host have ended: a new start
            return start.opened_by(self.name)
        if self.name in start.waiting:
            return start
        # The others train: their agents see this entry, end their ranks, and open a start that includes this host.
        return replace(start, waiting=(*start.waiting, self.name))

    def _join(self, start: GroupStart, is_alive: Callable[[str], bool]) -> GroupStart:
        # A host that joined and ended would keep its place, and the ranks would wait for its ranks.
        hosts = tuple(host for host in start.hosts if host == self.name or is_alive(host))
        if self.name not in hosts and len(hosts) < start.most:
            hosts += (self.name,)
        if (start.number, hosts) != self._joined:
            self._joined, self._joined_at = (start.number, hosts), time.monotonic()
        was_last_call = time.monotonic() - self._joined_at >= LAST_CALL_S
        # Any change of the hosts begins a new last call, so that hosts that come one by one start together.
        enough = len(hosts) == start.most or (len(hosts) >= start.least and was_last_call)
        return replace(start, hosts=hosts, is_complete=enough and self.name in hosts)


class SignsOfLife:
    """Counters that living hosts raise. Only their changes count, so that the clocks of the hosts need not agree."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def is_alive(self, host: str, counter: int) -> bool:
        """Return whether the counter of a host has changed lately, or is seen for the first time."""
        now = time.monotonic()
        last, since = self._seen.get(host, (counter, now))
        # By the clock of this host, when it sees the change.
        if counter != last:
            since = now
        self._seen[host] = (counter, since)
        return now - since < _SILENT_S
