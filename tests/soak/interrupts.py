"""Ctrl-C at random moments of a run, from the start of Python to its end: `python -m tests.soak.interrupts`.

The command must end with exit code 130 within the time that it allows itself, without a traceback and without leaving a
process. A run that has taken a step has saved it, and is resumed; at its end it equals, bit for bit, a run that nobody
has interrupted.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from facetrain.checkpoint.commit import complete_steps
from tests.soak.inspect_run import differences, inspect_after_kill
from tests.soak.settings import SETTINGS, Setting, write_config, write_data
from tests.support.command import environment
from tests.support.processes import adopt_orphans, descendants, kill, wait_until_gone

_NAMES = ("command", "command, 2 ranks, fp16")
_ENDS_WITHIN_S, _GONE_WITHIN_S = 120, 60
_STARTING, _LATER = "before the first step", "later"
_INTERRUPTED = 128 + signal.SIGINT


def start(setting: Setting, config: Path, run: Path, output: Path) -> subprocess.Popen[bytes]:
    """Start or resume a run as a user does, in a process group of its own, as a terminal does."""
    command = ["train", "--config", config, "--run-dir", run]
    if complete_steps(run / "checkpoints"):
        command = ["resume", run]
    words = [sys.executable, "-m", "facetrain", *command, "--nproc-per-node", setting.ranks[0]]
    with output.open("wb") as file:
        return subprocess.Popen(
            [*map(str, words)],
            env=environment(OMP_NUM_THREADS="1"),
            stdout=file,
            stderr=file,
            process_group=0,
        )


def faults_of(code: int, output: Path, run: Path) -> Iterator[str]:
    """Yield what is wrong after an interrupted command."""
    text = output.read_text(errors="replace")
    # Before Python has its handlers, and after it has dropped them, the signal itself ends the process. A shell shows
    # 130 for that, too.
    if code not in (0, _INTERRUPTED, -signal.SIGINT):
        yield f"exit code {code}: {text[-2000:]}"
    if "Traceback" in text:
        yield text[-2000:]
    if left := wait_until_gone(descendants(os.getpid()), _GONE_WITHIN_S):
        yield f"{len(left)} processes are left: {text[-500:]}"
        kill(left)
    state = inspect_after_kill(run)
    if state.bytes_lost:
        yield f"{state.bytes_lost} bytes lost at step {state.newest}"
    if state.reached > state.newest:
        yield f"step {state.reached} was taken, and step {state.newest} is the last one saved: {text[-500:]}"


def interrupt_often(
    setting: Setting, count: int, folder: Path, rng: random.Random
) -> tuple[Counter[str], list[str]]:
    """Interrupt runs of a setting so often; return counts of the moments, and what was wrong."""
    config, output = write_config(setting, folder / "data", folder / "run.yaml"), folder / "output"
    run, whole, moments, faults = folder / "run", folder / "whole", Counter[str](), list[str]()
    since = time.monotonic()
    if start(setting, config, whole, output).wait():
        return moments, [output.read_text()]
    seconds = time.monotonic() - since
    while moments[_STARTING] + moments[_LATER] < count:
        process = start(setting, config, run, output)
        try:
            process.wait(rng.random() * seconds)
        except subprocess.TimeoutExpired:
            has_begun = complete_steps(run / "checkpoints") or inspect_after_kill(run).reached
            moments[_LATER if has_begun else _STARTING] += 1
            os.killpg(process.pid, signal.SIGINT)
        try:
            code = process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            faults.append(f"does not end: {output.read_text()[-2000:]}")
            kill([process.pid, *descendants(os.getpid())])
            continue
        faults += faults_of(code, output, run)
        if code == 0:
            moments["runs that reached their end"] += 1
            faults += differences(run, whole, exact=True)[:3]
            shutil.rmtree(run)
            print(f"{setting.name}: {dict(moments)}, {len(faults)} faults so far", flush=True)
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(whole)
    return moments, faults


def main() -> None:
    """Interrupt runs, print counts and faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interrupts", type=int, default=200, help="over all settings; default: 200")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments; default: 0")
    options = parser.parse_args()
    adopt_orphans()
    failed = False
    with tempfile.TemporaryDirectory(prefix="facetrain-interrupts-") as name:
        write_data(Path(name) / "data")
        for setting in (setting for setting in SETTINGS if setting.name in _NAMES):
            rng = random.Random(f"{options.seed} {setting.name}")
            moments, faults = interrupt_often(setting, options.interrupts // len(_NAMES), Path(name), rng)
            print(f"{setting.name}: {dict(moments)}, {len(faults)} faults", *faults, sep="\n  ", flush=True)
            failed = failed or bool(faults)
    sys.exit(failed)


if __name__ == "__main__":
    main()
