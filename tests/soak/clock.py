"""Survivors' clock: how soon, and with which line, a run ends after a fault in one rank (`python -m tests.soak.clock`).

Two ranks train on a CPU with gloo. Rank 1 dies, stops, hangs, or loses its network or its disk, at each place of a run.
Needs a C compiler, and the permission to create network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.rank_faults import FAULTS, PLACES
from tests.soak.settings import Setting, write_config, write_data
from tests.support.command import ROOT, environment
from tests.support.hosts import two_hosts
from tests.support.processes import adopt_orphans, descendants, is_alive, kill, ranks_of

TIMEOUT_S = 30
"""`train.timeout_s` of the cells in which only this limit helps."""
_HANGS = ("hangs in Python", "hangs in a collective")
_GIVES_UP_S = 150.0
_STARTS_S = 180.0
_NEVER = float("inf")
_CONFIG = {"data.workers": 1, "train.max_steps": 24, "checkpoint.every_steps": 4, "eval.every_steps": 4}
_SITE = "from tests.soak.rank_faults import install\n\ninstall()\n"
_hosts = threading.Lock()
"""The names of the two hosts are the same in every cell."""


@dataclass
class Cell:
    """A fault at a place, and what the clock has measured."""

    place: str
    fault: str
    ended_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("rank 0", "rank 1", "command"), _NEVER)
    )
    """Seconds from the fault to the end of the survivor, of the rank with the fault, and of the survivor's command."""
    exit_codes: list[int | None] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Errors and warnings that were printed."""

    @property
    def is_late(self) -> bool:
        """Whether the survivor has ended later than it may."""
        return self.ended_s["rank 0"] > (TIMEOUT_S + 30 if self.fault in _HANGS else 30)


def compile_lost_disk(folder: Path) -> Path:
    """Compile the library that makes a disk fail."""
    library = folder / "lost_disk.so"
    source = Path(__file__).with_name("lost_disk.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def measure(cell: Cell, folder: Path, library: Path) -> None:
    """Train until the fault has ended the run, or the run has ended in spite of it."""
    disk, injected = folder / "disk", folder / "injected"
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(_SITE)
    fault = {"place": cell.place, "fault": cell.fault, "injected": str(injected)}
    variables = {"PYTHONPATH": f"{folder / 'site'}:{ROOT}", "CLOCK": json.dumps(fault)}
    if cell.fault == "loses its disk":
        # Only the run folder and the data are on the disk that fails.
        variables |= {"LD_PRELOAD": str(library), "LOST_DISK": str(disk), "LOST_DISK_RANK": "1"}
        variables |= {"LOST_DISK_WHEN": str(folder / "lost")}
    write_data(disk / "data")
    changes = _CONFIG | {"train.timeout_s": TIMEOUT_S if cell.fault in _HANGS else 600}
    changes |= {"head.sample_rate": 0.5} if cell.place == "head, sampled" else {}
    config = write_config(Setting("clock", (2,), changes), disk / "data", folder / "clock.yaml")
    command = [sys.executable, "-m", "facetrain", "train", "--config", config, "--run-dir", disk / "run"]
    with ExitStack() as stack:
        output = stack.enter_context((folder / "output").open("wb"))
        commands, places = [[*command, "--nproc-per-node", 2]], [variables]
        if cell.fault == "loses its network":
            stack.enter_context(_hosts)
            hosts = stack.enter_context(two_hosts())
            command += ["--nnodes", 2, "--nproc-per-node", 1, "--rdzv-endpoint", f"{hosts[0].address}:29400"]
            # The agent whose host has the name of the endpoint hosts the rendezvous.
            named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
            commands = [host.command(*named, host.address, *command) for host in hosts]
            names = ("GLOO_SOCKET_IFNAME", "CLOCK_INTERFACE")
            places = [variables | dict.fromkeys(names, host.interface) for host in hosts]
        started = [
            subprocess.Popen(
                list(map(str, words)), env=environment(**where), stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
            for words, where in zip(commands, places, strict=True)
        ]  # fmt: skip
        try:
            _wait(cell, started, injected)
        finally:
            kill(pid for process in started for pid in [*descendants(process.pid), process.pid])
            cell.exit_codes = [process.wait() for process in started]
    cell.lines = _reported((folder / "output").read_text(errors="replace"), folder)


def _wait(cell: Cell, started: list[subprocess.Popen[bytes]], injected: Path) -> None:
    """Wait for the fault, and measure how long the ranks and the command of rank 0 live after it."""
    watched: dict[str, int] = {}
    deadline = time.monotonic() + _STARTS_S
    while not injected.exists() or not injected.read_text():
        for process in started:
            ranks = ranks_of(process.pid)
            watched |= {f"rank {rank}": pid for rank, pid in ranks.items()}
            watched |= {"command": process.pid} if 0 in ranks else {}
        if time.monotonic() > deadline or all(process.poll() is not None for process in started):
            return
        time.sleep(0.05)
    since = float(injected.read_text())
    while (passed_s := time.time() - since) < _GIVES_UP_S and _NEVER in cell.ended_s.values():
        for name, pid in watched.items():
            if not is_alive(pid):
                cell.ended_s[name] = min(cell.ended_s[name], passed_s)
        time.sleep(0.1)


def _reported(output: str, folder: Path) -> list[str]:
    """Return the errors and warnings of an output, each once, without the names of this machine."""
    lines = [line for line in output.splitlines() if re.match("error:|warning:|Traceback", line)]
    for old, new in {str(folder): "", f"{ROOT}/": "", os.uname().nodename: "host"}.items():
        lines = [line.replace(old, new) for line in lines]
    lines = [re.sub(r"(process|step) \d+", r"\1 N", line) for line in lines]
    return list(dict.fromkeys(re.sub(r"step_\d+\.tmp-\w+", "step_N", line) for line in lines))


def _row(cell: Cell) -> str:
    codes = " and ".join(map(str, cell.exit_codes))
    seconds = " | ".join(f"{each:.1f} s" for each in cell.ended_s.values())
    lines = "<br>".join(line.replace("|", "\\|") for line in cell.lines)
    return f"| {cell.fault} | {cell.place} | {seconds} | {codes} | {lines} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", help="only this place, such as loading")
    parser.add_argument("--fault", help="only this fault, such as dies")
    parser.add_argument("--parallel", type=int, default=3, help="runs at the same time; default: 3")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    adopt_orphans()
    faults = [fault for fault in FAULTS if options.fault in (None, fault)]
    cells = [Cell(place, fault) for fault in faults for place in PLACES if options.place in (None, place)]
    with tempfile.TemporaryDirectory(prefix="facetrain-clock-") as name:
        library = compile_lost_disk(Path(name))

        def run(number: int) -> None:
            measure(cells[number], Path(name) / str(number), library)
            print(_row(cells[number]), file=sys.stderr, flush=True)

        with ThreadPoolExecutor(options.parallel) as pool:
            list(pool.map(run, range(len(cells))))
    print("| rank 1 … | during | rank 0 ended after | rank 1 ended after | command after | exit | printed |")
    print("|---" * 7 + "|", *map(_row, cells), sep="\n")
    print(f"\n`train.timeout_s` is {TIMEOUT_S} where rank 1 hangs, and 600 elsewhere.")
    sys.exit(any(cell.is_late for cell in cells))


if __name__ == "__main__":
    main()
