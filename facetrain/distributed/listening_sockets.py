"""Sockets for torch's TCPStore, which by itself listens on all interfaces and has no authentication.

On one host the store gets a socket of the loopback interface, which no other host can reach.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from facetrain.distributed.network_interface import is_loopback, literal_address


def listen(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at a host and port, or None: the host is another one, or the port is in use.

    With an address, the socket listens on that interface alone. With a name, it listens on all: the other hosts may
    resolve the name to another interface, and this host itself often resolves its name to the loopback interface.
    """
    addresses = _addresses(host, port)
    for family, _, _, _, address in addresses:
        with suppress(OSError):
            listener = socket.create_server(address, family=family)
            # The socket could be bound, so the host is this one.
            if is_loopback(host) or literal_address(host):
                return listener
            listener.close()
            return listen_on_all_interfaces(port)
    # A name that leads nowhere on this host serves nobody: torch's store connects to itself by it.
    if addresses and host in (socket.gethostname(), socket.getfqdn()):
        with suppress(OSError):
            return listen_on_all_interfaces(port)
    return None


def listen_on_all_interfaces(port: int) -> socket.socket:
    """Return a socket that other hosts can reach.

    Raises:
        OSError: the port is in use.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def serve_store(listener: socket.socket, host: str, timeout_s: float) -> TCPStore:
    """Return a store whose server is in this process and uses `listener`; `host` leads to it."""
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),  # from here on, the store closes it
    )


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return []
