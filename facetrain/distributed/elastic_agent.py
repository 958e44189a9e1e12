"""Ranks under torch's elastic agent: start, signals, restarts, and the reason why a rank ended."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.numa.binding import AffinityMode, NumaOptions

import facetrain
from facetrain.distributed.host_rendezvous import BACKEND, FinalFailure, create_rendezvous
from facetrain.distributed.process_lifetime import RUN_ID, exit_interrupted, left_exit_code
from facetrain.distributed.process_setup import COLLECTIVES
from facetrain.distributed.topology import Topology
from facetrain.distributed.watchdog import read_reason
from facetrain.errors import LaunchError, LostRankError, UsageError
from facetrain.files import error_reason, require_temporary_folder
from facetrain.signals import has_to_wait, raise_soon, with_hangup


def launch_ranks(arguments: list[str], where: Topology) -> int:
    """Run `python ARGUMENTS` on every rank of this host; return the exit code of the whole.

    That is 0, the exit code of the first rank that failed, or 128 + the signal that stopped this process and all ranks.

    Raises:
        LaunchError: the ranks could not be started, or one of them was killed.
        UsageError: there is no folder for temporary files.
    """
    require_temporary_folder()
    with tempfile.TemporaryDirectory(prefix="facetrain-agent-", ignore_cleanup_errors=True) as name:
        log_dir = Path(name)
        _handle_signals(log_dir)
        try:
            elastic_launch(_config(where, log_dir), sys.executable)(*_path_options(), *arguments)
        except ChildFailedError as error:
            return _exit_code(error)
        except FinalFailure:  # the rank has printed its error
            return UsageError.exit_code
        except SignalException as error:
            if error.sigval == signal.SIGINT and not any(log_dir.glob("*/attempt_*")):
                raise KeyboardInterrupt from None  # no rank has started that could report the signal
            return _failure_of_ranks(log_dir) or 128 + int(error.sigval)
        except OSError as error:
            raise LaunchError(
                f"the processes of the ranks cannot be started: {error_reason(error)}"
            ) from error
        except (RendezvousError, RuntimeError) as error:
            raise LaunchError(_explain_rendezvous_failure(error, where.endpoint, log_dir)) from error
    return 0


def _path_options() -> list[str]:
    """Return the options of Python with which a rank imports the modules that this process imports.

    `python -m` looks in the current folder first: a file there would replace a module of the same name. Only a
    facetrain that is itself in the current folder may have been found so.
    """
    return [] if Path(facetrain.__file__).parents[1] == Path.cwd() else ["-P"]


def _handle_signals(log_dir: Path) -> None:
    """Let signals end the wait of the agent from now on, for other hosts or for its ranks."""
    received = set[int]()
    on_signal = partial(_on_signal, log_dir, received)
    # SIGUSR1 announces the end of an allocation under Slurm.
    for number in with_hangup(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, on_signal)
    before = sys.unraisablehook

    def repeat_signal(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, SignalException):
            return before(dropped)
        # It came in a finalizer, or in another callback in which Python drops exceptions.
        received.clear()
        raise_soon(dropped.exc_value.sigval)

    sys.unraisablehook = repeat_signal


def _on_signal(log_dir: Path, received: set[int], number: int, frame: FrameType | None) -> None:
    """Let the ranks save and end at the first signal. The second Ctrl-C ends them and this process at once."""
    if number == signal.SIGINT and number in received:
        # Not by an exception: the agent would wait for its ranks again. The kernel ends them with this process.
        shutil.rmtree(log_dir, ignore_errors=True)
        exit_interrupted()
    if has_to_wait(frame):
        return raise_soon(number)
    is_first = not received
    received.add(number)
    # Only once: a further exception would end the agent's wait for its ranks. The end of a terminal alone sends SIGHUP
    # twice: by the shell, and by the kernel when the shell has ended.
    if is_first:
        # Out of the agent's wait: it passes the signal on to its ranks, and gives them the grace period.
        raise SignalException("stopped", signal.Signals(number))


def _config(where: Topology, log_dir: Path) -> LaunchConfig:
    rendezvous_handler_registry.register(BACKEND, create_rendezvous)
    return LaunchConfig(
        min_nodes=where.min_hosts,
        max_nodes=where.max_hosts,
        nproc_per_node=where.nproc_per_node,
        run_id=RUN_ID,
        rdzv_backend=BACKEND,
        rdzv_endpoint=where.endpoint,
        rdzv_configs={"log_dir": str(log_dir)},
        max_restarts=where.max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir)),
        numa_options=_numa_options(where),
        signals_to_handle="SIGQUIT",  # the others have a handler of their own, `_handle_signals`
    )


def _numa_options(where: Topology) -> NumaOptions | None:
    """Return options that bind each rank to the cores beside its GPU; None if it has none, or numactl is missing."""
    if not 1 < where.nproc_per_node <= torch.cuda.device_count() or shutil.which("numactl") is None:
        return None
    return NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)


def _explain_rendezvous_failure(error: Exception, endpoint: str, log_dir: Path) -> str:
    """Return why the hosts did not find each other: at the first start, or at a restart after ranks had run."""
    at = f" at {endpoint}" if endpoint else ""
    # torch's RendezvousError itself only refers to its cause.
    cause = error.__cause__ or error
    reason = error_reason(cause).rstrip(".")
    last = _last_start(log_dir)
    if last is None:
        advice = "check that the port is free and reachable from every host"
        if isinstance(cause, RendezvousTimeoutError):
            advice = "start the command on the others within this time"
        return f"the rendezvous{at} failed: {reason}; {advice}"
    reasons = [read_reason(path) for path in last.glob("*/error.json")]
    before = next(filter(None, reasons), "the reason is printed above, or on another host")
    return f"the ranks of this host ended: {before}; the rendezvous{at} for a restart failed ({reason})"


def _failure_of_ranks(log_dir: Path) -> int:
    """Return the exit code of the last start of the ranks, if one of them has printed why it failed; 0: none has."""
    last = _last_start(log_dir)
    if last is None:
        return 0
    if any(read_reason(path, printed=True) for path in last.glob("*/error.json")):
        return LaunchError.exit_code  # the watchdog of a rank has printed why it killed the rank
    return left_exit_code(last)


def _last_start(log_dir: Path) -> Path | None:
    """Return the folder of the agent for the last start of its ranks; None if there was none."""
    # By its number: a clock may be set back between two starts.
    attempts = log_dir.glob("*/attempt_*")
    return max(attempts, key=lambda path: int(path.name.removeprefix("attempt_")), default=None)


def _exit_code(error: ChildFailedError) -> int:
    """Return the exit code of the rank that failed first and has printed its reason.

    Raises:
        LaunchError: no rank has printed a reason.
    """
    # In this order: what a watchdog has printed, what a rank has said itself, a signal that ended one, what another
    # host knows.
    files = [Path(failure.error_file) for failure in error.failures.values()]
    if any(read_reason(path, printed=True) for path in files):
        return LaunchError.exit_code  # the watchdog of the rank has printed why it killed the rank
    codes = [failure.exitcode for failure in error.failures.values()]
    # The agent ends the other ranks by SIGTERM, which a rank that has left its training turns into this code.
    ended = 128 + signal.SIGTERM
    explained = [code for code in codes if code > 0 and code not in (LostRankError.exit_code, ended)]
    if explained or set(codes) == {ended}:
        return int((explained or codes)[0])
    for rank, failure in error.failures.items():
        # Those that knew of a loss and yet hung are ended by SIGKILL.
        is_first = failure.exitcode != -signal.SIGTERM and not read_reason(Path(failure.error_file))
        if failure.exitcode < 0 and is_first:
            raise LaunchError(_explain_signal(-failure.exitcode, rank, failure.pid))
    lost = next(filter(None, (read_reason(path, printed=False) for path in files)), "")
    raise LaunchError(
        f"the ranks of this host ended: {lost}"
        if lost
        else "the ranks of this host ended because another rank is lost; its output, or that of its host, says why"
    )


def _explain_signal(number: int, rank: int, pid: int) -> str:
    name = signal.Signals(number).name
    hints = {
        "SIGKILL": "; the kernel does so if memory runs out",
        "SIGABRT": (
            "; on GPUs, NCCL does so a minute after it has waited train.timeout_s for another rank "
            f"({COLLECTIVES}{rank} in the run folder then lists what it waited for), and CUDA after an illegal access "
            "or an uncorrectable memory (ECC) error: `dmesg` and `nvidia-smi -q -d ECC` show the latter"
        ),
    }
    return f"rank {rank} (process {pid}) was ended by {name}{hints.get(name, '')}"
