"""The ranks of one start before they have a process group: they exchange JSON through the store.

What a run is has to be known before the group is formed, which needs its device and its time limit.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from facetrain import errors
from facetrain.distributed import collectives
from facetrain.distributed.process_lifetime import Mark, leave_mark
from facetrain.errors import (
    FacetrainError,
    LostRankError,
    RankError,
    RunError,
    UsageError,
    is_final,
    of_all_ranks,
    unprinted,
)

if TYPE_CHECKING:
    from facetrain.distributed.rendezvous import Rendezvous

_T = TypeVar("_T")
_FIRST_POLL_S, _SLOWEST_POLL_S = 0.005, 0.2
_FAREWELL_S = 10.0
_QUIET_S, _REPORT_S = 60.0, 600.0
"""A wait for a rank is reported if it takes this long, and again each time after so many seconds."""


@dataclass
class Ranks:
    """Ranks of a start, as one of them sees them.

    All of them must call `gather`, `decide` and `failing_together` in the same order.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    launcher_id: str = ""
    """Host, number and start time of the elastic agent: the same for all ranks that it starts, and restarts; empty
    without one."""
    rendezvous: Rendezvous | None = None
    """What they know of each other; None for a single process."""
    set_timeout: Callable[[float], None] = lambda timeout_s: None
    """Tells the watchdog for how many seconds other ranks wait for this one."""
    report_failure: Callable[[BaseException], None] = lambda error: None
    """Tells the watchdogs of the others why this rank ends."""
    goes_on: bool = False
    """Whether this job has trained the run before: a host that cannot take part then ends alone, and the others start
    again without it."""
    has_trained: bool = False
    """Whether this job or an earlier one has trained the run before."""
    _count: int = field(default=0, init=False)

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which decides what all ranks do."""
        return self.rank == 0

    @property
    def speaks_for_host(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.local_rank == 0

    @property
    def spans_hosts(self) -> bool:
        """Whether there are ranks on other hosts."""
        return self.size > self.local_size

    def place(self, rank: int) -> str:
        """Return the host and the process of a rank."""
        return self.rendezvous.places[rank] if self.rendezvous else "this host"

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order."""
        if self.rendezvous is None:
            return [value]
        prefix = self._next()
        if not self.is_leader:
            self._set(f"{prefix}/{self.rank}", value)
            return cast("list[Any]", self._wait(f"{prefix}/all"))
        # Through the leader: every rank then reads one value, and not one of each other rank.
        values = [value, *(self._wait(f"{prefix}/{rank}", named=rank) for rank in range(1, self.size))]
        self._set(f"{prefix}/all", values)
        return values

    def decide(self, decide: Callable[[], _T]) -> _T:
        """Return on every rank what `decide` returns on the leader, as JSON, or fails as `failing_together`.

        There is no time limit: the leader may wait for a lock, or download a dataset.
        """
        decision: _T | None = None
        failure: FacetrainError | None = None
        if self.is_leader:
            try:
                with collectives.forbidden("a decision of the leader"):
                    decision = decide()
            except FacetrainError as error:
                failure = self._named(error)
        if self.rendezvous is None:
            if failure:
                raise failure
            return cast("_T", decision)
        key = f"{self._next()}/all"
        if self.is_leader:
            self._set(key, [decision, self._described(failure)])
        # The others wait for the leader, too: one of them says so.
        decision, reason = self._wait(key, named=0 if self.rank == 1 else None)
        self._raise(failure, reason)
        return cast("_T", decision)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let all ranks fail at the end of the block if one of them has. Each host prints the error of the first one.

        With several hosts, its message names the rank and its host.

        Raises:
            FacetrainError: the error of the first rank that failed; a LostRankError on further ranks of a host.
        """
        failure: FacetrainError | None = None
        try:
            with collectives.forbidden("failing_together"):
                yield
        except FacetrainError as error:
            failure = self._named(error)
        reasons = self.gather(self._described(failure))
        first = next(filter(None, reasons), None)
        self._raise(failure if first and first[0] == self.rank else None, first)

    @contextmanager
    def outages(self, kind: type[UsageError]) -> Iterator[None]:
        """Let an error of the block end a run that has trained before as a failure: what it lacks may come back.

        A cluster starts the job again after exit code 1, and gives it up after 2.
        """
        try:
            yield
        except kind as error:
            if self.has_trained:
                error.exit_code = RunError.exit_code
            raise

    @contextmanager
    def leaving_together(self) -> Iterator[None]:
        """Let all ranks leave the block before one of them ends. From then on they ignore SIGTERM.

        A launcher sends it to all ranks when the first has ended with an error: another one could still have to give
        back the run folder, or to print why all end. A rank that fails alone does not wait: the others do not know yet.
        Of those on a host that do so with the same error, such as one of the user's own code, the first prints it.
        """
        try:
            yield
        except Exception as error:
            is_of_all_ranks = isinstance(error, FacetrainError) and error.is_of_all_ranks
            is_printed = not is_of_all_ranks and self._is_printed_by_another(error)
            self._leave(waits=is_of_all_ranks)
            if is_printed:
                raise unprinted(str(error), getattr(error, "exit_code", RunError.exit_code)) from error
            raise
        except BaseException:  # a signal, perhaps to this rank alone: the others must not wait for it
            self._leave(waits=False)
            raise
        self._leave(waits=True)

    def _is_printed_by_another(self, error: Exception) -> bool:
        if self.rendezvous is None or isinstance(error, RankError):
            return False
        own = f"{self.rank} {error}"
        with suppress(FacetrainError), _store_errors():
            first = self.rendezvous.store.compare_set(f"failed/{self._host}", "", own).decode()
            return first != own and first.partition(" ")[2] == str(error)
        return False

    def _leave(self, *, waits: bool) -> None:
        if self.rendezvous is None:
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline = time.monotonic() + _FAREWELL_S
        with suppress(FacetrainError):
            if not self.is_leader:
                self._set(f"leaving/{self.rank}", None)
                if waits:
                    self._wait("leaving/all", deadline)
                return
            try:
                for rank in range(1, self.size) if waits else ():
                    self._wait(f"leaving/{rank}", deadline)
            finally:
                self._set("leaving/all", None)

    def _raise(self, failure: FacetrainError | None, reason: Any) -> None:
        """Raise the error that ended the ranks, if there is one."""
        if reason is None:
            return
        self._say_farewell()
        rank, host, name, message, exit_code = reason
        error = _error_class(name)(message)
        error.exit_code = exit_code
        # The leader is on a host that has trained: a host that comes later joins a start that another has opened.
        leaves_alone = self.goes_on and host != 0 and is_final(error)
        if failure is not None:
            if leaves_alone:
                leave_mark(Mark.LEAVES)
            raise of_all_ranks(failure)
        if self.spans_hosts and self.speaks_for_host and host != self._host:
            # The input of this host is valid.
            if leaves_alone:
                raise of_all_ranks(RunError(message))
            raise of_all_ranks(error)
        raise unprinted(f"rank {rank} failed", exit_code)

    def _described(self, failure: FacetrainError | None) -> list[Any] | None:
        """Return what `_raise` takes on all ranks."""
        if failure is None:
            return None
        return [self.rank, self._host, type(failure).__name__, str(failure), failure.exit_code]

    def _named(self, error: FacetrainError) -> FacetrainError:
        if self.spans_hosts:
            error.args = (f"rank {self.rank} on {self.place(self.rank)}: {error}",)
        return error

    @property
    def _host(self) -> int:
        """The first rank of this host. Hosts may have different numbers of ranks."""
        return self.rank - self.local_rank

    def _say_farewell(self) -> None:
        """Wait on the leader until the others have read why all end: its process may serve the store."""
        if self.rendezvous is None:
            return
        with suppress(FacetrainError):
            self._set(f"farewell/{self.rank}", None)
            if self.is_leader:
                deadline = time.monotonic() + _FAREWELL_S
                for rank in range(1, self.size):
                    self._wait(f"farewell/{rank}", deadline)

    def _next(self) -> str:
        self._count += 1
        return f"exchange/{self._count}"

    def _set(self, key: str, value: Any) -> None:
        assert self.rendezvous is not None, "a single process has no store"
        with _store_errors():
            self.rendezvous.store.set(key, json.dumps(value))

    def _wait(self, key: str, deadline: float = float("inf"), *, named: int | None = None) -> Any:
        """Return the value of a key when it is set. A long wait is reported with the rank `named`, which sets it."""
        assert self.rendezvous is not None, "a single process has no store"
        # Polled: a wait in the store would answer no signal, and end at its own time limit.
        pause_s, report_at = _FIRST_POLL_S, time.monotonic() + _QUIET_S
        with _store_errors():
            while not self.rendezvous.store.check([key]):
                if time.monotonic() > deadline:
                    raise LostRankError(f"{key} did not arrive")
                if named is not None and time.monotonic() > report_at:
                    report_at = time.monotonic() + _REPORT_S
                    who = f"rank {named} ({self.place(named)})"
                    # Most often its data are on a disk that does not answer.
                    print(
                        f"waiting for {who}, which has not opened its data and files yet",
                        file=sys.stderr,
                        flush=True,
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _SLOWEST_POLL_S)
            return json.loads(self.rendezvous.store.get(key))


def _error_class(name: Any) -> type[FacetrainError]:
    found = getattr(errors, str(name), RunError)
    return found if isinstance(found, type) and issubclass(found, FacetrainError) else RunError


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn a failure of the store into the loss of the rank, or agent, that serves it."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise LostRankError(f"the store of the ranks does not answer: {error}") from error
