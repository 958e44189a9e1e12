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
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import matplotlib.pyplot  # noqa: F401 (imported before the fork, as the next two)
import onnx  # noqa: F401
import torch
import torch._dynamo

from facetrain.checkpoint.commit import complete_steps
from facetrain.errors import FacetrainError
from facetrain.run.folder import lock
from tests.soak.damage_kinds import CRAFTED, Damager
from tests.soak.damage_readers import Hang, Readers, limited
from tests.soak.damage_resumes import Resumer
from tests.soak.damage_tally import Tally, table
from tests.soak.kills import Starter
from tests.soak.settings import Setting, write_data

_RESUMED_EVERY, _REPORTED_EVERY = 20, 20
"""One of so many damaged runs is resumed, or described by a report, whose figures take a second."""
_KEPT_STEPS = 3
_SILENCE_S = 1.0
"""Seconds for which a damaged lock is watched, instead of 30."""


def damage_often(
    original: Path, foreign: Path, whole: Path, folder: Path, count: int, seed: int, deadline: float
) -> Iterator[Tally]:
    """Damage copies of `original`, and read each with all readers; yield the counts after each."""
    rng, tally = random.Random(seed), Tally()
    folder.mkdir(parents=True, exist_ok=True)
    run, bystander = folder / "run", folder / "bystander"
    bystander.write_text('{"a file": "outside of the run"}\n')
    damager, readers, resumer = Damager(foreign, bystander, rng), Readers(original), Resumer(run, whole)
    outside = [_tree(original), _tree(foreign), bystander.read_bytes()]
    for number in range(count):
        if time.monotonic() > deadline:
            break
        _remove(run)
        shutil.copytree(original, run, symlinks=True)
        kind, target = damager.damage(run)
        tally.by_kind[kind] += 1
        tally.by_target[target] += 1
        name, is_crafted = f"{kind} {target}", kind in CRAFTED
        before, refused = _tree(run), False
        with_report = number % _REPORTED_EVERY == 10
        for reader, read in readers.read(run, is_crafted=is_crafted, with_report=with_report):
            try:
                with limited():
                    read()
            except FacetrainError as error:
                refused = True
                if len(str(error).splitlines()) > 1:
                    tally.add_fault(f"{reader}: {name}: message of several lines", str(error))
            except (Exception, Hang) as error:
                details = traceback.format_exc()[-1500:]
                tally.add_fault(f"{reader}: {name}: {type(error).__name__}", details)
        if _tree(run) != before:
            tally.add_fault(f"{name}: a reader changed the run folder", "")
        tally.refused += refused
        if number % _RESUMED_EVERY == _RESUMED_EVERY - 1:
            resumer.resume(tally, name, is_crafted=is_crafted, is_config=target == "config.yaml")
        if [_tree(original), _tree(foreign), bystander.read_bytes()] != outside:
            raise RuntimeError(f"{name}: a file outside of the run was changed")
        yield tally
    _remove(run)


def _tree(run: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, change time and mode of every file of a run."""
    found = {}
    for folder, names, files in os.walk(run):
        for name in (*names, *files):
            status = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (status.st_size, status.st_mtime_ns, status.st_mode)
    return found


def _remove(run: Path) -> None:
    if run.is_symlink():
        run.unlink()
    shutil.rmtree(run, ignore_errors=True)


def train_half(folder: Path, data: Path, seed: int) -> tuple[Path, Path]:
    """Train a run until it was killed halfway, and the same one to its end; return both folders in this order."""
    setting = Setting(
        f"seed {seed}", changes={"head.sample_rate": 0.3, "seed": seed, "checkpoint.keep": _KEPT_STEPS}
    )
    starter = Starter(setting, folder, data, random.Random(seed))
    starter.train_whole()
    half = folder / "half"
    starter.kill_when(half, lambda: len(complete_steps(half / "checkpoints")) >= _KEPT_STEPS)
    return half, starter.whole


def _distribute(
    options: argparse.Namespace, original: Path, foreign: Path, whole: Path, folder: Path
) -> Tally:
    """Share the damages among forked processes; return the sum of their counts."""
    children, deadline = [], time.monotonic() + 60 * options.minutes
    for number in range(options.processes):
        child = os.fork()
        if not child:
            count = options.damages // options.processes + (number < options.damages % options.processes)
            seed = options.seed * 1000 + number
            try:
                for tally in damage_often(
                    original, foreign, whole, folder / f"damaged_{number}", count, seed, deadline
                ):
                    (folder / f"{number}.json").write_text(json.dumps(vars(tally)))
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    total = Tally()
    for number, child in enumerate(children):
        _, status = os.waitpid(child, 0)
        total.add(json.loads((folder / f"{number}.json").read_text()))
        if status:
            total.add_fault("the fuzzer ended early", f"process {number}, status {status}")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--damages", type=int, default=10_000, help="number of damages; default: 10,000")
    parser.add_argument("--seed", type=int, default=0, help="seed of the damages; default: 0")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="ends earlier after this time; default: 60"
    )
    parser.add_argument("--processes", type=int, default=2, help="number of processes; default: 2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lock.RunLock = partial(lock.RunLock, silence_s=_SILENCE_S)  # type: ignore[assignment,misc]
    os.environ["OMP_NUM_THREADS"] = "1"
    since = time.monotonic()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="facetrain-damages-", dir=memory) as name:
        folder = Path(name)
        write_data(folder / "data")
        original, whole = train_half(folder / "a", folder / "data", 1)
        foreign, _ = train_half(folder / "b", folder / "data", 2)
        tally = _distribute(options, original, foreign, whole, folder)
    print(table(tally, time.monotonic() - since))
    sys.exit(bool(tally.faults))


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
