"""Which of how many processes this is, and the device it drives: the only reader of torchrun's environment."""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from facetrain.distributed.heartbeat import Pulse
from facetrain.distributed.process_lifetime import is_worker, started_by_torchrun
from facetrain.distributed.process_setup import keep_freed_memory, release_freed_memory
from facetrain.distributed.rendezvous import meet
from facetrain.distributed.roll_call import sign_in
from facetrain.distributed.watchdog import watched
from facetrain.errors import RunError, UsageError

_GIVING_UP_S = 30
"""Until the others have given up a rank that hangs, and have said so; and for it to notice."""


@dataclass(frozen=True)
class World:
    """Which of how many processes this is, and the device it drives.

    `rank` counts over all nodes and decides who owns which classes and files; `local_rank` counts on
    this node and does nothing but pick the device.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device
    launcher_id: str = ""
    """Names the process that started this one: the same for all that it starts, and starts again."""
    rendezvous_id: str = ""
    """Names this gathering of ranks: after a restart it has another name."""
    restarts: int = 0
    store_host: str = ""
    """Where rank 0 runs, if the store at which all met is in its process."""

    @property
    def is_leader(self) -> bool:
        """Whether this is the one rank that writes what must be written once."""
        return self.rank == 0


def pick_device(name: str, local_rank: int) -> torch.device:
    """Return the device for a local rank; `auto` is CUDA where there is one.

    Raises:
        UsageError: CUDA was asked for and is not there, or has fewer devices than local ranks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return torch.device(name)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UsageError(
            f"local rank {local_rank} has no GPU: this machine shows {count}; "
            f"start {f'at most {count} processes on it' if count else 'it where there is one'}, or set "
            "train.device to cpu"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def join(device: str = "auto", timeout_s: float = 600, *, keep_freed: bool = True) -> Iterator[World]:
    """Join the process group that torchrun prepared, or stand alone where there is none.

    CPU tensors travel over gloo and CUDA tensors over NCCL, so that the host can agree with other
    hosts without waiting for the GPU. A collective that a rank does not join within `timeout_s`
    seconds fails on the others. On a CPU, freed memory is kept for the next step, or given back at once.

    Raises:
        RunError: the group could not be formed.
    """
    if device == "cpu" or not torch.cuda.is_available():
        treat_freed_memory = keep_freed_memory if keep_freed else release_freed_memory
        treat_freed_memory()
    if not started_by_torchrun():
        yield _alone(_use(pick_device(device, 0)))
        return
    environment = os.environ
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    chosen = _use(pick_device(device, local_rank))
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    try:
        store, rank, size, rendezvous_id = meet(timeout_s)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
        store_host = sign_in(store, rank)
    except (RuntimeError, ValueError) as error:
        where = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}"
        raise RunError(
            f"rank {environment.get('RANK')} could not join its group at {where}: {error}"
        ) from error
    ended_well = False
    try:
        world = World(
            rank=rank,
            local_rank=local_rank,
            size=size,
            local_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
            device=chosen,
            launcher_id=_launcher_id(),
            rendezvous_id=rendezvous_id,
            restarts=_restarts(),
            store_host=store_host,
        )
        with _watched(world, timeout_s) if size > world.local_size else nullcontext():
            yield world
            # Nobody leaves while another still talks: gloo's threads do not survive a peer's early end.
            dist.barrier()
        ended_well = True
    finally:
        # What still holds the group (DDP's reducer, in cycles) must go before it, not at exit.
        gc.collect()
        if ended_well or chosen.type != "cuda":
            dist.destroy_process_group()
        else:
            # NCCL lets go when what is queued is done: with a rank gone, never. It would wait here, before
            # the error is said, and again where Python ends.
            atexit.register(_end_at_once, getattr(sys.exception(), "exit_code", 1))


def _end_at_once(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _watched(world: World, timeout_s: float) -> AbstractContextManager[None]:
    patience_s = timeout_s + _GIVING_UP_S
    pulse = Pulse(world.rendezvous_id, world.rank, world.size, patience_s=patience_s, grace_s=_GIVING_UP_S)
    return watched(world.rank, patience_s, pulse.reason_to_end)


def _alone(device: torch.device) -> World:
    launcher_id = _launcher_id() if is_worker() else ""
    return World(
        rank=0,
        local_rank=0,
        size=1,
        local_size=1,
        device=device,
        launcher_id=launcher_id,
        restarts=_restarts(),
    )


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _launcher_id() -> str:
    parent = os.getppid()
    try:
        # The 22nd field is when it started: a process number comes back, a moment does not.
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "?"
    return f"{socket.gethostname()}:{parent}:{started}"


def _use(device: torch.device) -> torch.device:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Every step has the same shapes: cuDNN may measure, once, which of its ways is the fastest.
        torch.backends.cudnn.benchmark = True
    return device
