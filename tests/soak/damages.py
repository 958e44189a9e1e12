"""Random damages of run folders: `python -m tests.soak.damages --damages 10000`.

Each damage changes a copy of a run that was killed halfway: a file or a folder of the run, by its role, is truncated,
flipped, extended, removed, swapped, replaced by a link, a loop, a folder or a pipe, or edited as another version of
facetrain would have written it, with new checksums where it has some. Then every reader of run folders reads the copy.
A reader may refuse it with an error of facetrain in one line; it may not raise anything else, change a file, hang, or
accept a checkpoint whose files differ from those that were saved.

Every twentieth copy is also resumed. The resume either refuses it in one line and with exit code 2, or continues to the
weights of the undisturbed run. If the refusal names another checkpoint, a second resume from that one must continue.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from facetrain.checkpoint.commit import complete_steps
from facetrain.errors import FacetrainError
from facetrain.run.folder import lease
from tests.soak.damage_kinds import CRAFTED, Damager
from tests.soak.damage_readers import Hang, Readers, limited
from tests.soak.damage_resumes import Resumer
from tests.soak.damage_tally import DAMAGE, TARGET, Tally, table
from tests.soak.settings import Setting, write_data
from tests.soak.starter import Starter, prepare_forks, remove_run

_RESUMED_EVERY, _REPORTED_EVERY = 20, 20
"""One of so many damaged runs is resumed, or described by a report, whose figures take a second."""
_KEPT_STEPS = 3
_SILENCE_S = 1.0
"""Seconds for which a damaged lock is watched, instead of 30."""


def damage_often(folder: Path, count: int, deadline: float, seed: int) -> Tally:
    """Damage copies of the run in `folder`/a, and read each with all readers; return the counts."""
    original, foreign, whole = folder / "a" / "half", folder / "b" / "half", folder / "a" / "whole"
    rng, tally, scratch = random.Random(seed), Tally(), folder / f"damaged_{seed}"
    scratch.mkdir()
    run, bystander = scratch / "run", scratch / "bystander"
    bystander.write_text('{"a file": "outside of the run"}\n')
    damager, readers, resumer = Damager(foreign, bystander, rng), Readers(original), Resumer(run, whole)
    outside = [_tree(original), _tree(foreign), bystander.read_bytes()]
    for number in range(count):
        if time.monotonic() > deadline:
            break
        remove_run(run)
        shutil.copytree(original, run, symlinks=True)
        kind, target = damager.damage(run)
        tally.counts[DAMAGE, kind] += 1
        tally.counts[TARGET, target] += 1
        name, is_crafted, before = f"{kind} {target}", kind in CRAFTED, _tree(run)
        calls = readers.calls(run, is_crafted=is_crafted, with_report=number % _REPORTED_EVERY == 10)
        # A list: every reader must see the damage.
        tally.refused += any(
            [_is_refused(tally, f"{reader}: {name}", call) for reader, call in calls.items()]
        )
        if _tree(run) != before:
            tally.add_fault(f"{name}: a reader changed the run folder", "")
        if number % _RESUMED_EVERY == _RESUMED_EVERY - 1:
            resumer.resume(tally, name, is_crafted=is_crafted, is_config=target == "config.yaml")
        if [_tree(original), _tree(foreign), bystander.read_bytes()] != outside:
            raise RuntimeError(f"{name}: a file outside of the run was changed")
    remove_run(run)
    return tally


def _is_refused(tally: Tally, name: str, call: Callable[[], object]) -> bool:
    """Call a reader; return whether it refuses its files. Count a fault if it does not end as it should."""
    try:
        with limited():
            call()
    except FacetrainError as error:
        if len(str(error).splitlines()) > 1:
            tally.add_fault(f"{name}: message of several lines", str(error))
        return True
    except (Exception, Hang) as error:
        tally.add_fault(f"{name}: {type(error).__name__}", traceback.format_exc()[-1500:])
    return False


def _tree(run: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, change time and mode of every file of a run."""
    found = {}
    for folder, names, files in os.walk(run):
        for name in (*names, *files):
            status = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (status.st_size, status.st_mtime_ns, status.st_mode)
    return found


def train_half(folder: Path, data: Path, seed: int) -> None:
    """Train a run to its end in `folder`/whole, and the same one in `folder`/half until it is killed halfway."""
    changes = {"head.sample_rate": 0.3, "seed": seed, "checkpoint.keep": _KEPT_STEPS}
    starter, half = (
        Starter(Setting("half", changes=changes), folder, data, random.Random(seed)),
        folder / "half",
    )
    starter.train_whole()
    starter.train(half, is_due=lambda: len(complete_steps(half / "checkpoints")) >= _KEPT_STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--damages", type=int, default=10_000, help="number of damages; default: 10,000")
    parser.add_argument("--seed", type=int, default=0, help="seed of the damages; default: 0")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="ends earlier after this time; default: 60"
    )
    parser.add_argument("--processes", type=int, default=2, help="number of processes; default: 2")
    options = parser.parse_args()
    prepare_forks()
    faulthandler.enable()  # a reader that ends the process is a fault, too, and must be named
    lease.RunLock = partial(lease.RunLock, silence_s=_SILENCE_S)  # type: ignore[assignment,misc]
    since, tally = time.monotonic(), Tally()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="facetrain-damages-", dir=memory) as name:
        folder, processes = Path(name), options.processes
        write_data(folder / "data")
        for number, part in enumerate("ab", 1):
            train_half(folder / part, folder / "data", number)
        damage = partial(damage_often, folder, -(-options.damages // processes), since + 60 * options.minutes)
        with ProcessPoolExecutor(processes, get_context("fork")) as pool:
            for part_of_all in pool.map(damage, range(options.seed * 1000, options.seed * 1000 + processes)):
                tally.add(part_of_all)
    print(table(tally, time.monotonic() - since))
    sys.exit(bool(tally.faults))


if __name__ == "__main__":
    main()
