"""Random faults in every setting: `python -m tests.soak.kills --kills 1000`.

SIGKILL ends a run at a random moment, in a third of the starts inside a save, and the run is resumed until it ends. Its
metrics, weights and class centers must then equal, bit for bit, those of the run that was not disturbed; to rounding if
the number of ranks changes. Runs that are started as a command also lose one process, or the launcher, alone, and their
disk is full at times. After every kill all checkpoints are verified, and no process may be left.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.soak.inspect_run import differences, inspect_after_kill
from tests.soak.settings import SETTINGS, Setting, write_data
from tests.soak.starter import RunFailed, Starter, prepare_forks
from tests.support.faults import full, small_disk
from tests.support.processes import adopt_orphans

_SHARE_IN_SAVES = 0.33
_SHARE_ON_FULL_DISK = 0.4
_PORT_TAKEN = ("address already in use", "EADDRINUSE")
_DISK_FULL = ("No space left on device", "and the disk has 0.0 MB free")
_ORPHAN = "EOFError: Ran out of input"
"""Last line of Python's own traceback in a process whose parent was killed while it started it."""


@dataclass
class Tally:
    """Counts of a setting."""

    setting: str
    kills: int = 0
    saving: int = 0
    """Kills inside a save."""
    starting: int = 0
    """Kills before the first step."""
    full_disk: int = 0
    """Starts whose disk was full for a time."""
    runs: int = 0
    """Runs that were finished after kills and compared with the undisturbed run."""
    most_lost: int = 0
    """Largest number of steps lost by one kill while the disk had space."""
    seconds: int = 0
    faults: list[str] = field(default_factory=list)


class RandomFaults:
    """Faults of one start: its disk is full for a time, and at a random moment it must be killed."""

    def __init__(self, run: Path, seconds: float, rng: random.Random, *, kills: bool, fills: bool) -> None:
        now = time.monotonic()
        self._run, self._rng, self._kills = run, rng, kills
        self._deadline, self._patience = now + rng.random() * seconds, now + 2 * seconds + 5
        self._is_in_save = rng.random() < _SHARE_IN_SAVES
        self._fills, self._disk = fills, ExitStack()
        self._full_from, self._full_until = sorted(now + rng.random() * seconds for _ in range(2))

    def __call__(self) -> bool:
        """Fill or empty the disk; return whether the run must be killed now."""
        now = time.monotonic()
        if self._fills and now > self._full_from:
            self._fills = False
            self._disk.enter_context(full(self._run.parent))
        if now > self._full_until:
            self._disk.close()
        if not self._kills or now < self._deadline:
            return False
        if not self._is_in_save or now > self._patience:
            return True
        if not any((self._run / "checkpoints").glob(".step_*")):
            return False
        time.sleep(self._rng.random() * 0.01)
        return True

    def end(self) -> None:
        """Empty the disk."""
        self._disk.close()


def kill_often(setting: Setting, kills: int, folder: Path, seed: int) -> Tally:
    """Kill runs of a setting until the number of kills is reached, then compare each with the undisturbed run."""
    adopt_orphans()
    rng, since, tally = random.Random(f"{seed} {setting.name}"), time.monotonic(), Tally(setting.name)
    starter = Starter(setting, folder / setting.slug, folder / "data", rng)
    try:
        seconds = starter.train_whole()
        with ExitStack() as stack:
            if setting.is_command:
                size = sum(file.stat().st_size for file in starter.whole.rglob("*"))
                stack.enter_context(small_disk(starter.disk, 2 * size // 1024 + 1024))
            while tally.kills < kills:
                run = starter.disk / "run"
                while _start(starter, run, seconds, tally, rng, kills=tally.kills < kills):
                    pass
                tally.runs += 1
                tally.faults += differences(run, starter.whole, exact=len(setting.ranks) == 1)[:3]
                shutil.rmtree(run)
    except (Exception, pytest.skip.Exception):
        tally.faults.append(traceback.format_exc()[-3000:])
    tally.seconds = round(time.monotonic() - since)
    return tally


def _start(
    starter: Starter, run: Path, seconds: float, tally: Tally, rng: random.Random, *, kills: bool
) -> bool:
    """Start or resume a run with random faults; return whether it did not reach its end."""
    fills = kills and starter.setting.is_command and rng.random() < _SHARE_ON_FULL_DISK
    faults = RandomFaults(run, seconds, rng, kills=kills, fills=fills)
    tally.full_disk += fills
    try:
        was_killed = starter.train(run, is_due=faults)
    except RunFailed:
        # Another program may have taken the port of the rendezvous meanwhile.
        expected = [*_PORT_TAKEN, *(_DISK_FULL if fills else ())]
        if any(text in starter.output for text in expected):
            return True
        raise
    finally:
        faults.end()
    if was_killed:
        _inspect(tally, starter, run, was_full=fills)
    elif _tracebacks(starter.output):
        tally.faults.append(starter.output[-2000:])
    return was_killed


def _inspect(tally: Tally, starter: Starter, run: Path, *, was_full: bool) -> None:
    """Count a kill by what it interrupted, and verify all checkpoints of the run."""
    state = inspect_after_kill(run)
    tally.kills += 1
    tally.saving += state.was_saving
    tally.starting += not state.was_saving and state.reached <= state.newest
    if not was_full:
        tally.most_lost = max(tally.most_lost, state.reached - state.newest)
    if state.bytes_lost:
        tally.faults.append(f"kill {tally.kills}: {state.bytes_lost} bytes lost at step {state.newest}")
    if _tracebacks(starter.output) > starter.output.count(_ORPHAN):
        tally.faults.append(starter.output[-2000:])


def _tracebacks(output: str) -> int:
    return output.count("Traceback (most recent call last)")


def table(tallies: list[Tally]) -> str:
    """Format the counts as a Markdown table with a row for all settings."""
    names = [each.name for each in fields(Tally)]
    rows = [[getattr(tally, name) for name in names[:-1]] + [len(tally.faults)] for tally in tallies]
    numbers = zip(*(row[1:] for row in rows), strict=True)
    totals = [
        max(each) if name == "most_lost" else sum(each) for name, each in zip(names[1:], numbers, strict=True)
    ]
    lines = ["| " + " | ".join(names).replace("_", " ") + " |", "|" + "---|" * len(names)]
    for name, *counts in [*rows, ["all", *totals]]:
        lines.append(f"| {name} | " + " | ".join(f"{count:,}" for count in counts) + " |")
    lines += [f"fault: {tally.setting}: {fault}" for tally in tallies for fault in tally.faults]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills", type=int, default=1000, help="number of kills over all settings; default: 1000"
    )
    parser.add_argument("--processes", type=int, default=2, help="settings at a time; default: 2")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments; default: 0")
    parser.add_argument("--only", default="", help="part of the names of the settings to run; default: all")
    options = parser.parse_args()
    prepare_forks()
    chosen = [setting for setting in SETTINGS if options.only in setting.name]
    total, count = options.kills, len(chosen)
    shares = [total * (number + 1) // count - total * number // count for number in range(count)]
    with (
        tempfile.TemporaryDirectory(prefix="facetrain-kills-") as name,
        ProcessPoolExecutor(options.processes, get_context("fork")) as pool,
    ):
        folder = Path(name)
        write_data(folder / "data")
        tallies = []
        for tally in pool.map(kill_often, chosen, shares, repeat(folder), repeat(options.seed)):
            print(tally, file=sys.stderr, flush=True)
            tallies.append(tally)
    print(table(tallies))
    sys.exit(any(tally.faults for tally in tallies))


if __name__ == "__main__":
    main()
