"""Start this program once per device, several under torchrun's elastic agent, and report how it ended."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from facetrain.cpu_cores import usable_cores
from facetrain.distributed.process_setup import silence_torch_logs
from facetrain.distributed.supervisor import Supervisor
from facetrain.distributed.watchdog import last_words
from facetrain.errors import LaunchError, LostRankError, UsageError

GRACE_S = 300
"""Seconds from SIGTERM to SIGKILL: enough to write a checkpoint of several GiB."""


@dataclass(frozen=True)
class Topology:
    """How many processes on how many nodes, and where they meet."""

    nproc_per_node: int
    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str = ""
    max_restarts: int = 0


def topology(
    nproc_per_node: str, nnodes: str, rdzv_endpoint: str | None, max_restarts: int, device: str
) -> Topology:
    """Check the launch options of the command line.

    Raises:
        UsageError: an option cannot be followed; the message names it.
    """
    least, most = _node_range(nnodes)
    if most > 1 and not rdzv_endpoint:
        raise UsageError(
            f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT: one host and a free port on it, the same on every node"
        )
    return Topology(
        nproc_per_node=_processes(nproc_per_node, device),
        min_nodes=least,
        max_nodes=most,
        endpoint=rdzv_endpoint or "",
        max_restarts=max_restarts,
    )


def _node_range(nnodes: str) -> tuple[int, int]:
    try:
        least, _, most = nnodes.partition(":")
        low, high = int(least), int(most or least)
    except ValueError:
        low = high = 0
    if not 1 <= low <= high:
        raise UsageError(f"--nnodes {nnodes}: give a number of nodes, or MIN:MAX")
    return low, high


def _processes(nproc_per_node: str, device: str) -> int:
    if nproc_per_node == "auto":
        if device == "cpu" or not _has_driver():
            return 1
        silence_torch_logs()
        import torch

        return max(torch.cuda.device_count(), 1)
    if not nproc_per_node.isdigit() or int(nproc_per_node) == 0:
        raise UsageError(f"--nproc-per-node {nproc_per_node}: give a number of processes, or auto")
    return int(nproc_per_node)


def _has_driver() -> bool:
    """Whether the driver of a GPU is there. Where none is, torch need not be imported to count devices."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()  # AMD's
    return True


def launch(arguments: list[str], where: Topology, run_id: str) -> int:
    """Run `python -m facetrain ARGUMENTS` on every local rank; return the exit code of the whole.

    That is 0, the exit code of the first worker that failed, or 128 plus the number of the signal
    that stopped this process.

    Raises:
        LaunchError: the processes could not be started, or one of them died without a word.
    """
    silence_torch_logs()
    _share_cores(where.nproc_per_node)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_S))
    command = [sys.executable, "-m", "facetrain", *arguments]
    if where.nproc_per_node == where.max_nodes == 1:
        return _supervise(command, where.max_restarts)
    return _launch_elastic(command, where, run_id)


def _supervise(command: list[str], max_restarts: int) -> int:
    supervisor = Supervisor(int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))
    code = supervisor.run(command, max_restarts)
    if supervisor.stopped_by:
        return 128 + supervisor.stopped_by
    if code < 0:
        raise _ended_by(-code, rank=0, pid=supervisor.pid)
    return code


def _launch_elastic(command: list[str], where: Topology, run_id: str) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    with agent_folder() as log_dir:
        signal.signal(signal.SIGINT, partial(_pass_on, log_dir))
        try:
            elastic_launch(_config(where, run_id, log_dir), command[0])(*command[1:])
        except ChildFailedError as error:
            return _explain(error)
        except SignalException as error:
            # Its frames hold the agent: were they dropped while the agent's heartbeat thread borrows it,
            # that thread would be the last owner, and torch has it join itself, with a traceback.
            atexit.register(error.with_traceback, error.__traceback__)
            return 128 + int(error.sigval)
        except (RendezvousError, OSError, ConnectionError, RuntimeError) as error:
            raise LaunchError(_unmet(error, where.endpoint, log_dir)) from error
    return 0


def _pass_on(log_dir: Path, number: int, frame: FrameType | None) -> None:
    """On the first Ctrl-C, have the workers save; the next one ends them and this process at once."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    signal.signal(signal.SIGINT, partial(_end_at_once, log_dir))
    raise SignalException("interrupted", signal.Signals(number))


def _end_at_once(log_dir: Path, number: int, frame: FrameType | None) -> None:
    # Not by an exception: the agent would wait for its workers anew. They end with this process.
    shutil.rmtree(log_dir, ignore_errors=True)
    print("error: interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)


def _config(where: Topology, run_id: str, log_dir: Path) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    if where.max_nodes > 1:
        # With one store for all rounds, a node that comes later waits for an address that nobody tells again.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return LaunchConfig(
        min_nodes=where.min_nodes,
        max_nodes=where.max_nodes,
        nproc_per_node=where.nproc_per_node,
        run_id=run_id,
        rdzv_backend="c10d",
        # Port 0: one machine meets itself on any free port.
        rdzv_endpoint=where.endpoint or "localhost:0",
        max_restarts=where.max_restarts,
        local_addr=None if where.endpoint else "localhost",
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir)),
        # SIGUSR1 is how Slurm announces the end of an allocation.
        # Ctrl-C has a handler of its own.
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT,SIGUSR1",
    )


def _share_cores(processes: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(usable_cores() // processes, 1)))


def _unmet(error: Exception, endpoint: str, log_dir: Path) -> str:
    """Say why the processes did not meet: for the first time, or again after they had run."""
    at = f" at {endpoint}" if endpoint else ""
    reason = str(error.__cause__ or error).rstrip(".")  # torch's own errors only say that there is a cause
    attempts = sorted(log_dir.glob("*/attempt_*"), key=lambda path: path.stat().st_mtime)
    if not attempts:
        return f"the processes could not meet{at}: {reason}; is the port free and reachable?"
    words = [last_words(path) for path in attempts[-1].glob("*/error.json")]
    before = next(filter(None, words), "what ended it is said above, or by another machine")
    return f"the run has ended here: {before}; the machines did not meet again{at} ({reason})"


def _explain(error: Any) -> int:
    if any(last_words(Path(failure.error_file)) for failure in error.failures.values()):
        return LaunchError.exit_code  # the rank's guard has said why it ended it
    codes = [failure.exitcode for failure in error.failures.values()]
    spoken = [code for code in codes if code > 0 and code != LostRankError.exit_code]
    if spoken:
        # The worker has said why on its own standard error; who hung meanwhile, the agent has killed.
        return int(spoken[0])
    for rank, failure in error.failures.items():
        # The agent ends the others by SIGTERM when it has noticed the first.
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            raise _ended_by(-failure.exitcode, rank=rank, pid=failure.pid)
    raise LaunchError("the ranks of this machine have lost another; it is said there what ended it")


def _ended_by(number: int, *, rank: int, pid: int) -> LaunchError:
    name = signal.Signals(number).name
    hints = {
        "SIGKILL": "; the kernel may have ended it for lack of memory",
        "SIGABRT": "; on GPUs NCCL does so a minute after another rank has been waited for in vain for train.timeout_s",
    }
    hint = hints.get(name, "")
    return LaunchError(f"rank {rank} (process {pid}) was ended by {name}{hint}")


_PREFIX = "facetrain-agent-"
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}")
_BEING_MADE_S = 60
"""A folder so young may be about to be locked."""


@contextmanager
def agent_folder() -> Iterator[Path]:
    """Make a folder, and remove it at the end, along with those that killed launchers have left here."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            # The kernel gives the lock back when this process ends, however it does.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.iterdir():
        if _NAME.fullmatch(path.name):
            with suppress(OSError):  # it is locked, another user's, or gone
                _remove_unless_held(path)


def _remove_unless_held(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > _BEING_MADE_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(descriptor)
