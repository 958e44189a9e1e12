"""Sockets on which processes listen."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable
from pathlib import Path

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_LISTENS, _IS_ESTABLISHED = "0A", "01"
"""States of a socket in the kernel's tables."""


def listening_addresses(pids: Iterable[int]) -> set[IPAddress]:
    """Return the addresses at which processes listen: 0.0.0.0 or :: stands for all interfaces."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    rows = [row.split() for name in ("tcp", "tcp6") for row in _rows(name)]
    return {_address(row[1]) for row in rows if row[3] == _LISTENS and row[9] in inodes}


def unread_bytes(port: int) -> list[int]:
    """Return the number of unread bytes of each connection that a process of this host has accepted at an IPv4 port."""
    rows = [row.split() for row in _rows("tcp")]
    # A connection that nobody has accepted yet has no inode.
    accepted = [row for row in rows if row[3] == _IS_ESTABLISHED and row[9] != "0"]
    return [
        int(row[4].partition(":")[2], 16) for row in accepted if int(row[1].partition(":")[2], 16) == port
    ]


def _rows(name: str) -> list[str]:
    return Path(f"/proc/net/{name}").read_text().splitlines()[1:]


def _socket_inodes(pid: int) -> set[str]:
    inodes: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue  # the process or the descriptor is gone
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes


def _address(field: str) -> IPAddress:
    """Return the address of an entry of the kernel's table, whose words are in the host's byte order."""
    words = field.partition(":")[0]
    return ipaddress.ip_address(
        b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    )
