"""Number of processes and hosts of a run, from the launch options of the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from facetrain.device.gpu_driver import gpu_failure, has_gpu_driver
from facetrain.distributed.process_setup import silence_torch_logs
from facetrain.errors import UsageError

_ENDPOINT = re.compile(r"[\w.:\[\]-]+")
_DEFAULT_PORT = 29400
"""Port of torch's c10d rendezvous if the endpoint has none."""


@dataclass(frozen=True)
class Topology:
    """Number of processes and hosts of a run, and the address where the hosts find each other."""

    nproc_per_node: int
    min_hosts: int = 1
    max_hosts: int = 1
    endpoint: str = ""
    max_restarts: int = 0

    @property
    def is_single_process(self) -> bool:
        """Whether the run needs no launcher: one process on one host, never restarted."""
        return self.nproc_per_node == self.max_hosts == 1 and self.max_restarts == 0


def topology(
    nproc_per_node: str, nnodes: str, rdzv_endpoint: str | None, max_restarts: int, device: str
) -> Topology:
    """Check the launch options of the command line.

    `nproc_per_node` is a number or "auto", `nnodes` is "N" or "MIN:MAX", `device` is the config's `train.device`.

    Raises:
        UsageError: an option is invalid; the message names it.
    """
    least, most = _host_range(nnodes)
    if most > 1 and not rdzv_endpoint:
        raise UsageError(
            f"--nnodes {nnodes} needs --rdzv-endpoint HOST:PORT: one host and a port of it; give the same value on "
            "all"
        )
    return Topology(
        nproc_per_node=_processes(nproc_per_node, device),
        min_hosts=least,
        max_hosts=most,
        endpoint=_endpoint(rdzv_endpoint, most) if rdzv_endpoint else "",
        max_restarts=max_restarts,
    )


def _host_range(nnodes: str) -> tuple[int, int]:
    try:
        least, _, most = nnodes.partition(":")
        low, high = int(least), int(most or least)
    except ValueError:
        low = high = 0
    if not 1 <= low <= high:
        raise UsageError(f"--nnodes {nnodes}: give a number of hosts, or MIN:MAX")
    return low, high


def _endpoint(endpoint: str, hosts: int) -> str:
    # With port 0 the host takes any free one, which the other hosts do not know.
    least = 0 if hosts == 1 else 1
    try:
        if host_and_port(endpoint)[1] >= least:
            return endpoint
    except ValueError:
        pass
    raise UsageError(
        f"--rdzv-endpoint {endpoint}: give HOST:PORT, with a port from {least} to 65535; put an IPv6 address in "
        "brackets"
    )


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Return the host, an IPv6 address without its brackets, and the port of an endpoint.

    Raises:
        ValueError: it is no endpoint.
    """
    parts = urlsplit(f"//{endpoint}")
    host = parts.hostname or ""
    # Not "/", "@" or a space, which are for other parts of a URL.
    if not _ENDPOINT.fullmatch(endpoint) or not host:
        raise ValueError(endpoint)
    host.encode("idna")  # a ValueError if a label is empty or too long: the connection would fail
    return host, _DEFAULT_PORT if parts.port is None else parts.port


def unusable_gpus(reason: str, cpu_setting: str) -> str:
    """Return the message for GPUs that torch cannot use; `cpu_setting` is how the user selects the CPU."""
    return (
        f"torch cannot use the GPUs of this machine: {reason}; install a torch that is not newer than the driver, or "
        f"use {cpu_setting}"
    )


def processes_of_host(device: str) -> int:
    """Return the processes of a run on this host if no option gives their number: one for each GPU, or one.

    Raises:
        UsageError: torch cannot use the GPUs.
    """
    # Without a GPU driver the answer is known, and the import of torch, which takes seconds, is saved.
    if device == "cpu" or not has_gpu_driver():
        return 1
    silence_torch_logs()
    import torch

    if reason := gpu_failure():
        raise UsageError(unusable_gpus(reason, "--set train.device=cpu"))
    return max(torch.cuda.device_count(), 1)


def _processes(nproc_per_node: str, device: str) -> int:
    if nproc_per_node == "auto":
        return processes_of_host(device)
    if not re.fullmatch("[0-9]{1,9}", nproc_per_node) or int(nproc_per_node) == 0:
        raise UsageError(f"--nproc-per-node {nproc_per_node}: give a number of processes, or auto")
    return int(nproc_per_node)
