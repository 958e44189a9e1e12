"""Watchdog of one rank, or of a single process, as a process of its own: it ends the rank and informs the others.

`facetrain.distributed.watchdog` starts it. It imports neither torch nor facetrain: it must start in milliseconds
and need little memory, and no lock of the rank (Python's, or one of a C library) may block it.

Lines from the rank, on standard input:

    {...}                   `Settings`, as JSON; the first line
    at POSITION             where the main thread is; once a second
    timeout SECONDS         how long other ranks wait for this one from now on
    within SECONDS CODE WHY the rank ends itself within so many seconds, or is to be ended with this exit code
    done                    the rank has finished
    failed MESSAGE          the rank has an error, and is about to exit
    waited MESSAGE          the same, because another rank did not answer in time
    followed MESSAGE        the same, because another rank is lost

Lines to the rank, on standard output:

    ready                   it is connected to rank 0, or could not be
    lost REASON             another rank is lost
    end CODE REASON         the rank has to exit at once, with this exit code

Lines between watchdogs: `hello TOKEN RANK`, then `lost RANK KIND REASON`, and `bye` from a rank that has finished.
They form a star around rank 0, which forwards what it receives. The kernel answers the keep-alives of the connections,
so that a host that is down, or cut off, is found within `_UNREACHABLE_S`, and a process that is only slow never is.
"""

from __future__ import annotations

import glob
import json
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

SIGNALS_OF_THE_GROUP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that are meant for the rank, and that an agent or a terminal sends to its whole process group."""
_UNREACHABLE_S = 15
_KEEP_ALIVES = 5
_STOPPED_S = 15.0
"""Seconds that one of several ranks may be stopped (SIGSTOP). The time in which its watchdog does not run either does
not count."""
_GRACE_S = 30.0
"""Seconds by which a rank may be silent for longer than others wait for it: they name it first."""
_HELPER_S = 30.0
"""Seconds that a helper may be stopped, or killed and unnoticed: `train.timeout_s` if that is less."""
_LOOKS = 6
"""Looks at the helpers within this time."""
_SHOWN = 200
"""Characters of a command line in a message."""
_NOT_WAITED_FOR = ("wandb", "multiprocessing.resource_tracker")
"""Parts of the command lines of programs without which a run goes on. So does it without those of another session, such
as a browser."""
_ENDED_S = 8.0
"""Seconds between the end of another rank and the end of this one, which mostly notices and exits by itself."""
_FAILED_S = 18.0
"""The same if the other rank has reported an error: this rank may be about to report the same one."""
_FLUSH_S = 3.0
"""Seconds for the rank to write its log before it is killed."""
_SEEN_S = 3.0
"""Age from which on the last known position of the rank counts as old."""
_POLL_S = 0.5
_CONNECT_S = 10.0
_WARNS_S = 5.0
_MAX_LINE = 1 << 12
_FAILURE, _LOST_RANK = 1, 3
"""Exit codes of a single process and of one of several ranks, whose agent knows more (`facetrain.errors`)."""


class Settings(NamedTuple):
    """What a watchdog guards: a rank, and the connection to the watchdogs of the others.

    `facetrain.distributed.watchdog` fills in the fields from `pid` on.
    """

    rank: int
    places: list[str]
    """Host and process of each rank."""
    token: str
    """Random text that only the ranks of this start know."""
    address: tuple[str, int] | None
    """Host and port on which rank 0 listens; None: there is no connection."""
    timeout_s: float
    """Seconds that other ranks wait for this one, at first."""
    listener: int | None = None
    """Descriptor of the listening socket, on rank 0. The watchdog takes it over."""
    speaks: bool = False
    """Whether this rank prints which other rank is lost. With an elastic agent, that prints it."""
    pid: int = 0
    """The process of the rank."""
    error_file: str = ""
    """File in which the reason of an end is left for the elastic agent; "" without one."""
    others: Sequence[int] = ()
    """Processes that are no helpers."""


class _Lines:
    """Lines that arrive in pieces over a descriptor."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, received: bytes) -> list[str]:
        *lines, self._rest = (self._rest + received).split(b"\n")
        # A stranger at the port could send a line without an end.
        self._rest = self._rest[:_MAX_LINE]
        return [line[:_MAX_LINE].decode(errors="replace") for line in lines]


class _Link:
    """Connection to the watchdog of another rank."""

    def __init__(self, connection: socket.socket, rank: int | None) -> None:
        self.socket, self.rank, self.lines, self.has_finished = connection, rank, _Lines(), False

    def send(self, line: str) -> None:
        with suppress(OSError):
            self.socket.sendall(line.encode(errors="replace")[: _MAX_LINE - 1] + b"\n")


class _Helpers:
    """Processes that the rank has started: it would wait without end for a stopped one.

    A killed one is mostly reported by the code that waits for it. But torch 2.13 waits for a killed process of its
    compiler without end, because it keeps both ends of the pipes to it open.
    """

    def __init__(self, settings: Settings) -> None:
        self._pid = settings.pid
        # A program that calls facetrain may have processes that it stops on purpose.
        self._others = {*settings.others, os.getpid()}
        self._waited_s = 0.0
        self._looks: dict[int, int] = {}
        self._commands: dict[int, str] = {}

    def find_fault(self, passed_s: float, timeout_s: float) -> tuple[int, str] | None:
        """Return a helper that has not worked for the whole time limit, and the reason; look from time to time.

        The looks are counted, not the seconds: Ctrl-Z stops this watchdog together with the helpers.
        """
        self._waited_s, limit_s = self._waited_s + passed_s, min(timeout_s, _HELPER_S)
        if self._waited_s < limit_s / _LOOKS:
            return None
        self._waited_s = 0.0
        helpers = [pid for pid in descendants(self._pid) if pid not in self._others]
        # A killed process has no command line any more.
        self._commands = {pid: _command(pid) or self._commands.get(pid, "") for pid in helpers}
        waited_for = [
            pid
            for pid in helpers
            if _session_of(pid) == _session_of(self._pid)
            and not any(part in self._commands[pid] for part in _NOT_WAITED_FOR)
        ]
        faults = {pid: fault for pid in waited_for if (fault := _helper_fault(pid))}
        self._looks = {pid: self._looks.get(pid, 0) + 1 for pid in faults}
        for pid in self._looks:
            if self._looks[pid] > _LOOKS:
                what = f"process {pid} ({self._commands[pid][:_SHOWN] or 'its command is unknown'})"
                since = f"{faults[pid]} {limit_s:.0f} s ago"
                return pid, f"waits for {what}, which it has started and which {since}"
        return None


class Watchdog:
    """Watchdog of one rank."""

    def __init__(self, settings: Settings, listener: socket.socket | None) -> None:
        """Connect to rank 0, or listen for the other ranks on rank 0."""
        self._settings, self._pid, self._rank = settings, settings.pid, settings.rank
        self._timeout_s = settings.timeout_s
        self._selector, self._from_rank = selectors.DefaultSelector(), _Lines()
        self._links: list[_Link] = []
        # What the rank has shown of itself: where it is, and for how long it has been silent or stopped.
        self._position = ""
        self._silent_s = self._stopped_s = 0.0
        self._helpers, self._has_others = _Helpers(settings), len(settings.places) > 1
        # What the others know of this rank, and it of them.
        self._is_announced = self._knows_loss = False
        self._is_gone = False
        self._warning, self._warns_at = "", float("inf")
        # When and why the rank is to be ended; the earliest deadline wins.
        self._deadline = float("inf")
        self._reason = ""
        self._is_printed = False
        self._exit_code = _FAILURE
        self._selector.register(0, selectors.EVENT_READ, self._read_rank)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        elif settings.address:
            self._connect(*settings.address)

    def run(self) -> None:
        """Guard the rank until it has ended."""
        before = time.monotonic()
        while self._pid:
            for ready, _ in self._selector.select(_POLL_S):
                ready.data()
            # A suspended machine, or a stopped watchdog, must not count as time of the rank.
            passed_s, before = min(time.monotonic() - before, 2 * _POLL_S), time.monotonic()
            self._check_rank(passed_s)

    def _read_rank(self) -> None:
        # Nothing is read only from a closed pipe: the rank has ended, in whatever way.
        received = os.read(0, 1 << 16)
        if not received:
            self._announce("ended")
            self._pid = 0
        # Whatever the line is: a thread of the rank has run.
        self._silent_s = 0.0
        for line in self._from_rank.split(received):
            kind, _, rest = line.partition(" ")
            if kind == "at":
                self._position = rest
            elif kind == "timeout":
                self._timeout_s = float(rest)
            elif kind == "within":
                seconds, code, why = rest.split(" ", 2)
                self._end_in(float(seconds), why, prints=True, exit_code=int(code))
            elif kind == "done":
                # After it, a connection that closes is no loss.
                self._send("bye")
                self._pid = 0
            elif kind in ("failed", "waited", "followed"):
                # The others learn the reason from this rank, before its connections close.
                self._announce(line)
                self._end_in(_FAILED_S, f"still ran {_FAILED_S:.0f} s after its error ({rest})", prints=False)

    def _check_rank(self, passed_s: float) -> None:
        """End the rank if it is stopped, has not run for too long, or has not ended after the loss of another one."""
        if not self._pid:
            return
        if _has_ended(self._pid):
            # The pipe stays open where the rank has forked a process. One round later: the reason may be in the pipe.
            if self._is_gone:
                self._announce("ended")
                self._pid = 0
                return
            self._is_gone = True
        self._silent_s += passed_s
        self._stopped_s = self._stopped_s + passed_s if is_stopped(self._pid) else 0.0
        # The process table and the pipe give facts; how long a step takes is none.
        if self._has_others:  # no rank waits for a single process: it may be stopped
            if self._stopped_s > _STOPPED_S:
                self._end_in(0, f"was stopped (SIGSTOP, or Ctrl-Z) for {_STOPPED_S:.0f} s", prints=True)
            elif self._silent_s > self._timeout_s + _GRACE_S:
                self._end_in(0, f"has not run for {self._silent_s:.0f} s", prints=True)
        if fault := self._helpers.find_fault(passed_s, self._timeout_s):
            helper, reason = fault
            with suppress(OSError):
                os.kill(helper, signal.SIGKILL)  # or it would stay when the rank has ended
            self._end_in(0, reason, prints=True)
        if time.monotonic() >= self._deadline:
            self._end()
        if time.monotonic() >= self._warns_at and not self._is_announced:
            self._warns_at = float("inf")
            write_to_stderr(self._warning)

    def _end_in(self, seconds: float, reason: str, *, prints: bool, exit_code: int | None = None) -> None:
        """End the rank after so many seconds, unless it is to be ended earlier."""
        if time.monotonic() + seconds < self._deadline:
            self._deadline, self._reason, self._is_printed = time.monotonic() + seconds, reason, prints
            self._exit_code = exit_code or (_LOST_RANK if self._has_others else _FAILURE)

    def _end(self) -> None:
        """Let the rank write its log and exit; kill it if it does not."""
        process = f"process {self._pid}"
        who = f"rank {self._rank} ({process})" if self._has_others else process
        message = f"{who} {self._reason}"
        if self._position:
            message += f", {'last seen ' if self._silent_s > _SEEN_S else ''}{self._position},"
        message += " and is ended"
        if self._is_printed:
            _write_reason(self._settings.error_file, message, printed=True)
            write_to_stderr(f"error: {message}")
        # The rank itself first: it can still write its log and the error that it was about to report.
        _write_to_rank(f"end {self._exit_code} {message}")
        deadline = time.monotonic() + _FLUSH_S
        while time.monotonic() < deadline and not _has_ended(self._pid):
            time.sleep(0.05)
            if is_stopped(self._pid):
                break
        # Not SIGTERM: the rank may be stopped, or its Python code may never run again.
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._announce(f"ended {self._reason}" if self._is_printed else "ended")
        self._pid = 0

    def _announce(self, kind_and_reason: str) -> None:
        """Send the other watchdogs the reason why they lose this rank, once."""
        # Once: a killed rank closes the pipe, too, and that would announce a second, emptier reason.
        if not self._is_announced:
            self._send(f"lost {self._rank} {kind_and_reason}")
        self._is_announced = True

    def _send(self, line: str, *, but: _Link | None = None) -> None:
        for link in self._links:
            if link is not but and link.rank is not None:
                link.send(line)

    def _learn(self, line: str, *, sender: _Link) -> None:
        """Handle the loss of another rank; rank 0 forwards it to all others."""
        _, number, kind, reason = (line + "   ").split(" ", 3)
        # The line comes from the network: its number may be anything.
        if not number.isdecimal() or int(number) >= len(self._settings.places) or int(number) == self._rank:
            return
        # Before this rank acts: it may be the one that connects all others.
        self._send(line, but=sender)
        self._lose(int(number), kind, reason.strip())

    def _lose(self, rank: int, kind: str, reason: str) -> None:
        who = f"rank {rank} ({self._settings.places[rank]})"
        lost = {
            "failed": f"{who} failed: {reason}",
            "unreachable": f"{who} cannot be reached for {_UNREACHABLE_S} s: its host or the network to it is down",
        }.get(kind, f"{who} {reason or 'has ended without a message'}")
        # Not at once: most ranks notice the loss in their next collective, and end with their files in order.
        seconds = _ENDED_S if kind in ("ended", "unreachable") else _FAILED_S
        if kind == "waited":
            # The other rank names the one that hangs; if it is this one, only this one knows where.
            self._end_in(
                seconds, f"still ran {seconds:.0f} s after rank {rank} had failed: {reason}", prints=True
            )
            return
        self._end_in(seconds, f"still ran {seconds:.0f} s after another was lost: {lost}", prints=False)
        # The first loss is the cause. The ranks that end because of it would hide it.
        if kind == "followed" or self._knows_loss:
            return
        self._knows_loss = True
        _write_to_rank(f"lost {lost}")
        _write_reason(self._settings.error_file, lost, printed=self._settings.speaks)
        if self._settings.speaks:
            write_to_stderr(f"error: {lost}")

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            self._add_link(listener.accept()[0], None)

    def _connect(self, host: str, port: int) -> None:
        try:
            connection = socket.create_connection((host, port), _CONNECT_S)
        except OSError as error:
            # Printed later: rank 0 may have ended already, and this rank may be about to end.
            self._warning = (
                f"warning: rank {self._rank} could not connect to rank 0 at {host}:{port} ({error.strerror or error}): "
                "the loss of a host will be noticed only after train.timeout_s; open all ports between the hosts"
            )
            self._warns_at = time.monotonic() + _WARNS_S
            return
        self._add_link(connection, 0).send(f"hello {self._settings.token} {self._rank}")

    def _add_link(self, connection: socket.socket, rank: int | None) -> _Link:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        pause_s = _UNREACHABLE_S // _KEEP_ALIVES
        # Keep-alives find a silent loss on an idle connection, the user timeout one while a line is on its way.
        # A connection without traffic shows no loss by itself: the kernel's defaults would notice it after two hours.
        for option, value in (
            (socket.TCP_KEEPIDLE, pause_s),
            (socket.TCP_KEEPINTVL, pause_s),
            (socket.TCP_KEEPCNT, _KEEP_ALIVES - 1),
            (socket.TCP_USER_TIMEOUT, _UNREACHABLE_S * 1000),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        # A peer that is stopped reads nothing: a full connection must not block this watchdog.
        connection.settimeout(2.0)
        link = _Link(connection, rank)
        self._links.append(link)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read_link(link))
        return link

    def _read_link(self, link: _Link) -> None:
        kind = "ended"
        try:
            received = link.socket.recv(1 << 16)
        except OSError as error:
            received = b""
            if not isinstance(error, ConnectionResetError):
                kind = "unreachable"
        for line in link.lines.split(received):
            # Any process that reaches the port can connect: without the token of this run, its lines are not read.
            if link.rank is None and not self._greet(link, line):
                received = b""
            elif line == "bye":
                link.has_finished = True
            elif line.startswith("lost "):
                # Its end is known with the reason: the closing of the connection adds nothing.
                link.has_finished |= line.startswith(f"lost {link.rank} ")
                self._learn(line, sender=link)
        if received:
            return
        self._selector.unregister(link.socket)
        link.socket.close()
        self._links.remove(link)
        if link.rank is not None and not link.has_finished:
            # Killed together with its rank, as a container is, or the host is gone.
            self._learn(f"lost {link.rank} {kind}", sender=link)

    def _greet(self, link: _Link, line: str) -> bool:
        """Set the rank of a new link; return whether it belongs to this run."""
        word, _, rest = line.partition(" ")
        token, _, rank = rest.partition(" ")
        if (
            word != "hello"
            or token != self._settings.token
            or not rank.isdecimal()
            or int(rank) >= len(self._settings.places)
        ):
            return False
        link.rank = int(rank)
        return True


def _write_reason(path: str, message: str, *, printed: bool) -> None:
    """Leave a reason for the elastic agent, which may be torch's. The first one stays."""
    if path and not os.path.exists(path):
        with suppress(OSError):
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump({"message": message, "timestamp": int(time.time()), "printed": printed}, file)
            os.rename(f"{path}.new", path)  # torch's agent fails if it reads half a file


def write_to_stderr(line: str) -> None:
    """Write a line to standard error, unless nothing reads it: nobody may wait for a reader."""
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{line}\n".encode(errors="replace"))


def _write_to_rank(line: str) -> None:
    with suppress(OSError):
        os.write(1, line.replace("\n", " ").encode(errors="replace")[: _MAX_LINE - 1] + b"\n")


def _helper_fault(pid: int) -> str:
    """Return what keeps a process from its work, as in "was stopped (SIGSTOP)", and "" if nothing does."""
    fields = status_of(pid)
    if fields[:1] == ["T"]:
        return "was stopped (SIGSTOP)"
    # The last field: how it ended, as waitpid(2) gives it. The low bits are the signal that ended it.
    if fields[:1] == ["Z"] and (number := int(fields[-1]) & 0x7F):
        return f"was ended by signal {number}"
    return ""


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process and its descendants have started."""
    # The kernel lists a process with the thread that has started it.
    for path in glob.iglob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError), open(path, encoding="utf-8") as file:  # the thread may have ended
            for child in map(int, file.read().split()):
                yield child
                yield from descendants(child)


def _command(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").strip().decode(errors="replace")
    return ""


def _session_of(pid: int) -> str:
    return next(iter(status_of(pid)[3:4]), "")


def status_of(pid: int) -> list[str]:
    """Return the fields of proc(5) from the state on; none if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program, in parentheses, may contain spaces and parentheses.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _state_of(pid: int) -> str:
    return "".join(status_of(pid)[:1])


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal, and does not run until it is continued."""
    return _state_of(pid) == "T"  # a debugger's stop is "t"


def _has_ended(pid: int) -> bool:
    return _state_of(pid) in ("Z", "X", "")


def main() -> None:
    """Guard the rank that has started this process."""
    for number in SIGNALS_OF_THE_GROUP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_OF_THE_GROUP)
    with open(0, "rb", buffering=0, closefd=False) as lines:
        line = lines.readline()
    if not line.endswith(b"\n"):
        return  # a signal has ended the rank before it could say what to guard
    settings = Settings(**json.loads(line))
    listener = None if settings.listener is None else socket.socket(fileno=settings.listener)
    watchdog = Watchdog(settings, listener)
    _write_to_rank("ready")
    watchdog.run()


if __name__ == "__main__":
    main()
