"""Random kills in every setting: `python -m tests.soak.kills --kills 1000`.

This process imports torch and facetrain once and forks the ranks of every start, so that a start takes about a second
instead of eight. A process group holds all ranks of a start with their reading processes; SIGKILL ends the whole
group at a random moment, in a third of the starts inside a save. After the kills of a setting the run is resumed to its
end, and its metrics, weights and class centers must be equal, bit for bit, to those of the run that was not killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import matplotlib.pyplot  # noqa: F401 (a run imports these two when it first needs them)
import torch
import torch._dynamo

from facetrain.checkpoint.commit import complete_steps
from facetrain.config.loading import load_config
from facetrain.run import training as run
from facetrain.telemetry.jsonl import read_jsonl
from tests.soak.inspect_run import differences, inspect_after_kill
from tests.soak.settings import SETTINGS, STEPS, Setting, write_config, write_data

_FINISHES_WITHIN_S = 300
_SHARE_IN_SAVES = 0.33
_SHORTER = 0.85
_ACTIVITIES = ("starting", "training", "evaluating", "saving")
_PORT_TAKEN = ("address already in use", "EADDRINUSE")


@dataclass
class Tally:
    """Counts of a setting."""

    setting: str
    ranks: int
    kills: int = 0
    starting: int = 0
    training: int = 0
    evaluating: int = 0
    saving: int = 0
    runs: int = 0
    """Runs that were finished after kills and compared with the undisturbed run."""
    most_lost: int = 0
    """Largest number of steps lost by one kill."""
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


class Starter:
    """Starts and kills the runs of one setting in one folder."""

    def __init__(self, setting: Setting, folder: Path, data: Path, rng: random.Random) -> None:
        self._setting, self._folder, self._rng = setting, folder, rng
        folder.mkdir(parents=True)
        self._config = write_config(setting, data, folder / "run.yaml")
        self._output = folder / "output"

    def train_whole(self) -> float:
        """Train the undisturbed run and return its seconds."""
        since = time.monotonic()
        if self._wait(self._start(self.whole), lambda: time.monotonic() - since > _FINISHES_WITHIN_S):
            raise RuntimeError(f"the undisturbed run did not end: {self.output[-2000:]}")
        return time.monotonic() - since

    @property
    def whole(self) -> Path:
        """Return the folder of the undisturbed run."""
        return self._folder / "whole"

    @property
    def output(self) -> str:
        """Return the output of the last start."""
        return self._output.read_text(errors="replace")

    def start_and_kill(self, run_dir: Path, seconds: float) -> bool:
        """Start or resume a run, and kill it after a random time; return whether it was killed before its end."""
        ranks, deadline = self._start(run_dir), time.monotonic() + self._rng.random() * seconds
        in_save = self._rng.random() < _SHARE_IN_SAVES
        checkpoints, patience = run_dir / "checkpoints", time.monotonic() + 2 * seconds + 5

        def is_due() -> bool:
            if not in_save or time.monotonic() > patience:
                return time.monotonic() > deadline
            if time.monotonic() < deadline or not any(checkpoints.glob(".step_*")):
                return False
            time.sleep(self._rng.random() * 0.01)
            return True

        return self._wait(ranks, is_due)

    def kill_when(self, run_dir: Path, is_due: Callable[[], bool]) -> bool:
        """Start a run, and kill it at a given moment; return whether it was killed before its end."""
        return self._wait(self._start(run_dir), is_due)

    def finish(self, run_dir: Path) -> bool:
        """Resume a run, and let it end; return False, because it was not killed."""
        since = time.monotonic()
        if self._wait(self._start(run_dir), lambda: time.monotonic() - since > _FINISHES_WITHIN_S):
            raise RuntimeError(f"the run did not end: {self.output[-2000:]}")
        return False

    def _start(self, run_dir: Path) -> list[int]:
        """Fork the ranks into one process group; return their process ids, the leader of the group first."""
        port = _free_port()
        self._output.write_bytes(b"")
        ranks: list[int] = []
        for rank in range(self._setting.ranks):
            child = os.fork()
            if not child:
                self._run_rank(rank, port, run_dir, group=ranks[0] if ranks else 0)
            with suppress(PermissionError, ProcessLookupError):  # the child did it, or has ended
                os.setpgid(child, ranks[0] if ranks else child)
            ranks.append(child)
        return ranks

    def _run_rank(self, rank: int, port: int, run_dir: Path, *, group: int) -> None:
        try:
            with suppress(PermissionError):
                os.setpgid(0, group)
            output = os.open(self._output, os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if self._setting.ranks > 1:
                size = str(self._setting.ranks)
                os.environ.update(
                    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size,
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
                )  # fmt: skip
            if complete_steps(run_dir / "checkpoints"):
                code = run.resume(load_config(run_dir / "config.yaml"), run_dir)
            else:
                code = run.train(load_config(self._config), run_dir)
            sys.stdout.flush()
            os._exit(code)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(99)

    def _wait(self, ranks: list[int], is_due: Callable[[], bool]) -> bool:
        """Wait for the end of all ranks; kill them when it is due. Return whether they were killed before their end.

        Raises:
            RuntimeError: a rank failed without a kill.
        """
        running = set(ranks)
        failed = False
        while running:
            if is_due() or failed:
                os.killpg(ranks[0], signal.SIGKILL)
                for rank in running:
                    os.waitpid(rank, 0)
                if failed:
                    raise RuntimeError(f"a rank failed without a kill: {self.output[-2000:]}")
                return True
            time.sleep(0.002)
            for rank in list(running):
                ended, status = os.waitpid(rank, os.WNOHANG)
                if ended:
                    running.remove(rank)
                    failed = failed or os.waitstatus_to_exitcode(status) != 0
        if failed:
            raise RuntimeError(f"a rank failed without a kill: {self.output[-2000:]}")
        return False


def kill_often(setting: Setting, kills: int, folder: Path, data: Path, seed: int) -> Tally:
    """Kill runs of a setting until the number of kills is reached, then compare each with the undisturbed run."""
    rng, since = random.Random(f"{seed} {setting.name}"), time.monotonic()
    tally = Tally(setting.name, setting.ranks)
    starter = Starter(setting, folder, data, rng)
    try:
        seconds = starter.train_whole()
        while tally.kills < kills:
            target = folder / f"killed_{tally.runs}"
            while tally.kills < kills and _retry_taken_port(
                starter, partial(starter.start_and_kill, target, seconds)
            ):
                _inspect(tally, starter, target)
            if tally.kills < kills:
                seconds *= _SHORTER  # it ended before it was due: the machine is faster now than at the start
            else:
                _retry_taken_port(starter, partial(starter.finish, target))
            tally.runs += 1
            tally.faults += differences(target, starter.whole, exact=True)[:3]
            shutil.rmtree(target)
    except Exception:
        tally.faults.append(traceback.format_exc()[-3000:])
    tally.seconds = round(time.monotonic() - since, 1)
    return tally


def _retry_taken_port(starter: Starter, start: Callable[[], bool]) -> bool:
    """Start again if another program has taken the port of the rendezvous meanwhile."""
    while True:
        try:
            return start()
        except RuntimeError:
            if not any(text in starter.output for text in _PORT_TAKEN):
                raise


def _inspect(tally: Tally, starter: Starter, target: Path) -> None:
    """Count a kill by what it interrupted, and verify all checkpoints of the run."""
    state = inspect_after_kill(target, starter.output)
    activity = "saving" if state.was_saving else _activity(target)
    tally.kills += 1
    setattr(tally, activity, getattr(tally, activity) + 1)
    records = read_jsonl(target / "metrics.jsonl") if (target / "metrics.jsonl").exists() else []
    reached = max((record["step"] for record in records if "loss" in record), default=0)
    tally.most_lost = max(tally.most_lost, reached - state.newest)
    if state.bytes_lost:
        tally.faults.append(f"kill {tally.kills}: {state.bytes_lost} bytes lost at step {state.newest}")
    if "Traceback" in starter.output:
        tally.faults.append(starter.output[-2000:])


def _activity(target: Path) -> str:
    path = target / "metrics.jsonl"
    records = read_jsonl(path) if path.exists() else []
    if not records or "loss" not in records[-1]:
        return "starting"
    return "evaluating" if records[-1]["step"] % (STEPS // 2) == 0 else "training"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def table(tallies: list[Tally]) -> str:
    """Format the counts as a Markdown table with a row for all settings."""
    heads = ["setting", "ranks", "kills", *_ACTIVITIES, "runs", "most steps lost", "seconds", "faults"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    rows = [
        [t.setting, t.ranks, t.kills, *(getattr(t, name) for name in _ACTIVITIES), t.runs, t.most_lost,
         round(t.seconds), len(t.faults)]
        for t in tallies
    ]  # fmt: skip
    totals = [sum(row[column] for row in rows) for column in range(2, len(heads))]
    totals[heads.index("most steps lost") - 2] = max(row[heads.index("most steps lost")] for row in rows)
    for row in [*rows, ["all", "", *totals]]:
        lines.append(
            "| " + " | ".join(f"{value:,}" if isinstance(value, int) else value for value in row) + " |"
        )
    lines += [f"fault: {tally.setting}: {fault}" for tally in tallies for fault in tally.faults]
    return "\n".join(lines)


def soak(kills: int, processes: int, seed: int, folder: Path, only: str = "") -> list[Tally]:
    """Distribute the kills over all settings, several settings at a time, each in a forked process."""
    write_data(folder / "data")
    chosen = [setting for setting in SETTINGS if only in setting.name]
    # The settings with most ranks first: they take longest.
    waiting = sorted(enumerate(chosen), key=lambda item: -item[1].ranks)
    running: dict[int, int] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            number, setting = waiting.pop(0)
            share = (kills * (number + 1)) // len(chosen) - (kills * number) // len(chosen)
            child = os.fork()
            if not child:
                tally = kill_often(setting, share, folder / setting.slug, folder / "data", seed)
                (folder / f"{setting.slug}.json").write_text(json.dumps(asdict(tally)))
                os._exit(0)
            running[child] = number
        ended, _ = os.wait()
        number = running.pop(ended)
        print((folder / f"{chosen[number].slug}.json").read_text(), file=sys.stderr, flush=True)
    return [Tally(**json.loads((folder / f"{setting.slug}.json").read_text())) for setting in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills", type=int, default=1000, help="number of kills over all settings; default: 1000"
    )
    parser.add_argument("--processes", type=int, default=2, help="settings at a time; default: 2")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments; default: 0")
    parser.add_argument("--only", default="", help="part of the names of the settings to run; default: all")
    options = parser.parse_args()
    # One thread, before the first fork: threads do not survive it.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="facetrain-kills-") as folder:
        tallies = soak(options.kills, options.processes, options.seed, Path(folder), options.only)
    print(table(tallies))
    sys.exit(any(tally.faults for tally in tallies))


if __name__ == "__main__":
    main()
