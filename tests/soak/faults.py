"""Training of a run with random faults: start it, fill its disk, kill it, inspect it and resume it, until it ends."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.disk import TmpfsDisk
from tests.soak.inspect_run import differences, inspect_after_kill, ranks_of, saved_steps
from tests.soak.scenarios import Scenario, write_config
from tests.support.command import environment
from tests.support.processes import descendants, kill, wait_until_gone

_GONE_WITHIN_S = 60
_FINISHES_WITHIN_S = 900
_MAX_WAIT_S = 7.0
_NOT_SAVED = "was not saved:"


@dataclass
class Tally:
    """Counts of a scenario."""

    scenario: str
    runs: int = 0
    kills: int = 0
    while_saving: int = 0
    rank_changes: int = 0
    disk_full: int = 0
    failed_saves: int = 0
    checkpoints: int = 0
    steps: int = 0
    steps_lost: int = 0
    most_lost: int = 0
    """Largest number of steps lost by one kill, while the disk had space."""
    bytes_lost: int = 0
    orphans: int = 0
    """Processes that still ran after the rest of their run had ended."""
    faults: list[str] = field(default_factory=list)


def train_with_faults(scenario: Scenario, tally: Tally, folder: Path, rng: random.Random) -> None:
    """Train a run to its end through kills and full disks, and compare it with the uninterrupted run."""
    whole = _whole(scenario, folder)
    if not whole.exists():
        _train_whole(scenario, folder)
    size = 2 * sum(file.stat().st_size for file in whole.rglob("*")) + (1 << 20)
    disk = TmpfsDisk(folder / "disk", size)
    try:
        run = folder / "disk" / "run"
        while not _start_and_kill(scenario, tally, folder, run, disk, rng):
            disk.free()
        tally.runs += 1
        tally.steps += scenario.steps
        tally.checkpoints += len(saved_steps(run))
        tally.faults += differences(run, whole, exact=scenario.is_exact)[:3]
        shutil.rmtree(run)
    finally:
        disk.close()


def _train_whole(scenario: Scenario, folder: Path) -> None:
    """Train the uninterrupted run."""
    config = write_config(scenario, folder / "data", folder / f"{_slug(scenario)}.yaml")
    process = _start(
        folder, ["train", "--config", config, "--run-dir", _whole(scenario, folder)], scenario.ranks[0]
    )
    if process.wait(_FINISHES_WITHIN_S):
        raise SystemExit(_output(folder))


def _start_and_kill(
    scenario: Scenario, tally: Tally, folder: Path, run: Path, disk: TmpfsDisk, rng: random.Random
) -> bool:
    """Start or resume the run and kill it; return whether it had finished before."""
    ranks, before = rng.choice(scenario.ranks), ranks_of(run)
    if (run / "config.yaml").exists() and list(run.glob("checkpoints/step_*/manifest.json")):
        command: list[object] = ["resume", run]
    else:
        command = ["train", "--config", folder / f"{_slug(scenario)}.yaml", "--run-dir", run]
    process = _start(folder, command, ranks)
    tally.rank_changes += before not in (0, ranks)
    fills = rng.random() < 0.4
    _wait_with_faults(process, folder, rng, disk if fills else None)
    if process.poll() is None:
        _kill(process, tally, rng)
        _inspect(scenario, tally, folder, run, disk_was_full=fills)
        return False
    output = _output(folder)
    tally.failed_saves += output.count(_NOT_SAVED)
    if process.returncode == 1 and fills and disk.full_message in output:
        tally.disk_full += 1
        return False
    if process.returncode or "Traceback" in output:
        tally.faults.append(f"ended with {process.returncode}: {output[-2000:]}")
    return True


def _wait_with_faults(
    process: subprocess.Popen[bytes], folder: Path, rng: random.Random, disk: TmpfsDisk | None
) -> None:
    """Wait for a random time, in most cases from the first step on; fill and empty the disk meanwhile."""
    if disk is not None or rng.random() < 0.85:
        while process.poll() is None and "\nstep " not in _output(folder):
            time.sleep(0.02)
    deadline = time.monotonic() + rng.random() * _MAX_WAIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if disk is not None:
            time.sleep(rng.random())
            disk.fill()
            time.sleep(rng.random() * 2)
            if time.monotonic() < deadline:
                disk.free()
        time.sleep(0.01)


def _kill(process: subprocess.Popen[bytes], tally: Tally, rng: random.Random) -> None:
    """Kill all processes, a rank or a reading process, or the launcher. The others must end by themselves."""
    running = [process.pid, *descendants(process.pid)]
    workers = [pid for pid in running[1:] if not _is_resource_tracker(pid)]
    target = rng.choice(["all", "worker", "launcher"])
    kill({"all": running, "worker": [rng.choice(workers or running)], "launcher": [process.pid]}[target])
    left = wait_until_gone([*running, *descendants(os.getpid())], _GONE_WITHIN_S)
    if left:
        tally.orphans += len(left)
        tally.faults.append(f"{len(left)} processes still ran after the kill of: {target}")
        kill(left)
    process.wait()
    tally.kills += 1


def _is_resource_tracker(pid: int) -> bool:
    """Return whether a process is multiprocessing's resource tracker: a run goes on without it."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # the process has ended in the meantime


def _inspect(scenario: Scenario, tally: Tally, folder: Path, run: Path, *, disk_was_full: bool) -> None:
    output = _output(folder)
    state = inspect_after_kill(run, output)
    tally.while_saving += state.was_saving
    tally.failed_saves += output.count(_NOT_SAVED)
    tally.disk_full += disk_was_full
    tally.steps_lost += state.steps_lost
    tally.bytes_lost += state.bytes_lost
    if state.bytes_lost:
        tally.faults.append(f"{state.bytes_lost} bytes lost at step {state.newest}")
    if "Traceback" in output:
        tally.faults.append(output[-2000:])
    if not disk_was_full:
        tally.most_lost = max(tally.most_lost, state.steps_lost)
        # A save may be unfinished when the next one is due.
        if state.steps_lost > 2 * scenario.save_every:
            tally.faults.append(
                f"{state.steps_lost} steps lost, with a checkpoint every {scenario.save_every}"
            )


def _start(folder: Path, arguments: list[object], ranks: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "facetrain", *map(str, arguments), "--nproc-per-node", str(ranks)]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            command, env=environment(), stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )


def _output(folder: Path) -> str:
    return (folder / "output").read_text(errors="replace")


def _whole(scenario: Scenario, folder: Path) -> Path:
    return folder / "whole" / _slug(scenario)


def _slug(scenario: Scenario) -> str:
    return "_".join(scenario.name.replace(",", "").split())
