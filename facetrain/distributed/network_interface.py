"""Network interfaces that the stores and the collectives listen on."""

from __future__ import annotations

import ipaddress
import os
import socket

LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = ("lo", "lo0")
"""Names of the loopback interface on Linux and on macOS."""


def literal_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a text is; None if it is a host name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address leads from every host to that host itself."""
    address = literal_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def use_loopback_interface() -> None:
    """Let gloo and NCCL listen where no other host reaches them, unless the user has chosen an interface.

    Neither has authentication. Call it before the process group is formed, if all ranks are on this host.
    """
    for _, name in socket.if_nameindex() if hasattr(socket, "if_nameindex") else ():
        if name in _LOOPBACK_NAMES:
            # A default: in a container, the user may need another interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            # With "=", NCCL takes this name only, and not every interface whose name begins with it.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
