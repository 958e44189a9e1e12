"""Rank, world size and device of this process, and the process group of all ranks."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from facetrain.cpu_cores import usable_cores
from facetrain.distributed import collectives
from facetrain.distributed.devices import own_gpu, pick_device
from facetrain.distributed.network_interface import is_loopback, use_interface_of
from facetrain.distributed.process_lifetime import (
    has_agent,
    launched_by_torchrun,
    outside_launcher,
    own_local_rank,
    process_stat,
)
from facetrain.distributed.process_setup import keep_freed_memory, release_freed_memory
from facetrain.distributed.ranks import Ranks
from facetrain.distributed.rendezvous import Rendezvous, join_rendezvous, store_address, watchdog_address
from facetrain.distributed.watchdog import watchdog
from facetrain.distributed.watchdog_process import Settings
from facetrain.errors import RunError, UsageError

ARRIVAL_S = 600.0
"""Time for all ranks to start."""


@dataclass(frozen=True)
class World:
    """Rank, world size and device of this process.

    `rank` counts over all hosts: it selects the shard of the classes, the samples and the files of this
    process. `local_rank` counts on this host, and only selects the device.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device
    cores: int = field(default_factory=usable_cores)
    """CPU cores of this rank: its share of those that it may use."""
    host_cores: int = field(default_factory=usable_cores)
    """CPU cores that all ranks of this host may use together."""

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which writes the files that are written once per run."""
        return self.rank == 0


@contextmanager
def assemble() -> Iterator[Ranks]:
    """Find the other ranks that torchrun has started, and watch over this one; without torchrun, be alone.

    Raises:
        RunError: a rank did not arrive in time.
        UsageError: the program has a process group of its own.
    """
    if dist.is_initialized():
        raise UsageError(
            "a run forms its own process group, and this program has one; call destroy_process_group first, or train "
            "with facetrain.PartialFC in your own loop"
        )
    if not launched_by_torchrun():
        place = f"process {os.getpid()}"
        alone = Settings(rank=0, places=[place], token="", address=None, timeout_s=ARRIVAL_S)
        with watchdog(alone) as guard:
            yield Ranks(set_timeout=guard.set_timeout)
        return
    with _joining():
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        rendezvous = join_rendezvous(ARRIVAL_S, local_size)
        watchdog_at, listener = watchdog_address(rendezvous)
    ranks = Ranks(
        rank=rendezvous.rank,
        local_rank=own_local_rank(),
        size=rendezvous.size,
        local_size=local_size,
        # Without an agent the parent can be a shell, in which a user starts one run after the other.
        launcher_id=_launcher_id() if has_agent() else "",
        rendezvous=rendezvous,
    )
    if ranks.is_leader and outside_launcher() and (has_agent() or not is_loopback(store_address()[0])):
        _warn_of_open_port(store_address()[1])
    settings = Settings(
        rank=rendezvous.rank,
        places=rendezvous.places,
        token=rendezvous.id,
        address=watchdog_at,
        timeout_s=ARRIVAL_S,
        listener=listener.detach() if listener else None,
        speaks=ranks.speaks_for_host and not has_agent(),
    )
    with watchdog(settings) as guard:
        ranks.set_timeout, ranks.report_failure = guard.set_timeout, guard.report
        yield ranks


@contextmanager
def _alone() -> Iterator[Ranks]:
    """Be alone in a program that has a process group of its own: its other ranks need not take part."""
    with collectives.alone():
        yield Ranks(local_rank=own_gpu())


@contextmanager
def join(
    device: str = "auto",
    timeout_s: float = 600,
    *,
    keep_freed: bool = True,
    cpu_setting: str = "--device cpu",
    ranks: Ranks | None = None,
) -> Iterator[World]:
    """Join the process group of the ranks that torchrun has started; without torchrun, use a world of one.

    In a program that has a process group of its own, the world is one, too: this process computes everything.

    CPU tensors are sent over gloo and CUDA tensors over NCCL: ranks can agree on a host value without
    synchronizing with the GPU. A collective that a rank does not join within `timeout_s` seconds fails on
    the other ranks. At the end, torch has the device and the settings of the caller again. `keep_freed` is for runs on
    CPU: keep freed memory for the next step (faster), or return it to the kernel at once. `cpu_setting` is how the user
    selects the CPU, for messages. `ranks` are those that have met already (`assemble`).

    Raises:
        RunError: the process group could not be formed.
        UsageError: a rank has no GPU, or only some of the ranks have one.
    """
    if device == "cpu" or not torch.cuda.is_available():
        # Before the first tensor: torch reads one of these settings when it allocates it.
        configure_allocator = keep_freed_memory if keep_freed else release_freed_memory
        configure_allocator()
    with nullcontext(ranks) if ranks else _alone() if dist.is_initialized() else assemble() as found:
        chosen = _pick_alike(found, device, cpu_setting)
        world = World(
            rank=found.rank,
            local_rank=found.local_rank,
            size=found.size,
            local_size=found.local_size,
            device=chosen,
            cores=found.rendezvous.cores if found.rendezvous else usable_cores(),
            host_cores=found.rendezvous.host_cores if found.rendezvous else usable_cores(),
        )
        found.set_timeout(timeout_s)
        # Before the group is formed: NCCL uses the current device.
        with _in_use(chosen):
            if found.rendezvous is None:
                with nullcontext() if "OMP_NUM_THREADS" in os.environ else _own_threads():
                    yield world
                return
            with _process_group(found, found.rendezvous, chosen, timeout_s):
                yield world


@contextmanager
def _own_threads() -> Iterator[None]:
    """Compute with a thread for each usable core within the block."""
    before = torch.get_num_threads()
    # torch's default ignores a container's CPU quota, and results depend on the number of threads.
    torch.set_num_threads(usable_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pick_alike(ranks: Ranks, name: str, cpu_setting: str) -> torch.device:
    """Return the device of this rank, which has the type of all others: ranks of two types would form two groups."""
    with ranks.failing_together(), ranks.outages(UsageError):
        device = pick_device(name, ranks.local_rank, cpu_setting=cpu_setting)
    expected = ranks.gather(device.type)[0]
    with ranks.failing_together(), ranks.outages(UsageError):
        if device.type != expected:
            raise UsageError(
                f"local rank {ranks.local_rank} computes on {device.type}, and rank 0 on {ranks.place(0)} computes on "
                f"{expected}; let torch find GPUs on all hosts, or use {cpu_setting} on all"
            )
    return device


@contextmanager
def _process_group(
    ranks: Ranks, rendezvous: Rendezvous, device: torch.device, timeout_s: float
) -> Iterator[None]:
    """Form the process group, and leave it together with the others."""
    with _joining():
        use_interface_of(rendezvous.address)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=rendezvous.store,
            rank=rendezvous.rank,
            world_size=rendezvous.size,
            timeout=timedelta(seconds=timeout_s),
        )
    ended_well = False
    try:
        yield
        # No rank leaves while another still communicates: gloo's threads abort if a peer closes early.
        dist.barrier()
        ended_well = True
    except BaseException as error:
        # Before the group is left: that may wait for the rank that is lost.
        ranks.report_failure(error)
        raise
    finally:
        # Objects that hold the group (DDP's reducer, in reference cycles) must be freed before it.
        gc.collect()
        # With a rank lost, NCCL would wait without end for the queued collectives: here, before the error is printed.
        if ended_well or device.type != "cuda":
            dist.destroy_process_group()


@contextmanager
def _joining() -> Iterator[None]:
    """Turn failures of the network into errors that name the address of the ranks' store."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RunError(
            f"rank {os.environ.get('RANK')} could not join the process group at {address}: {error}; check that "
            "this address is right and reachable from all hosts"
        ) from error


def _warn_of_open_port(port: int) -> None:
    """Warn of the port of another launcher, whose store facetrain cannot bind to an interface."""
    unpickles = ", and torchrun runs code that others write there" if has_agent() else ""
    print(
        f"warning: port {port} is open to all machines that reach this one{unpickles}: close it to those of others, or "
        'start the ranks by --nproc-per-node and --nnodes of facetrain (see "The network" in docs/security.md)',
        file=sys.stderr,
        flush=True,
    )


def _launcher_id() -> str:
    parent = os.getppid()
    # With its start: the kernel uses a process number again, but not at the same time.
    return f"{socket.gethostname()}:{parent}:{process_stat(parent)[1]}"


@contextmanager
def _in_use(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one within the block, and let cuDNN choose its algorithms by measuring."""
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    with torch.cuda.device(device):
        # All steps have the same shapes: cuDNN may measure its algorithms once and use the fastest. It tries ten, as
        # torch has it. With all of them an r100 on an H200 was no faster, and its first step took 17 s instead of 6.
        cudnn.benchmark = True
        try:
            yield
        finally:
            cudnn.benchmark = before
