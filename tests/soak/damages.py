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
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot  # noqa: F401 (imported before the fork, as the next two)
import onnx  # noqa: F401
import torch
import torch._dynamo

from facetrain.checkpoint.commit import complete_steps, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config, override_keys
from facetrain.doctor.run_checks import check_checkpoints
from facetrain.errors import FacetrainError
from facetrain.models.model_file import open_model
from facetrain.run import lock, training
from facetrain.run.list_runs import list_runs
from facetrain.run.report import write_run_report
from tests.soak.damage_kinds import CRAFTED, Damager
from tests.soak.kills import Starter
from tests.soak.settings import STEPS, Setting, write_data

_MAX_CPU_SECONDS, _MAX_SECONDS = 20, 120
"""Limits of a reader and of a resume. On a loaded machine only the time on the processor shows that a reader is slow;
one that waits without end is found by the clock."""
_MAX_RESUME_CPU_SECONDS = 60
_MAX_MEMORY = 6 << 30
"""Address space that a resume may add: an absurd size in a file must not end the machine."""
_RESUMED_EVERY, _REPORTED_EVERY = 20, 20
"""One of so many damaged runs is resumed, or described by a report, whose figures take a second."""
_KEPT_STEPS = 3
_REFUSED = 2
"""Exit code of facetrain for an error that it expects."""
_WAY_ON = re.compile(r"--checkpoint (\d+)")


_SILENCE_S = 1.0
"""Seconds for which a damaged lock is watched, instead of 30."""


class Hang(BaseException):
    """A reader took too long. Not an Exception: no handler of a reader may catch it."""


@dataclass
class Tally:
    """Counts of all damages."""

    by_kind: Counter[str] = field(default_factory=Counter)
    by_target: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    """Damages that at least one reader refused."""
    resumes: Counter[str] = field(default_factory=Counter)
    """Ends of the resumed runs."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Messages of the resumes that refused a run, without names and numbers."""
    faults: Counter[str] = field(default_factory=Counter)
    first_faults: list[str] = field(default_factory=list)

    def add(self, other: dict[str, Any]) -> None:
        """Add the counts of another tally, as a dict."""
        for name, value in other.items():
            if isinstance(value, dict):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def add_fault(self, name: str, details: str) -> None:
        """Count a fault, and keep the details of the first one of its name."""
        if name not in self.faults:
            self.first_faults.append(f"{name}\n{details}")
        self.faults[name] += 1


class Readers:
    """All readers of a run folder."""

    def __init__(self, original: Path) -> None:
        self._saved = {
            step: _digests(step_folder(original / "checkpoints", step))
            for step in complete_steps(original / "checkpoints")
        }

    def read(
        self, run: Path, *, is_crafted: bool, with_report: bool
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the name and the call of each reader."""
        yield "config", lambda: void(load_config(run / "config.yaml"))
        yield "newest checkpoint", lambda: self._load(run, is_crafted=is_crafted)
        yield "doctor", lambda: void(check_checkpoints(run))
        yield "runs", lambda: void(list_runs(run))
        yield "model", lambda: void(open_model(run, torch.device("cpu")))
        if with_report:
            yield "report", lambda: write_run_report(run, run.parent / "report.html")

    def _load(self, run: Path, *, is_crafted: bool) -> None:
        checkpoint = Checkpoint.open(run)
        checkpoint.verify()
        checkpoint.replicated()
        checkpoint.rank_state(0)
        checkpoint.rows("weight", 0, checkpoint.manifest.num_classes)
        if not is_crafted and _digests(checkpoint.folder) != self._saved.get(checkpoint.step):
            raise AssertionError(f"accepted a damaged checkpoint of step {checkpoint.step}")


def void(value: object) -> None:
    """Discard a result."""


def _digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.is_symlink() and path.suffix == ".safetensors"
    }


@contextmanager
def _limited() -> Iterator[None]:
    def hang(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, hang)
    signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_REAL, _MAX_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


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
                with _limited():
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


class Resumer:
    """Resumes damaged runs in forked processes, and compares their weights with those of the undisturbed run."""

    def __init__(self, run: Path, whole: Path) -> None:
        self._run, self._whole = run, _weights(whole)
        self._output = run.parent / "output"

    def resume(self, tally: Tally, name: str, *, is_crafted: bool, is_config: bool) -> None:
        """Resume the run, and again from the checkpoint that a refusal names."""
        code, text = self._start(None)
        end = self._judge(tally, f"resume: {name}", code, text, is_crafted=is_crafted, is_config=is_config)
        if code == _REFUSED:
            tally.refusals[self._reduced(text)] += 1
            if way_on := _WAY_ON.search(text):
                code, text = self._start(int(way_on[1]))
                again = self._judge(
                    tally, f"resume again: {name}", code, text, is_crafted=is_crafted, is_config=is_config
                )
                if code == _REFUSED:
                    tally.add_fault(f"resume: {name}: the named checkpoint is refused too", text[-1500:])
                end = f"{end}; from the checkpoint that the message names: {again}"
        tally.resumes[end] += 1

    def _judge(
        self, tally: Tally, name: str, code: int | None, text: str, *, is_crafted: bool, is_config: bool
    ) -> str:
        """Return the end of a resume in a few words; count a fault if it is none of the allowed ones."""
        if code == _REFUSED and "Traceback" not in text:
            lines = [line for line in text.splitlines() if line.startswith("error: ")]
            if len(lines) != 1 or text.splitlines()[-1] != lines[0]:
                tally.add_fault(f"{name}: message of several lines", text[-1500:])
            return "refused"
        if code != 0 or "Traceback" in text:
            tally.add_fault(f"{name}: {'hangs' if code is None else f'exit code {code}'}", text[-1500:])
            return "fault"
        try:
            is_equal = _weights(self._run) == self._whole
        except FacetrainError:
            is_equal = False
        if is_equal:
            return "continued to the weights of the undisturbed run"
        if is_config:
            return "continued with another config, which was reported"
        if is_crafted:
            return f"continued from a crafted checkpoint ({name.partition(': ')[2]})"
        tally.add_fault(f"{name}: other weights than the undisturbed run", text[-1500:])
        return "fault"

    def _start(self, step: int | None) -> tuple[int | None, str]:
        """Resume in a forked process; return its exit code, or None if it hangs, and what it printed."""
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            log = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + _MAX_MEMORY, resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_CPU, (_MAX_RESUME_CPU_SECONDS, resource.RLIM_INFINITY))
            # A damaged limit of the steps could let the run train for days.
            limit = [f"train.max_steps={STEPS}"]
            try:
                config = load_config(self._run / "config.yaml", limit)
                os._exit(training.resume(config, self._run, step, set_keys=override_keys(limit)))
            except FacetrainError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                os._exit(_REFUSED)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(99)
        code = _wait(child, _MAX_SECONDS)
        return code, self._output.read_text(errors="replace")

    def _reduced(self, text: str) -> str:
        """Return the last line of a message without names and numbers."""
        line = text.strip().splitlines()[-1].removeprefix("error: ").replace(str(self._run), "RUN")
        return re.sub(r"\d+", "N", re.sub(r"\S*/\S+/step_\d+", "STEP", line))[:150]


def _wait(child: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return None if code == -signal.SIGXCPU else code
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _weights(run: Path) -> dict[str, str]:
    return {
        entry.name: entry.sha256
        for entry in Checkpoint.open(run).manifest.files
        if entry.name.startswith(("rep", "rows"))
    }


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


def table(tally: Tally, seconds: float) -> str:
    """Format the counts as Markdown."""
    lines = [
        f"{sum(tally.by_kind.values()):,} damages in {seconds:,.0f} s; {tally.refused:,} refused by at least one "
        f"reader; {sum(tally.resumes.values()):,} resumed; {sum(tally.faults.values()):,} faults"
    ]
    for title, counts in (
        ("damage", tally.by_kind),
        ("target", tally.by_target),
        ("end of a resumed run", tally.resumes),
        ("message of a resume that refused", tally.refusals),
    ):
        lines += ["", f"| {title} | number |", "|---|---|"]
        lines += [f"| {name} | {n:,} |" for name, n in sorted(counts.items())]
    lines += [f"fault ({tally.faults[text.splitlines()[0]]} times): {text}" for text in tally.first_faults]
    return "\n".join(lines)


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
