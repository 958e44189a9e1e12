"""Network interfaces of this host, and the one that gloo uses between the ranks."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # from Linux's sockios.h
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables that select the interfaces of the collectives."""


@dataclass(frozen=True)
class Interface:
    """Network interface that has an IPv4 address."""

    name: str
    address: str
    megabits: int | None
    """Speed of the link in Mbit/s; None if it is unknown, as for virtual interfaces."""


def interfaces() -> list[Interface]:
    """Return the interfaces of this host, in the kernel's order. Linux only; an empty list elsewhere."""
    found = []
    for _, name in socket.if_nameindex() if hasattr(socket, "if_nameindex") else []:
        address = _address_of(name)
        if address:
            found.append(Interface(name, address, _speed_of(name)))
    return found


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
    for interface in interfaces():
        if interface.address == LOOPBACK:
            os.environ.setdefault(_GLOO, interface.name)
            # With "=", NCCL takes this name only, and not every interface whose name begins with it.
            os.environ.setdefault(_NCCL, f"={interface.name}")


def interface_in_use() -> Interface | None:
    """Return the interface that gloo uses: the first of GLOO_SOCKET_IFNAME, else the one of the host name's address.

    None if there is no such interface.
    """
    wanted = os.environ.get(_GLOO, "").partition(",")[0]
    try:
        host_address = socket.gethostbyname(socket.gethostname())
    except OSError:
        host_address = ""
    for interface in interfaces():
        if interface.name == wanted if wanted else _same_network(interface.address, host_address):
            return interface
    return None


def _same_network(address: str, host_address: str) -> bool:
    # On Debian the host name has the address 127.0.1.1: `lo` serves it, but is listed with 127.0.0.1.
    return address == host_address or (address.startswith("127.") and host_address.startswith("127."))


def _address_of(name: str) -> str | None:
    import fcntl  # here, not above: Windows has no fcntl, and never calls this function

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _speed_of(name: str) -> int | None:
    try:
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None
