"""Cells of the survivors' clock: one run with two ranks, of which one fails at a given place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.clock.faults import PLACES
from tests.soak.scenarios import Scenario, write_config
from tests.support.command import ROOT, environment
from tests.support.hosts import two_hosts
from tests.support.processes import descendants, is_alive, kill, ranks_of

TIMEOUT_S = 30
"""`train.timeout_s` of the cells in which only this limit helps."""
_HANGS = ("hangs in Python", "hangs in a collective")
_GIVES_UP_S = 150.0
_STARTS_S = 180.0
_STEPS, _SAVE_EVERY = 24, 4
_hosts = threading.Lock()
"""The names of the two hosts are the same in every cell."""


@dataclass
class Cell:
    """A fault at a place, and what the clock has measured."""

    place: str
    fault: str
    rank_0_s: float = float("inf")
    """Seconds from the fault to the end of rank 0, the survivor."""
    rank_1_s: float = float("inf")
    """The same of rank 1, which has the fault."""
    command_s: float = float("inf")
    """The same of the command that has started rank 0."""
    exit_codes: list[int | None] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Errors and warnings that were printed."""

    @property
    def is_unfinished(self) -> bool:
        """Whether one of the three still runs."""
        return float("inf") in (self.rank_0_s, self.rank_1_s, self.command_s)

    @property
    def limit_s(self) -> float:
        """Longest time that the survivor may take."""
        return TIMEOUT_S + 30 if self.fault in _HANGS else 30


def compile_lost_disk(folder: Path) -> Path:
    """Compile the library that makes a disk fail."""
    library = folder / "lost_disk.so"
    source = Path(__file__).with_name("lost_disk.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def measure(cell: Cell, folder: Path, dataset: Path, library: Path | None) -> None:
    """Train until the fault has ended the run, or the run has ended in spite of it."""
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text("from tests.clock.faults import install\n\ninstall()\n")
    injected = folder / "injected"
    settings = {"place": cell.place, "fault": cell.fault, "injected": str(injected)}
    variables = {"PYTHONPATH": f"{folder / 'site'}:{ROOT}", "CLOCK": json.dumps(settings)}
    if cell.fault == "loses its disk":
        # Only the run folder and a copy of the data are on the disk that fails.
        variables |= {"LD_PRELOAD": str(library), "LOST_DISK": str(folder / "disk"), "LOST_DISK_RANK": "1"}
        variables |= {"LOST_DISK_WHEN": str(folder / "lost")}
    (folder / "disk").mkdir()
    subprocess.run(["cp", "-r", str(dataset), str(folder / "disk" / "data")], check=True)
    changes: dict[str, object] = {"train.timeout_s": TIMEOUT_S if cell.fault in _HANGS else 600}
    changes |= {"head.sample_rate": 0.5} if cell.place == "head, sampled" else {}
    scenario = Scenario("clock", (2,), _STEPS, _SAVE_EVERY, changes)
    config = write_config(scenario, folder / "disk" / "data", folder / "clock.yaml")
    command = [
        sys.executable,
        "-m",
        "facetrain",
        "train",
        "--config",
        config,
        "--run-dir",
        folder / "disk" / "run",
    ]
    with ExitStack() as stack:
        started: list[subprocess.Popen[bytes]] = []
        output = stack.enter_context((folder / "output").open("wb"))
        if cell.fault == "loses its network":
            stack.enter_context(_hosts)
            hosts = stack.enter_context(two_hosts())
            command += ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-endpoint", f"{hosts[0].address}:29400"]
            for host in hosts:
                network = {"GLOO_SOCKET_IFNAME": host.interface, "CLOCK_INTERFACE": host.interface}
                # The agent whose host has the name of the endpoint hosts the rendezvous.
                named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host.address]
                started.append(_start(host.command(*named, *command), variables | network, output))
        else:
            started.append(_start([*command, "--nproc-per-node", 2], variables, output))
        try:
            _wait(cell, started, injected)
        finally:
            kill(pid for process in started for pid in [*descendants(process.pid), process.pid])
            cell.exit_codes = [process.wait() for process in started]
    cell.lines = _reported((folder / "output").read_text(errors="replace"), folder)


def _start(command: list[object], variables: dict[str, str], output: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(each) for each in command],
        env=environment(**variables),
        stdout=output,  # type: ignore[call-overload]
        stderr=output,
        stdin=subprocess.DEVNULL,
    )


def _wait(cell: Cell, started: list[subprocess.Popen[bytes]], injected: Path) -> None:
    """Wait for the fault, and measure how long the ranks and the command of rank 0 live after it."""
    ranks: dict[int, int] = {}
    command_of: dict[int, subprocess.Popen[bytes]] = {}
    deadline = time.monotonic() + _STARTS_S
    while not injected.exists() or not injected.read_text():
        for process in started:
            for rank, pid in ranks_of(process.pid).items():
                ranks[rank], command_of[rank] = pid, process
        if time.monotonic() > deadline or all(process.poll() is not None for process in started):
            return
        time.sleep(0.05)
    since = float(injected.read_text())
    while (passed_s := time.time() - since) < _GIVES_UP_S and cell.is_unfinished:
        for rank, name in ((0, "rank_0_s"), (1, "rank_1_s")):
            if not is_alive(ranks[rank]):
                setattr(cell, name, min(getattr(cell, name), passed_s))
        if command_of[0].poll() is not None:
            cell.command_s = min(cell.command_s, passed_s)
        time.sleep(0.1)


def _reported(output: str, folder: Path) -> list[str]:
    lines = [line for line in output.splitlines() if re.match("error:|warning:|Traceback", line)]
    replaced = {str(folder): "", f"{ROOT}/": "", os.uname().nodename: "host"}
    for old, new in replaced.items():
        lines = [line.replace(old, new) for line in lines]
    lines = [re.sub(r"(process|step) \d+", r"\1 N", line) for line in lines]
    lines = [re.sub(r"step_\d+\.tmp-\w+", "step_N", line) for line in lines]
    return list(dict.fromkeys(lines))


def all_cells() -> list[Cell]:
    """Return every fault at every place."""
    from tests.clock.faults import FAULTS

    return [Cell(place, fault) for fault in FAULTS for place in PLACES]
