"""One run under fire: start, disturb, kill, examine, go on, until it is done."""

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
from tests.soak.examine import after_kill, differences, ranks_of, saved_steps
from tests.soak.scenes import Scene, write_config
from tests.support.command import environment
from tests.support.processes import descendants, kill, wait_until_gone

_GONE_WITHIN_S = 60
_FINISHES_WITHIN_S = 900
_LONGEST_LIFE_S = 7.0
_NOT_SAVED = "was not saved:"


@dataclass
class Tally:
    """What has been seen of a scene."""

    scene: str
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
    """By one kill, while the disk had room."""
    bytes_lost: int = 0
    orphans: int = 0
    """Processes that lived on after what they belonged to."""
    faults: list[str] = field(default_factory=list)


def under_fire(scene: Scene, tally: Tally, folder: Path, rng: random.Random) -> None:
    """Train a run to its end through kills and full disks, and compare it."""
    whole = _whole(scene, folder)
    if not whole.exists():
        _train_whole(scene, folder)
    size = 2 * sum(file.stat().st_size for file in whole.rglob("*")) + (1 << 20)
    disk = TmpfsDisk(folder / "disk", size)
    try:
        run = folder / "disk" / "run"
        while not _piece(scene, tally, folder, run, disk, rng):
            disk.free()
        tally.runs += 1
        tally.steps += scene.steps
        tally.checkpoints += len(saved_steps(run))
        tally.faults += differences(run, whole, exact=scene.is_exact)[:3]
        shutil.rmtree(run)
    finally:
        disk.close()


def _train_whole(scene: Scene, folder: Path) -> None:
    """Train the run that the others are compared with, undisturbed."""
    config = write_config(scene, folder / "data", folder / f"{_slug(scene)}.yaml")
    process = _start(
        folder, ["train", "--config", config, "--run-dir", _whole(scene, folder)], scene.ranks[0]
    )
    if process.wait(_FINISHES_WITHIN_S):
        raise SystemExit(_said(folder))


def _piece(scene: Scene, tally: Tally, folder: Path, run: Path, disk: TmpfsDisk, rng: random.Random) -> bool:
    """Let the run go on until it is killed; return whether it has come to its end before."""
    ranks, before = rng.choice(scene.ranks), ranks_of(run)
    if (run / "config.yaml").exists() and list(run.glob("checkpoints/step_*/manifest.json")):
        command: list[object] = ["resume", run]
    else:
        command = ["train", "--config", folder / f"{_slug(scene)}.yaml", "--run-dir", run]
    process = _start(folder, command, ranks)
    tally.rank_changes += before not in (0, ranks)
    fills = rng.random() < 0.4
    _live(process, folder, rng, disk if fills else None)
    if process.poll() is None:
        _kill(process, tally, rng)
        _examine(scene, tally, folder, run, disk_was_full=fills)
        return False
    said = _said(folder)
    tally.failed_saves += said.count(_NOT_SAVED)
    if process.returncode == 1 and fills and disk.refusal in said:
        tally.disk_full += 1
        return False
    if process.returncode or "Traceback" in said:
        tally.faults.append(f"ended with {process.returncode}: {said[-2000:]}")
    return True


def _live(process: subprocess.Popen[bytes], folder: Path, rng: random.Random, disk: TmpfsDisk | None) -> None:
    """Let a process live for a random while: mostly counted from its first step, so that it trains."""
    if disk is not None or rng.random() < 0.85:
        while process.poll() is None and "\nstep " not in _said(folder):
            time.sleep(0.02)
    until = time.monotonic() + rng.random() * _LONGEST_LIFE_S
    while process.poll() is None and time.monotonic() < until:
        if disk is not None:
            time.sleep(rng.random())
            disk.fill()
            time.sleep(rng.random() * 2)
            if time.monotonic() < until:
                disk.free()
        time.sleep(0.01)


def _kill(process: subprocess.Popen[bytes], tally: Tally, rng: random.Random) -> None:
    """Kill everything at once, one rank, or the agent; whatever remains has to end by itself."""
    there = [process.pid, *descendants(process.pid)]
    what = rng.choice(["all", "rank", "agent"])
    kill({"all": there, "rank": [rng.choice(there[1:] or there)], "agent": [process.pid]}[what])
    left = wait_until_gone([*there, *descendants(os.getpid())], _GONE_WITHIN_S)
    if left:
        tally.orphans += len(left)
        tally.faults.append(f"{len(left)} processes lived on after the end of {what}")
        kill(left)
    process.wait()
    tally.kills += 1


def _examine(scene: Scene, tally: Tally, folder: Path, run: Path, *, disk_was_full: bool) -> None:
    said = _said(folder)
    remains = after_kill(run, said)
    tally.while_saving += remains.was_saving
    tally.failed_saves += said.count(_NOT_SAVED)
    tally.disk_full += disk_was_full
    tally.steps_lost += remains.steps_lost
    tally.bytes_lost += remains.bytes_lost
    if remains.bytes_lost:
        tally.faults.append(f"{remains.bytes_lost} bytes lost at step {remains.newest}")
    if "Traceback" in said:
        tally.faults.append(said[-2000:])
    if not disk_was_full:
        tally.most_lost = max(tally.most_lost, remains.steps_lost)
        # One checkpoint may be on its way while the next is not due yet.
        if remains.steps_lost > 2 * scene.save_every:
            tally.faults.append(
                f"{remains.steps_lost} steps lost, with a checkpoint every {scene.save_every}"
            )


def _start(folder: Path, arguments: list[object], ranks: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "facetrain", *map(str, arguments), "--nproc-per-node", str(ranks)]
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            command, env=environment(), stdout=said, stderr=said, stdin=subprocess.DEVNULL
        )


def _said(folder: Path) -> str:
    return (folder / "said").read_text(errors="replace")


def _whole(scene: Scene, folder: Path) -> Path:
    return folder / "whole" / _slug(scene)


def _slug(scene: Scene) -> str:
    return "_".join(scene.name.replace(",", "").split())
