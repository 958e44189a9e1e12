"""Lock of a run folder: only one process at a time writes a run, on any number of hosts that share the folder.

The leader of a run creates `run.lock` with its host, its process and a random token, and rewrites the file every few
seconds with a higher count. `flock` is not used: on several network file systems it locks within one host only.

A lock is stale if its process has ended, or writes another folder, of which this one is a copy. On the same host the
process table and the number of the folder show that at once. From another host the count is watched: if it does not
rise for `SILENCE_S`, the host is gone. No clocks of different hosts are compared, and an outage of the file system, in
which no host can rewrite the file, does not count.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from facetrain.errors import RunError, UsageError
from facetrain.files import os_errors_as
from facetrain.run.folder.lock_file import (
    ENDED,
    LOCK_FILE,
    POLL_S,
    SILENCE_S,
    STOPPED,
    Holder,
    open_lock,
    parse_holder,
    read_holder,
    read_lock,
)
from facetrain.telemetry.log import warn

BEAT_S = 5.0
"""Seconds between two rewrites of the file."""
OUTAGE_S = 10.0
"""Seconds between two looks after which the file system was silent, and maybe not the process: watch anew."""


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
        self._folder, self._path = folder, folder / LOCK_FILE
        self._beat_s, self._silence_s, self._outage_s = beat_s, silence_s, outage_s
        self._me = Holder.of_this_process(launchers)
        self._end = threading.Event()
        self._renewal = threading.Lock()
        self._thread: threading.Thread | None = None
        self._place = (0, 0)

    @property
    def token(self) -> str:
        """Random text in the file, by which another host sees that it shares the folder."""
        return self._me.token

    def acquire(self) -> None:
        """Wait until this process has the lock.

        Raises:
            UsageError: a living process has it.
            RunError: the folder cannot be written to.
        """
        with os_errors_as(RunError, self._folder):
            self._place = _identity(self._folder)
            self._me = self._me.model_copy(update={"folder": self._place[1]})
            # Create first and read later: of two processes that both find no lock, only one can create the file.
            while not self._create():
                content = read_lock(self._path)
                if content is not None and self._is_stale(content[0]):
                    self._remove(content)
        # A daemon: a run that ends by an error in another thread must not wait for it.
        self._thread = threading.Thread(target=self._keep_alive, name="run-lock", daemon=True)
        self._thread.start()

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
        with suppress(OSError):  # if the disk is gone, the next save reports it
            if not self._renew():
                other = read_holder(self._path) or "another process"
                raise RunError(
                    f"{self._folder}: {other} has taken over this run, because the lock of this process was removed, "
                    f"or did not change for {self._silence_s:.0f} s; this process ends"
                )

    def release(self) -> None:
        """Give the lock back. Does nothing if this process does not have it."""
        # The thread first: it would create the removed file again.
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with suppress(OSError):
            holder = read_holder(self._path)
            if holder is not None and holder.token == self.token:
                self._path.unlink()

    def _is_stale(self, content: bytes) -> bool:
        """Return whether a lock is to be removed; False if it has changed, without a word about its process.

        Raises:
            UsageError: its process is alive.
        """
        holder = parse_holder(content)
        # The agents of this job end its processes before they start new ones.
        if holder is not None and set(holder.launchers) & set(self._me.launchers):
            return True
        # The process table of another host cannot be seen from here.
        if holder is None or holder.machine != self._me.machine:
            return self._is_silent(
                content, f"{holder} has locked this run" if holder else f"{self._path} cannot be read"
            )
        state = holder.state()
        if state in ENDED or holder.writes_another(self._folder):
            return True
        advice = f"wait until it ends, or end it with `kill {holder.pid}`"
        if state in STOPPED:
            advice = (
                f"it is stopped (SIGSTOP): continue it with `kill -CONT {holder.pid}`, or end it with "
                f"`kill -KILL {holder.pid}`"
            )
        raise UsageError(
            f"{self._folder}: {holder} has been writing this run since {holder.since}, and is alive; {advice}"
        )

    def _is_silent(self, content: bytes, fact: str) -> bool:
        """Watch a lock whose process cannot be seen from this host; return whether it is silent.

        Raises:
            UsageError: the process rewrites the file.
        """
        warn(f"{self._folder}: {fact}: watching for {self._silence_s:.0f} s whether it is alive")
        if self._stays(lambda: (read_lock(self._path) or (None,))[0] == content):
            warn(
                f"{self._folder}: {fact}, but has not rewritten {LOCK_FILE} for {self._silence_s:.0f} s: it is gone"
            )
            return True
        if read_lock(self._path) is None:
            return False
        raise UsageError(
            f"{self._folder}: {fact}, and it is alive: it rewrites {LOCK_FILE}; wait until it ends, or end it"
        )

    def _stays(self, holds: Callable[[], bool]) -> bool:
        """Return whether something holds until the silence is over. Outages of the file system do not count."""
        since = last = time.monotonic()
        while holds():
            now = time.monotonic()
            # A file system that has blocked this process for so long may have blocked the other one, too.
            since, last = (now if now - last > self._outage_s else since), now
            if now - since >= self._silence_s:
                return True
            time.sleep(min(POLL_S, self._silence_s / 10))
        return False

    def _remove(self, content: tuple[bytes, int]) -> None:
        """Remove a stale lock. Of several processes that try this, one does."""
        # Without the claim, a slow process could remove the new lock of a faster one.
        claim = self._folder / f".{LOCK_FILE}.{hashlib.sha256(content[0]).hexdigest()[:16]}.claim"
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            # Of another process, which has ended meanwhile if the claim stays.
            if self._stays(claim.exists):
                claim.unlink(missing_ok=True)
            return
        try:
            if read_lock(self._path) == content:
                self._path.unlink()
        finally:
            claim.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Create the file; return False if it exists."""
        try:
            file = self._path.open("xb")  # atomic, on NFS too
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._me.dump())
        except OSError:
            # Of a full disk: the next process would wait for the holder of an empty file.
            with suppress(OSError):
                self._path.unlink()
            raise
        return True

    def _has_moved(self) -> bool:
        with suppress(OSError):  # an outage of the file system, which may end
            return not self._folder.exists() or _identity(self._folder) != self._place
        return False

    def _keep_alive(self) -> None:
        while not self._end.wait(self._beat_s):
            # A full disk or a lost server must not end the run: `require_held` reports a lost lock.
            with suppress(OSError):
                if not self._renew():
                    return

    def _renew(self) -> bool:
        """Rewrite the file with a higher count; return False if it is the lock of another process."""
        # Of two threads that find no file, the slower one would take it for that of another process.
        with self._renewal:
            try:
                with open_lock(self._path, "r+b") as file:
                    holder = parse_holder(file.read(1 << 16))
                    if holder is not None and holder.token != self.token:
                        return False
                    # In place: a new file under the name would not be seen by hosts that cache the folder.
                    self._me = self._me.model_copy(update={"beat": self._me.beat + 1})
                    file.seek(0)
                    file.write(self._me.dump())
            except FileNotFoundError:  # the file was removed: the folder is locked again
                return not self._has_moved() and self._create()
            return True


def _identity(folder: Path) -> tuple[int, int]:
    """Return what a folder keeps when it is moved, and another folder at its path does not have."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino
