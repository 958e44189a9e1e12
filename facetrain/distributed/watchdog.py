"""Watchdog of this process: ends it if it hangs, or waits for a rank or a helper process that is lost.

The elastic agent notices that a rank has ended, and asks the others to end by SIGTERM. A rank whose main thread is
blocked in a C call (a CUDA synchronization behind a collective that the lost rank never joins, a read from a dead
disk) does not see the signal, and an agent on another host knows nothing of the loss. So each rank has a watchdog
process, `facetrain.distributed.watchdog_process`. The watchdogs of all ranks are connected: the kernel reports that a
connection is closed (the rank has ended) or that the keep-alives are not answered (the host or the network is down).

The process judges only facts. It does not limit the time of a slow verification, compilation or save.

torch 2.13 has no replacement. NCCL's heartbeat monitor (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC) watches NCCL's threads in the
same process, and gloo has none. `torch.distributed.monitored_barrier` fails on a group in which a collective has
timed out. FileTimerServer runs only if TORCHELASTIC_ENABLE_FILE_TIMER is set for the agent, which a plain `torchrun`
lacks, and cannot report why it killed a rank.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from facetrain.distributed import watchdog_process
from facetrain.distributed.watchdog_process import Settings
from facetrain.errors import FacetrainError, LostRankError, RankError, RunError
from facetrain.files import error_reason

_PACKAGE = str(Path(__file__).resolve().parents[1])
_INTERVAL_S = 1.0
_FLUSH_S = 1.0
_READY_S = 15.0
_DISMISS_S = 5.0
_STOPPED_S = 30.0
"""Seconds after which a stopped watchdog counts as lost."""
_REASON_FILE = "TORCHELASTIC_ERROR_FILE"
_logger = logging.getLogger("facetrain")


class Guard:
    """Watchdog of this process, as the process sees it."""

    def __init__(self, process: subprocess.Popen[bytes], *, has_others: bool) -> None:
        self._process, self._has_others, self._has_failed = process, has_others, False
        self.dismissed = threading.Event()

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long other ranks wait for this one in a collective: it may be silent for longer."""
        self.say(f"timeout {timeout_s}")

    def report(self, error: BaseException) -> None:
        """Tell the other watchdogs why this rank ends, once. Its own then stays until the process has ended."""
        if self._has_failed or not self._has_others:
            return
        self._has_failed = True
        # The other watchdogs act by the kind: an error of this rank is the cause, the two others are consequences. The
        # most special class comes first.
        kinds = {LostRankError: "followed", RankError: "waited", BaseException: "failed"}
        kind = next(kind for cause, kind in kinds.items() if isinstance(error, cause))
        self.say(f"{kind} {error_reason(error) or type(error).__name__}")

    def dismiss(self) -> None:
        """End the watchdog, unless it waits for the end of this process: the exit may wait for a lost rank."""
        if self._has_failed:
            return
        self.dismissed.set()
        _guards.remove(self)
        assert self._process.stdin is not None, "stdin is a pipe"
        # Said before the pipe is closed: the watchdog takes a closed pipe for the death of the rank.
        self.say("done")
        self._process.stdin.close()
        try:
            self._process.wait(_DISMISS_S)
        except subprocess.TimeoutExpired:  # it is stopped
            self._process.kill()
            self._process.wait()

    def say(self, line: str) -> None:
        """Send the watchdog a line of those that `watchdog_process` lists."""
        assert self._process.stdin is not None, "stdin is a pipe"
        with suppress(OSError, ValueError):  # the watchdog has ended: `_follow` handles that
            # In one write: several threads send lines, and shorter ones than a page are never mixed by a pipe.
            self._process.stdin.write(line.replace("\n", " ").encode() + b"\n")


_guards: list[Guard] = []
"""Watchdogs of this process. After an error they stay until it has ended."""


@contextmanager
def watchdog(settings: Settings) -> Iterator[Guard]:
    """Guard this process within the block; one of several ranks also until it exits if the block raises an exception.

    The watchdog prints why it ends this process to standard error, and leaves it in a file for the elastic agent.
    Reasons are: a process that this one has started within the block is stopped or killed, and this one still waits;
    this rank is stopped, or has not run for `settings.timeout_s` seconds and some more; another rank is lost, or has
    waited in vain, and this process has not ended by itself shortly after. A single process may be stopped.
    """
    has_others = len(settings.places) > 1
    process, ready = _start(settings), threading.Event()
    guard = Guard(process, has_others=has_others)
    _guards.append(guard)

    def report() -> None:
        stopped_s = 0.0
        while not guard.dismissed.wait(_INTERVAL_S):
            guard.say(f"at {main_thread_position()}")
            # Ctrl-Z stops this process together with its watchdog: only what passes here counts.
            stopped_s = stopped_s + _INTERVAL_S if watchdog_process.is_stopped(process.pid) else 0.0
            if stopped_s > _STOPPED_S:
                process.kill()  # `_follow` ends this process

    # A line per second proves that Python runs here. A main thread in a long C call that releases Python's lock does
    # not stop it.
    threading.Thread(target=report, name="watchdog", daemon=True).start()
    death = (
        f"the watchdog of rank {settings.rank} (process {process.pid}) was killed, and the rank ends with it"
    )
    assert process.stdout is not None, "stdout is a pipe"
    orders = (process.stdout, ready, guard.dismissed, death)
    threading.Thread(target=_follow, args=orders, name="watchdog-orders", daemon=True).start()
    if has_others:
        ready.wait(_READY_S)  # a loss that comes before the watchdogs are connected would be noticed late
    try:
        yield guard
    except BaseException as error:
        guard.report(error)
        raise
    finally:
        guard.dismiss()


def end_within(seconds: float, exit_code: int, reason: str) -> None:
    """Let the watchdog of this process end it with an exit code if it still runs after so many seconds.

    `reason` follows the name of the process in the message. Can be called by a signal handler.
    """
    for guard in _guards:
        guard.say(f"within {seconds} {exit_code} {reason}")


def read_reason(path: Path, *, printed: bool | None = None) -> str:
    """Return the reason that a watchdog has left in an error file of the elastic agent, or "".

    `printed` selects the reasons that the watchdog has printed, or those that it has left to the agent.
    """
    try:
        left = json.loads(path.read_text(encoding="utf-8"))
        message, was_printed = str(left["message"]), bool(left.get("printed", True))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    return message if printed in (None, was_printed) else ""


def main_thread_position() -> str:
    """Return the line at which the main thread is: the innermost of this package, else the innermost."""
    frame = innermost = sys._current_frames()[threading.main_thread().ident or 0]
    # Outward to the first line of this package: a line inside of torch says little to a user.
    while frame.f_back and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = innermost
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _start(settings: Settings) -> subprocess.Popen[bytes]:
    settings = settings._replace(
        pid=os.getpid(),
        error_file=os.environ.get(_REASON_FILE, ""),
        others=list(watchdog_process.descendants(os.getpid())),
    )
    with _group_signals_blocked():
        process = _popen(settings)
    assert process.stdin is not None, "stdin is a pipe"
    # Through the pipe and not by the command line, which every user of the host can read: one setting is the token.
    with suppress(BrokenPipeError):  # it was killed, which `_follow` reports
        process.stdin.write(json.dumps(settings._asdict()).encode() + b"\n")
    if settings.listener is not None:
        # The watchdog has its own copy; with this one open, the port would outlive it.
        os.close(settings.listener)
    return process


@contextmanager
def _group_signals_blocked() -> Iterator[None]:
    """Block the signals that the watchdog ignores while it starts: it inherits that until it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watchdog_process.SIGNALS_OF_THE_GROUP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _popen(settings: Settings) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -S and -E: the program needs no site packages, and no variable of the rank may change it.
        [sys.executable, "-S", "-E", watchdog_process.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A line that waited in a buffer would be a rank that seems to hang.
        bufsize=0,
        # A Python of an environment module finds its own library by this variable.
        env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
        pass_fds=() if settings.listener is None else (settings.listener,),
    )


def _follow(lines: IO[bytes], ready: threading.Event, ended: threading.Event, death: str) -> None:
    """Do what the watchdog asks for: write the loss of a rank to the log, and exit."""
    with lines:
        for line in lines:
            kind, _, rest = line.decode(errors="replace").strip().partition(" ")
            if kind == "ready":
                ready.set()
            elif kind == "lost":
                _log(rest)
            elif kind == "end":
                code, _, reason = rest.partition(" ")
                _exit_now(reason, int(code))
    if not ended.is_set():
        # The other ranks take the end of the watchdog for the end of this rank.
        _exit_now(death, RunError.exit_code, prints=True)


def _log(message: str) -> None:
    if _logger.handlers:  # without any, logging would print the message
        _logger.error("%s", message)


def _exit_now(reason: str, exit_code: int, *, prints: bool = False) -> None:
    """End this process although its main thread may be blocked, with the error that it was about to report, if any."""
    error: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = error[1] if isinstance(error, tuple) else error  # before Python 3.12
    reports = isinstance(error, FacetrainError) and not isinstance(error, LostRankError)
    if isinstance(error, FacetrainError):
        exit_code = error.exit_code

    def write() -> None:
        with suppress(OSError, ValueError):
            if reports:
                print(f"error: {error}", file=sys.stderr, flush=True)
            elif prints:
                print(f"error: {reason}", file=sys.stderr, flush=True)
            _log(reason)
            sys.stdout.flush()
            sys.stderr.flush()

    # In a thread: the main thread may hold the lock of the log while it waits for the disk.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_FLUSH_S)
    os._exit(exit_code)
