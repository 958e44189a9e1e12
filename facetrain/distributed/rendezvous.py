"""Rendezvous of the ranks: separate keys for each start in the store, and the host and process of each rank.

An agent, facetrain's or torchrun's (torch 2.13.0), keeps one store through all restarts, and the addresses of processes
that have ended stay in it: gloo connects to them, and is refused or waits for its timeout. Without the id below, six of
six restarts of three gloo ranks failed. So the ranks agree on a random rendezvous id at every start, and prefix all
their keys with it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from facetrain.cpu_cores import affinity, cores_of, share_of_cores
from facetrain.distributed.listening_sockets import listen, listen_on_all_interfaces, serve_store
from facetrain.distributed.network_interface import LOOPBACK, address_toward, is_loopback
from facetrain.distributed.process_lifetime import own_local_rank
from facetrain.errors import RunError

_STORE_TIMEOUT = timedelta(seconds=10)
_POLL_S, _LONGEST_POLL_S = 0.02, 0.1
_IS_SERVED = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable of torch: whether an elastic agent serves the store at the address in the environment."""
_served: dict[tuple[str, int], Store] = {}
"""Stores that rank 0 serves without an agent, by address, to the end of its process: others may still read them."""
_QUIET_S = 60.0
"""A wait for other ranks is reported after this time: their hosts may have ended."""


@dataclass(frozen=True)
class Rendezvous:
    """Ranks of one start, as each of them knows the others."""

    store: Store
    """Store that only the ranks of this start share."""
    rank: int
    id: str
    """Random id of this start."""
    places: list[str]
    """Host and process of each rank, as in "node7, process 4711"."""
    address: str
    """Address of this host that the hosts of the other ranks reach."""
    cores: int
    """CPU cores of this rank: its share of those that it may use."""
    host_cores: int
    """CPU cores that all ranks of this host may use together."""

    @property
    def size(self) -> int:
        """World size."""
        return len(self.places)


def join_rendezvous(timeout_s: float, local_size: int) -> Rendezvous:
    """Find the other ranks through the store. `local_size` is the number of ranks on this host.

    Raises:
        OSError: rank 0 cannot listen at the address in the environment, or this host has no address.
        RunError: a rank did not arrive in time.
        ValueError: the environment has no such address, or no such rank.
    """
    rank, world_size = int(_variable("RANK")), int(_variable("WORLD_SIZE"))
    if not 0 <= rank < world_size:
        raise ValueError(
            f"there is no rank {rank} of {world_size} (WORLD_SIZE counts the ranks of all hosts)"
        )
    store = _open_store(rank, timeout_s)
    rendezvous_id = _create_id(store, world_size, timeout_s) if rank == 0 else _receive_id(store, rank)
    own = _with_prefix(rendezvous_id, store)
    own.set(f"place/{rank}", f"{socket.gethostname()}, process {os.getpid()}")
    cores, host_cores = _count_cores(own, rank, local_size)
    address = LOOPBACK if local_size == world_size else _shared_address(own, rank, world_size)
    places = _wait_for(own, [f"place/{other}" for other in range(world_size)])
    names = [place.decode(errors="replace") for place in places]
    return Rendezvous(own, rank, rendezvous_id, names, address, cores, host_cores)


def _count_cores(store: Store, rank: int, local_size: int) -> tuple[int, int]:
    """Return the share of this rank in the cores of its host, and the cores of all ranks of the host."""
    own = affinity()
    store.set(f"cores/{rank}", json.dumps(sorted(own)))
    first = rank - own_local_rank()  # the ranks of a host follow each other
    keys = [f"cores/{other}" for other in range(first, first + local_size) if other != rank]
    others = [set[int](json.loads(cores)) for cores in _wait_for(store, keys)]
    return share_of_cores(own, others), cores_of([own, *others])


def _shared_address(store: Store, rank: int, world_size: int) -> str:
    """Return the address of this host that other hosts reach; a loopback address if there are no other hosts."""
    host, port = store_address()
    own = address_toward(host, port)
    store.set(f"address/{rank}", own)
    if not is_loopback(own):
        return own
    # The store is on this host, whose name leads to its loopback interface. The other hosts reach the store by another
    # one: that which leads to them.
    addresses = _wait_for(store, [f"address/{other}" for other in range(world_size)])
    others = [address for address in map(bytes.decode, addresses) if not is_loopback(address)]
    return address_toward(others[0], port) if others else own


def store_address() -> tuple[str, int]:
    """Return the host and port of the store, which the launcher of the ranks has chosen.

    Raises:
        ValueError: the environment has no such address.
    """
    return _variable("MASTER_ADDR"), int(_variable("MASTER_PORT"))


def connect_to_store(rendezvous_id: str) -> Store:
    """Return a second connection to the store of a rendezvous: a blocked thread may occupy the group's own.

    Waits without end for a store whose process is stopped.

    Raises:
        RuntimeError: the store did not answer for ten seconds.
    """
    host, port = store_address()
    return _with_prefix(rendezvous_id, TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT))


def watchdog_address(rendezvous: Rendezvous) -> tuple[tuple[str, int] | None, socket.socket | None]:
    """Return the address on which rank 0's watchdog listens, and on rank 0 the listening socket.

    None if rank 0 cannot listen.
    """
    if rendezvous.rank:
        (value,) = _wait_for(rendezvous.store, ["watchdog"])
        published = value.decode().rpartition(" ")
        return ((published[0], int(published[2])) if published[0] else None), None
    listener, host = None, ""
    with suppress(OSError):
        family = socket.AF_INET6 if ":" in rendezvous.address else socket.AF_INET
        # Port 0: the kernel picks a free one. The backlog holds the watchdogs of all ranks, which connect at once.
        # One interface only: the other ranks reach it, others need not.
        listener = socket.create_server((rendezvous.address, 0), family=family, backlog=1024)
        host = rendezvous.address
    port = listener.getsockname()[1] if listener else 0
    rendezvous.store.set("watchdog", f"{host} {port}")
    return ((host, port) if listener else None), listener


def _wait_for(store: Store, keys: list[str]) -> list[bytes]:
    """Return the values of keys that other ranks set.

    By polls: the store's own wait is in C++, where no handler of Python runs, so that Ctrl-C would not end this rank.

    Raises:
        RunError: they did not set them within the timeout of the store.
    """
    timeout_s, pause_s = store.timeout.total_seconds(), _POLL_S  # type: ignore[attr-defined]
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise RunError(f"the other ranks did not arrive within {timeout_s:.0f} s; see their output")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)  # hundreds of ranks may wait for one
    return list(store.multi_get(keys))


def _with_prefix(rendezvous_id: str, store: Store) -> Store:
    return PrefixStore(f"facetrain/{rendezvous_id}", store)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"the environment variable {name} is not set")
    return value


def _open_store(rank: int, timeout_s: float) -> Store:
    """Serve the store on rank 0 unless it is served; otherwise connect to it."""
    address = host, port = store_address()
    is_served = address in _served if _served else os.environ.get(_IS_SERVED) == "True"
    if rank or is_served:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    else:
        # The address may belong to a gateway that leads to this host: then only a socket for all interfaces serves it.
        store = serve_store(listen(host, port) or listen_on_all_interfaces(port), host, timeout_s)
    if not is_served:
        _served[address] = store
    # From now on as under an agent: a second training, and a process group of the program's own, find it at this
    # address.
    os.environ[_IS_SERVED] = "True"
    return store


def _create_id(store: Store, world_size: int, timeout_s: float) -> str:
    """Create an id on rank 0, and answer the requests of the other ranks until each has confirmed it.

    A request that a process of an earlier start has left is answered, too; no process reads that answer.
    """
    # Keys:  request/RANK = TEXT      a rank asks, with a random text that no earlier process of it has used
    #        answer/TEXT = ID         rank 0 answers
    #        confirmed/ID/RANK        the rank has read the answer; rank 0 waits for all of them
    rendezvous_id, deadline = secrets.token_hex(8), time.monotonic() + timeout_s
    missing, report_at = list(range(1, world_size)), time.monotonic() + _QUIET_S
    while missing:
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {missing[0]} did not arrive within {timeout_s:.0f} s; see the output of its host"
            )
        if time.monotonic() > report_at:
            report_at = math.inf
            print(
                f"waiting for rank {missing[0]}, which has not arrived yet; see the output of its host",
                file=sys.stderr,
                flush=True,
            )
        # Again in each round: a rank that was started again asks anew.
        for rank in missing:
            if store.check([f"request/{rank}"]):
                store.set(f"answer/{store.get(f'request/{rank}').decode()}", rendezvous_id)
        missing = [rank for rank in missing if not store.check([f"confirmed/{rendezvous_id}/{rank}"])]
        time.sleep(_POLL_S)
    return rendezvous_id


def _receive_id(store: Store, rank: int) -> str:
    # A random request, not the rank: the answer to an earlier process of this rank is still in the store.
    request = secrets.token_hex(8)
    store.set(f"request/{rank}", request)
    (answer,) = _wait_for(store, [f"answer/{request}"])
    rendezvous_id = answer.decode()
    store.set(f"confirmed/{rendezvous_id}/{rank}", "")
    return rendezvous_id
