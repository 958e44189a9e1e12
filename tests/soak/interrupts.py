"""Ctrl-C at moments from the start of a command to its end: exit code 130, at most two lines, no process left.

Run as a program: `python -m tests.soak.interrupts [--moments N]`. A command that ends by itself before the signal comes
counts as well, with exit code 0.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.soak.scenarios import Scenario, write_config, write_dataset
from tests.support.command import environment, restore_signals
from tests.support.processes import descendants, kill, wait_until_gone

_NOT_COUNTED = re.compile(
    r"SIGINT received: saving|stopped at step|step \d+|warning: |\S+: \d+ images|verif|\s*$"
)
"""Lines that a run prints when it stops as it should, or had printed before."""
_LIMIT_S = 120.0


def interrupt(arguments: Sequence[object], moment_s: float = 0.0, processes: int = 0) -> list[str]:
    """Send SIGINT to a command and all its processes, as a terminal does; return what is wrong with its end.

    The signal is sent `moment_s` seconds after the command has as many descendants as `processes`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "facetrain", *map(str, arguments)],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=restore_signals,
    )  # fmt: skip
    pids = [process.pid]
    try:
        while len(descendants(process.pid)) < processes and process.poll() is None:
            time.sleep(0.01)
        time.sleep(moment_s)
        pids += descendants(process.pid)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return [f"still runs after {_LIMIT_S:.0f} s"]
    finally:
        left = wait_until_gone(pids, 10)
        kill(left)
        process.communicate()
    if "init_import_site" in stderr:  # Python itself was not up yet
        return []
    lines = [line for line in stderr.splitlines() if not _NOT_COUNTED.match(line)]
    faults = [f"processes left: {left}"] if left else []
    # While Python ends, the signal has its default action; a shell reports that as 130, too.
    if process.returncode not in (0, 130, -signal.SIGINT):
        faults.append(f"exit code {process.returncode}")
    if len(lines) > 2 or "Traceback" in stderr:
        faults.append("prints:\n" + stderr)
    return faults


def _duration_s(arguments: Sequence[object]) -> float:
    since = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "facetrain", *map(str, arguments)],
        env=environment(), capture_output=True, check=True, timeout=300,
    )  # fmt: skip
    return time.monotonic() - since


def _commands(folder: Path) -> dict[str, list[object]]:
    """Return the commands to interrupt; each may find or lack the output of an earlier one."""
    config = folder / "config.yaml"
    train = ["train", "--config", config, "--set", "train.max_steps=6", "--run-dir"]
    model, sets = folder / "trained", folder / "data" / "val.bin"
    return {
        "train": [*train, folder / "run", "--resume"],
        "train on two ranks": [*train, folder / "run_2", "--resume", "--nproc-per-node", 2],
        "eval": ["eval", model, "--target", sets, "--device", "cpu"],
        "embed": [
            "embed",
            model,
            folder / "data",
            "--output",
            folder / "embeddings.safetensors",
            "--device",
            "cpu",
        ],
        "inspect": ["data", "inspect", folder / "data"],
    }


def main() -> None:
    """Interrupt every command; print the faults, and exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=40, help="moments per command")
    parser.add_argument("--only", help="this command alone")
    options = parser.parse_args()
    count = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder / "data")
        write_config(Scenario("interrupts", (1, 2), 6, 2, {}), folder / "data", folder / "config.yaml")
        subprocess.run(
            [sys.executable, "-m", "facetrain", "train", "--config", folder / "config.yaml", "--run-dir",
             folder / "trained"], env=environment(), capture_output=True, check=True,
        )  # fmt: skip
        for title, command in _commands(folder).items():
            if options.only not in (None, title):
                continue
            whole = _duration_s(command)
            for number in range(options.moments):
                for output in ("run", "run_2", "embeddings.safetensors"):
                    path = folder / output
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                moment = whole * number / options.moments
                for fault in interrupt(command, moment):
                    count += 1
                    print(f"{title}, after {moment:.2f} of {whole:.2f} s: {fault}", flush=True)
            print(f"{title}: {options.moments} moments", flush=True)
    sys.exit(bool(count))


if __name__ == "__main__":
    main()
