"""The way between the ranks: how fast it is, and whether it is the right one."""

from __future__ import annotations

import socket
import time

import torch

from facetrain.distributed import collectives
from facetrain.distributed.network_interface import Interface, interface_in_use, interfaces
from facetrain.doctor.check_result import Finding, count, failure, ok, warning

_BYTES = 1 << 25
_ROUNDS = 5
_SLOW_MB_PER_S = 100


def check_network(device: torch.device) -> list[Finding]:
    """Sum 32 MiB over the ranks, and look at the interface that they talk over. Collective."""
    world_size = collectives.world_size()
    if world_size == 1:
        return [ok("network", "one process; start this under torchrun to measure the way between ranks")]
    hosts = sorted(set(collectives.gather_json(socket.gethostname())))
    rate = _all_reduce_rate(device)
    backend = "NCCL" if device.type == "cuda" else "gloo"
    found = f"{world_size} ranks on {count(len(hosts), 'host')}: "
    found += f"{backend} sums at {rate / 1e6:,.0f} MB/s for each rank"
    findings = _interface(interface_in_use(), interfaces(), several_hosts=len(hosts) > 1)
    if rate < _SLOW_MB_PER_S * 1e6:
        do = "gradients travel at this rate every step: see the interface, or train.compress_gradients"
        return [warning("network", found, do), *findings]
    return [ok("network", found), *findings]


def _all_reduce_rate(device: torch.device) -> float:
    """Return the bytes a second that leave each rank: 2 (W - 1) / W of the message for a ring."""
    message = torch.zeros(_BYTES // 4, device=device)
    collectives.sum_(message)
    collectives.barrier()
    since = time.perf_counter()
    for _ in range(_ROUNDS):
        collectives.sum_(message)
    message[0].item()  # waits for the device
    passed = time.perf_counter() - since
    world_size = collectives.world_size()
    return 2 * (world_size - 1) / world_size * _BYTES * _ROUNDS / passed


def _interface(used: Interface | None, there: list[Interface], *, several_hosts: bool) -> list[Finding]:
    do = "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, on every host, as the interface between the hosts"
    names = ", ".join(f"{interface.name} ({interface.address})" for interface in there)
    if used is None:
        return [warning("interface", f"this host's name leads to none of its interfaces: {names}", do)]
    found = f"{used.name} ({used.address})"
    if several_hosts and used.address.startswith("127."):
        return [failure("interface", f"{found} leads to this host alone; there are {names}", do)]
    faster = [i for i in there if used.megabits and i.megabits and i.megabits > used.megabits]
    if several_hosts and faster:
        best = max(faster, key=lambda interface: interface.megabits or 0)
        found += f" has {used.megabits:,} Mbit/s, {best.name} has {best.megabits:,}"
        return [warning("interface", found, do)]
    return [ok("interface", found)]
