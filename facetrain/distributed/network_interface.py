"""Which network interface the ranks talk over."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915
_CHOSEN_BY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Interface:
    """A network interface of this host that is up and has an IPv4 address."""

    name: str
    address: str
    megabits: int | None
    """What it says of its own speed; None where it does not say, as virtual ones."""


def interfaces() -> list[Interface]:
    """Return the interfaces of this host, in the kernel's order. Linux only; elsewhere none."""
    found = []
    for _, name in socket.if_nameindex() if hasattr(socket, "if_nameindex") else []:
        address = _address_of(name)
        if address:
            found.append(Interface(name, address, _speed_of(name)))
    return found


def interface_in_use() -> Interface | None:
    """Return the one that gloo takes: the one that is asked for, else the one of this host's own name."""
    wanted = next((os.environ[key] for key in _CHOSEN_BY if key in os.environ), None)
    try:
        own = socket.gethostbyname(socket.gethostname())
    except OSError:
        own = ""
    for interface in interfaces():
        if interface.name == wanted if wanted else _same_network(interface.address, own):
            return interface
    return None


def _same_network(address: str, own: str) -> bool:
    # Debian gives a host's name the address 127.0.1.1, which `lo` serves without naming it.
    return address == own or (address.startswith("127.") and own.startswith("127."))


def _address_of(name: str) -> str | None:
    import fcntl  # not on Windows, which does not come this far

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
