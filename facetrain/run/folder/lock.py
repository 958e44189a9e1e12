"""Lock of a run folder: only one process at a time writes a run, on any number of hosts that share the folder.

The leader of a run creates `run.lock` with its host, its process and a random token, and rewrites the file every few
seconds with a higher count. `flock` is not used: on several network file systems it locks within one host only. The
file is created by a hard link, which is atomic on NFS too.

A lock is stale if its process has ended. On the same host the process table shows that at once. From another host the
count is watched: if it does not rise for `SILENCE_S`, the host is gone. No clocks of different hosts are compared, and
an outage of the file system, in which no host can rewrite the file, does not count.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from facetrain.distributed.agreement import decide_on_leader
from facetrain.distributed.world import World
from facetrain.errors import RunError, UsageError
from facetrain.files import os_errors_as
from facetrain.run.folder.lock_file import ENDED, STOPPED, Holder, LockFile, process_state, this_machine
from facetrain.telemetry.log import warn

LOCK_FILE = "run.lock"
BEAT_S = 5.0
"""Seconds between two rewrites of the file."""
SILENCE_S = 30.0
"""Seconds without a rewrite after which the lock of another host is stale: several times `BEAT_S`, because network
file systems delay writes."""
OUTAGE_S = 10.0
"""Seconds between two looks at the file after which the file system was silent, and maybe not the process: the watch
begins again, so that the process has time to rewrite the file."""
_POLL_S = 0.5
_CLOCK_DIFFERENCE_S = 300.0
"""Seconds by which the clock of another host may differ, for a look that cannot wait for the next rewrite."""


class _Watch:
    """Time for which nothing has changed, as far as this process could see it."""

    def __init__(self, limit_s: float, outage_s: float) -> None:
        self._limit_s, self._outage_s = limit_s, outage_s
        self.restart()

    def restart(self) -> None:
        """Begin again with the next look."""
        self._since = self._last = float("-inf")

    def is_over(self) -> bool:
        """Look: return whether the time is over."""
        now = time.monotonic()
        # A file system that has blocked this process for so long may have blocked the other one, too.
        if now - self._last > self._outage_s:
            self._since = now
        self._last = now
        return now - self._since >= self._limit_s


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
        self._folder = folder
        self._beat_s, self._silence_s = beat_s, silence_s
        self._me = Holder.of_this_process(launchers)
        self._file = LockFile(folder / LOCK_FILE, self._me.token)
        self._watched: tuple[bytes, int] | None = None
        # One for the lock of another host, one for the claim of a process that takes a stale lock over at the same
        # time.
        self._silence, self._claim = _Watch(silence_s, outage_s), _Watch(silence_s, outage_s)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._locked_folder = (0, 0)

    def try_acquire(self) -> str | None:
        """Try to get the lock. Return None if this process has it now, else what the next call waits for.

        Raises:
            UsageError: a living process has it.
            RunError: the folder cannot be written to.
        """
        with os_errors_as(RunError, self._folder):
            # Create first and read later: of two processes that both find no lock, only one can create the file.
            if self._begin():
                return None
            content = self._file.read()
            if content is None:  # removed in the meantime
                return ""
            holder = Holder.parse(content[0])
            # The file exists, and is
            #     not readable, or of another host      → watched: taken over unless it is rewritten
            #     of this job, or of an ended process   → taken over
            #     of a living process of this host      → refused
            if holder is None:
                return self._watch(content, f"{self._file.path} cannot be read")
            if set(holder.launchers) & set(self._me.launchers):
                # The agents of this job end its processes before they start new ones.
                return self._take_over(content)
            place = f"process {holder.pid} on {holder.host}"
            # Its process table cannot be seen from here; a number of a process says nothing on another machine.
            if holder.machine != self._me.machine:
                return self._watch(content, f"{place} has locked this run")
            state = process_state(holder.pid, holder.pid_start)
            if state in ENDED:
                return self._take_over(content)
        advice = f"wait until it ends, or end it with `kill {holder.pid}`"
        if state in STOPPED:
            advice = (
                f"it is stopped (SIGSTOP): continue it with `kill -CONT {holder.pid}`, or end it with "
                f"`kill -KILL {holder.pid}`"
            )
        raise UsageError(
            f"{self._folder}: {place} has been writing this run since {holder.since}, and is alive; {advice}"
        )

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
        try:
            is_held = self._renew()
        except OSError:  # as in `_keep_alive`: if the disk is gone, the next save reports it
            return
        if not is_held:
            content = self._file.read()
            holder = Holder.parse(content[0]) if content else None
            by = f"process {holder.pid} on {holder.host}" if holder else "another process"
            raise RunError(
                f"{self._folder}: {by} has taken over this run, because the lock of this process did not change for "
                f"{self._silence_s:.0f} s; this process ends"
            )

    def release(self) -> None:
        """Give the lock back. Does nothing if this process does not have it."""
        # The thread first: it would create the removed file again.
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with suppress(OSError):
            if self._is_mine():
                self._file.path.unlink()

    def _watch(self, content: tuple[bytes, int], fact: str) -> str | None:
        """Wait for the next rewrite of a lock whose process cannot be seen from this host."""
        # In each call: the watch needs to know how long ago this process has looked.
        is_silent = self._silence.is_over()
        if self._watched is None:
            self._watched = content
        elif content != self._watched:
            raise UsageError(
                f"{self._folder}: {fact}, and it is alive: it rewrites {LOCK_FILE}; wait until it ends, or end it"
            )
        elif is_silent:
            warn(
                f"{self._folder}: {fact}, but has not rewritten {LOCK_FILE} for {self._silence_s:.0f} s: it is gone"
            )
            return self._take_over(content)
        return f"{self._folder}: {fact}: watching for {self._silence_s:.0f} s whether it is alive"

    def _take_over(self, content: tuple[bytes, int]) -> str | None:
        """Remove a stale lock, and get it. Of several processes that try this, one succeeds."""
        # Without the claim, a slow process could remove the new lock of a faster one.
        claim = self._folder / f".{LOCK_FILE}.{hashlib.sha256(content[0]).hexdigest()[:16]}.claim"
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            return self._wait_for_claim(claim)
        try:
            # Another process may have taken it over before this one had the claim.
            if self._file.read() != content:
                return ""
            self._file.path.unlink()
            # While the claim is held, so that no other process finds the same stale lock again.
            return None if self._begin() else ""
        finally:
            self._watched = None
            self._silence.restart()
            self._claim.restart()
            claim.unlink(missing_ok=True)

    def _wait_for_claim(self, claim: Path) -> str:
        """Wait until another process has taken a stale lock over; remove the claim of one that has ended meanwhile."""
        if self._claim.is_over():
            claim.unlink(missing_ok=True)
            self._claim.restart()
        return ""

    def _begin(self) -> bool:
        """Create the file, and rewrite it from now on; return False if it exists."""
        if not self._file.create(self._me.dump()):
            return False
        self._locked_folder = _identity(self._folder)
        # A daemon: a run that ends by an error in another thread must not wait for it.
        self._thread = threading.Thread(target=self._keep_alive, name="run-lock", daemon=True)
        self._thread.start()
        return True

    def _has_moved(self) -> bool:
        try:
            return _identity(self._folder) != self._locked_folder
        except FileNotFoundError:
            return True
        except OSError:  # an outage of the file system, which may end
            return False

    def _keep_alive(self) -> None:
        while not self._end.wait(self._beat_s):
            # A full disk or a lost server must not end the run: `require_held` reports a lost lock.
            with suppress(OSError):
                if not self._renew():
                    return

    def _renew(self) -> bool:
        """Rewrite the file with a higher count; return False if it is the lock of another process."""
        try:
            with self._file.open("r+b") as file:
                holder = Holder.parse(file.read(1 << 16))
                if holder is not None and holder.token != self._me.token:
                    return False
                # In place: a new file under the name would not be seen by hosts that cache the folder.
                self._me = self._me.model_copy(update={"beat": self._me.beat + 1})
                file.seek(0)
                file.write(self._me.dump())
        except FileNotFoundError:  # the file was removed: the folder is locked again
            if self._has_moved():
                return False
            return self._file.create(self._me.dump())
        return True

    def _is_mine(self) -> bool:
        content = self._file.read()
        holder = Holder.parse(content[0]) if content else None
        return holder is not None and holder.token == self._me.token


def is_locked(folder: Path) -> bool:
    """Return whether a living process holds the lock of a run folder, by one look at it."""
    try:
        content = LockFile(folder / LOCK_FILE, "").read()
    except OSError:
        return False
    if content is None:
        return False
    holder, changed_ns = Holder.parse(content[0]), content[1]
    if holder is not None and holder.machine == this_machine():
        return process_state(holder.pid, holder.pid_start) not in ENDED
    # One look cannot see the count rise, so the time of the last change decides here; the lock itself never compares
    # clocks.
    return time.time() - changed_ns / 1e9 < SILENCE_S + _CLOCK_DIFFERENCE_S


def _identity(folder: Path) -> tuple[int, int]:
    """Return what a folder keeps when it is moved, and another folder at its path does not have."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino


@contextmanager
def locked(world: World, folder: Path, launchers: Sequence[str]) -> Iterator[RunLock | None]:
    """Hold the lock of a run folder for the duration of the context; yield it on the leader. Collective.

    Raises:
        UsageError: a living process writes the run.
        RunError: the folder cannot be written to.
    """
    lock, shown = RunLock(folder, launchers) if world.is_leader else None, ""

    def try_acquire() -> str | None:
        return lock.try_acquire() if lock is not None else None

    # In short calls: the other ranks wait for each of them no longer than their collectives allow.
    while (waits_for := decide_on_leader(world, try_acquire)) is not None:
        if lock is not None and waits_for not in ("", shown):
            shown = waits_for
            warn(shown)
        time.sleep(_POLL_S)
    try:
        yield lock
    finally:
        if lock is not None:
            lock.release()
