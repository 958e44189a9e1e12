"""Two network namespaces with a virtual cable between them, as two hosts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

# What a process on the host starts is there already, and runs this, too.
_ENTER = """
import ctypes, socket, subprocess

if socket.gethostname() != {name!r}:
    libc = ctypes.CDLL(None)
    with open({network!r}) as network:
        assert libc.setns(network.fileno(), 0) == 0
    assert libc.unshare(0x4000000 | 0x20000) == 0  # CLONE_NEWUTS, CLONE_NEWNS
    for arguments in (["--make-rprivate", "/"], ["--bind", {table!r}, "/etc/hosts"]):
        subprocess.run(["mount", *arguments], check=True)
    socket.sethostname({name!r})
"""


@dataclass(frozen=True)
class Host:
    """Network namespace, with its end of the cable and the address there."""

    name: str
    interface: str
    address: str

    def command(self, *arguments: object) -> list[str]:
        """Return a command line that runs the given one on this host."""
        return ["ip", "netns", "exec", self.name, *map(str, arguments)]

    def let_enter(self, folder: Path, *names: tuple[str, str]) -> None:
        """Let processes with `folder` in PYTHONPATH run on this host, with /etc/hosts as given: (address, name).

        The last name is the host's own.
        """
        table = folder / "hosts"
        lines = (f"{address} {name}\n" for address, name in (("127.0.0.1", "localhost"), *names))
        table.write_text("".join(lines))
        values = {"name": names[-1][1], "network": f"/run/netns/{self.name}", "table": str(table)}
        (folder / "sitecustomize.py").write_text(_ENTER.format(**values))

    def set_link(self, state: str) -> None:
        """Disconnect the cable ("down") or connect it ("up")."""
        _ip("-n", self.name, "link", "set", self.interface, state)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two hosts with a cable between them; skip the calling test if that is not permitted."""
    # Linux limits interface names to 15 characters.
    hosts = [Host(f"ft{os.getpid()}{end}", f"ft{end}{os.getpid()}", f"10.77.0.{end}") for end in (1, 2)]
    first, second = hosts
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        _ip("link", "add", first.interface, "netns", first.name, "type", "veth",
            "peer", "name", second.interface, "netns", second.name)  # fmt: skip
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        _remove(hosts)
        pytest.skip(f"needs the permission to create network namespaces: {getattr(error, 'stderr', error)}")
    try:
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", "lo", "up")
            host.set_link("up")
        yield first, second
    finally:
        _remove(hosts)


def _remove(hosts: list[Host]) -> None:
    for host in hosts:
        subprocess.run(["sh", "-c", f"ip netns del {host.name} 2>/dev/null"])


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
