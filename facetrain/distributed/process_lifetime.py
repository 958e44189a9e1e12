"""Relation of this process to the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import zlib
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from facetrain.distributed.watchdog_process import status_of, write_to_stderr

_PR_SET_PDEATHSIG = 1  # from Linux's prctl.h
_OWN_LAUNCHER = "FACETRAIN_LAUNCHER"
"""Environment variable with the process id of the facetrain that starts the ranks. All others that an elastic agent
sets are torchrun's as well."""
RUN_ID = "facetrain"
"""Name of the rendezvous of facetrain's elastic agents, which their ranks inherit; torchrun's is another. The same for
all runs: hosts whose configs differ must meet, to say so."""
_FAILED = "failed_with_"
"""Beginning of the mark of a rank that has printed why it ends; the exit code follows."""


class Mark(StrEnum):
    """Mark of a rank for facetrain's launcher: a file in the rank's folder of the elastic agent."""

    NO_RESTART = "no_restart"
    """Every restart of this rank would fail as it does now."""
    LEAVES = "leaves"
    """This host cannot take part, and the others go on without it."""


def has_agent() -> bool:
    """Return whether an elastic agent started this rank, which reports why its ranks have ended."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_by_torchrun() -> bool:
    """Return whether an elastic agent, or another launcher that sets its variables, started this rank."""
    return has_agent() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def has_peers() -> bool:
    """Return whether a launcher started this process as one of several ranks."""
    return launched_by_torchrun() and os.environ.get("WORLD_SIZE", "1") != "1"


def is_first_rank() -> bool:
    """Return whether this process is rank 0, which writes the results that several ranks have computed together."""
    return not launched_by_torchrun() or os.environ.get("RANK", "0") == "0"


def own_local_rank() -> int:
    """Return the number of this process among the ranks of its host, which selects its GPU; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK") or 0) if launched_by_torchrun() else 0


def mark_own_ranks() -> None:
    """Let the ranks that this process starts know that facetrain is their launcher, and not torchrun."""
    os.environ[_OWN_LAUNCHER] = str(os.getpid())


def outside_launcher() -> str:
    """Return how a launcher other than facetrain started this rank, as part of a sentence; "" if none did."""
    if not launched_by_torchrun() or _OWN_LAUNCHER in os.environ:
        return ""
    if has_agent():
        return "under torchrun, which starts the processes"
    return (
        "with RANK, WORLD_SIZE and MASTER_ADDR in the environment, by which another launcher starts the processes "
        "(unset them if there is none)"
    )


def leave_mark(mark: str) -> None:
    """Leave a mark for the launcher of this rank, if that is facetrain."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and _OWN_LAUNCHER in os.environ:
        with suppress(OSError):
            (Path(error_file).parent / mark).touch()


def has_mark(log_dir: Path, mark: Mark) -> bool:
    """Return whether a rank has left a mark. `log_dir` is the folder of the elastic agent for the logs of its ranks."""
    return any(log_dir.glob(f"*/attempt_*/*/{mark}"))


def leave_exit_code(exit_code: int) -> None:
    """Leave a mark for facetrain's launcher: this rank has printed why it ends, with this exit code.

    After a signal, torch's agent reports the exit code of no rank.
    """
    leave_mark(f"{_FAILED}{exit_code}")


def left_exit_code(attempt: Path) -> int:
    """Return the exit code that a rank of a start has left; 0 if none has. `attempt` is the agent's folder of it."""
    left = sorted(attempt.glob(f"*/{_FAILED}*"), key=lambda path: path.stat().st_mtime_ns)
    return int(left[0].name.removeprefix(_FAILED)) if left else 0


def is_said_by_another(message: str) -> bool:
    """Return whether another rank of the same start on this host has said so already, and leave a mark for the others.

    For ranks that have not met: a wrong option in the command line of all, or a Ctrl-C in their terminal.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return False
    try:
        Path(error_file).parent.with_name(f"said_{zlib.crc32(message.encode()):08x}").touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:
        pass
    return False


def process_stat(pid: int) -> tuple[str, str]:
    """Return state and start time of a process, a letter and clock ticks as in proc(5); both "" if they are unknown."""
    fields = status_of(pid)
    return (fields[0], fields[19]) if fields else ("", "")


def forget_other_ranks() -> None:
    """Forget the launcher of a rank that has started this command, such as a callback, at once or through a queue.

    The command would otherwise wait for the other ranks, and end with the launcher. The variables of a torchrun that a
    rank has started stay.
    """
    if os.environ.pop(_OWN_LAUNCHER, None) and os.environ.get("TORCHELASTIC_RUN_ID") == RUN_ID:
        for name in list(os.environ):
            if name in ("RANK", "LOCAL_RANK") or name.startswith("TORCHELASTIC_"):
                del os.environ[name]


def end_with_launcher() -> None:
    """Let the kernel kill this rank when its elastic agent has ended.

    If the agent is killed (by the kernel for lack of memory, or by hand), its ranks would otherwise train
    on in the background, and write to a folder in which the run may already continue.
    """
    if has_agent():
        end_with_parent()
        # The kernel sends nothing if the launcher has ended before the call, while this rank started.
        if os.environ.get(_OWN_LAUNCHER, str(os.getppid())) != str(os.getppid()):
            signal.raise_signal(signal.SIGKILL)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent process has ended."""
    # By the kernel: no thread of this process has to run for it, which may hang in a C call.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def exit_interrupted() -> NoReturn:
    """End this process by Ctrl-C at once, from a signal handler, whatever its main thread waits for."""
    report_interruption()
    os._exit(128 + signal.SIGINT)


def report_interruption() -> None:
    """Print that Ctrl-C ends this process; of the ranks of a host, which all get it, the first alone prints it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # Not by print: the main thread may hold the lock of the stream while it waits for the reader.
        write_to_stderr("error: interrupted")
