"""Check of the network between the ranks: its speed."""

from __future__ import annotations

import socket
import time

import torch

from facetrain.distributed import collectives
from facetrain.doctor.check_result import CheckResult, count_text, passed, warned_if

_MESSAGE_BYTES = 1 << 25
_ROUNDS = 5
_SLOW_BYTES_PER_SECOND = 100e6
"""Nearly Gigabit Ethernet. At this rate the gradients of an r50 (174 MB) take about three seconds per step."""


def check_network(device: torch.device) -> CheckResult:
    """Measure an all-reduce of 32 MiB over the ranks. Collective."""
    world_size = collectives.world_size()
    if world_size == 1:
        message = "one process; start this command under torchrun to measure the network between ranks"
        return passed("network", message)
    hosts = set(collectives.gather_json(socket.gethostname()))
    rate = _all_reduce_rate(device)
    message = (
        f"{world_size} ranks on {count_text(len(hosts), 'host')}: {'NCCL' if device.type == 'cuda' else 'gloo'} "
        f"all-reduce at {rate / 1e6:,.0f} MB/s per rank"
    )
    advice = (
        "gradients are sent at this rate in every step: set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, on every host, "
        "to the fastest interface between the hosts, or set train.compress_gradients"
    )
    return warned_if(rate < _SLOW_BYTES_PER_SECOND, "network", message, advice)


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
