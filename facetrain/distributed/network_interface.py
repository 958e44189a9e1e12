"""Addresses and network interfaces of this host that the stores, the collectives and the watchdogs listen on."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"
_SIOCGIFADDR = 0x8915  # from Linux's sockios.h


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


def address_toward(host: str, port: int) -> str:
    """Return the address of this host from which it reaches another one, or itself. Sends nothing.

    Raises:
        OSError: the host is unknown, or no interface leads to it.
    """
    refusal = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                # Of a datagram socket: the kernel only chooses the interface.
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            refusal = error
    raise refusal


def use_interface_of(address: str) -> None:
    """Let gloo listen on the interface of an address of this host, unless the user has chosen an interface.

    By itself, gloo takes the address of the host name, which Debian and Ubuntu set to 127.0.1.1: no other host can
    connect to it. NCCL looks for the interfaces itself, and uses several. For a loopback address, both are bound to
    that interface, because neither has authentication. Call it before the process group is formed.
    """
    if name := _interface_of(address):
        # A default: in a container, the user may need another interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if is_loopback(address):
            # With "=", NCCL takes this name only, and not every interface whose name begins with it.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _interface_of(address: str) -> str:
    """Return the name of the interface that has an address, "" if it is unknown."""
    if is_loopback(address):
        return _LOOPBACK_INTERFACE
    if ":" in address:
        return _ipv6_interfaces().get(address.partition("%")[0], "")
    return next((name for _, name in socket.if_nameindex() if _ipv4_address(name) == address), "")


def _ipv4_address(interface: str) -> str:
    """Return the first IPv4 address of an interface, "" if it has none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    return ""


def _ipv6_interfaces() -> dict[str, str]:
    interfaces = {}
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            interfaces[str(ipaddress.IPv6Address(int(address, 16)))] = name
    return interfaces
