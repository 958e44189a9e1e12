"""Checks of the network between the ranks: its speed, and the interface in use."""

from __future__ import annotations

import socket
import time

import torch

from facetrain.distributed import collectives
from facetrain.distributed.network_interface import Interface, interface_in_use, interfaces
from facetrain.doctor.check_result import CheckResult, count_text, failed, passed, warning

_MESSAGE_BYTES = 1 << 25
_ROUNDS = 5
_SLOW_BYTES_PER_SECOND = 100e6
"""Nearly Gigabit Ethernet. At this rate the gradients of an r50 (174 MB) take about three seconds per step."""


def check_network(device: torch.device) -> list[CheckResult]:
    """Measure an all-reduce of 32 MiB over the ranks, and check the network interface. Collective."""
    world_size = collectives.world_size()
    if world_size == 1:
        message = "one process; start this command under torchrun to measure the network between ranks"
        return [passed("network", message)]
    hosts = sorted(set(collectives.gather_json(socket.gethostname())))
    rate = _all_reduce_rate(device)
    backend = "NCCL" if device.type == "cuda" else "gloo"
    message = (
        f"{world_size} ranks on {count_text(len(hosts), 'host')}: "
        f"{backend} all-reduce at {rate / 1e6:,.0f} MB/s per rank"
    )
    interface = _check_interface(interface_in_use(), interfaces(), several_hosts=len(hosts) > 1)
    if rate < _SLOW_BYTES_PER_SECOND:
        advice = "gradients are sent at this rate in every step: check the interface, or set train.compress_gradients"
        return [warning("network", message, advice), *interface]
    return [passed("network", message), *interface]


def _all_reduce_rate(device: torch.device) -> float:
    """Return the bytes per second that leave each rank: 2 (W − 1) / W of the message, as for a ring."""
    message = torch.zeros(_MESSAGE_BYTES // 4, device=device)
    collectives.sum_(message)  # The first one opens the connections.
    collectives.barrier()
    start = time.perf_counter()
    for _ in range(_ROUNDS):
        collectives.sum_(message)
    message[0].item()  # Waits for the GPU.
    seconds = time.perf_counter() - start
    world_size = collectives.world_size()
    return 2 * (world_size - 1) / world_size * _MESSAGE_BYTES * _ROUNDS / seconds


def _check_interface(
    used: Interface | None, available: list[Interface], *, several_hosts: bool
) -> list[CheckResult]:
    advice = (
        "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, on every host, to the interface between the hosts"
    )
    names = ", ".join(f"{interface.name} ({interface.address})" for interface in available)
    if used is None:
        message = f"the host name does not resolve to an address of this host's interfaces: {names}"
        return [warning("interface", message, advice)]
    message = f"{used.name} ({used.address})"
    if several_hosts and used.address.startswith("127."):
        message += f" reaches this host only; available: {names}"
        return [failed("interface", message, advice)]
    faster = [i for i in available if used.megabits and i.megabits and i.megabits > used.megabits]
    if several_hosts and faster:
        best = max(faster, key=lambda interface: interface.megabits or 0)
        message += f" has {used.megabits:,} Mbit/s, {best.name} has {best.megabits:,} Mbit/s"
        return [warning("interface", message, advice)]
    return [passed("interface", message)]
