"""Random damages of run folders: `python -m tests.soak.damages --damages 10000`.

Each damage changes a copy of a run that was killed halfway: a file or a folder of the run, by its role, is truncated,
flipped, extended, removed, swapped, replaced by a link, a loop, a folder or a pipe, or edited as another version of
facetrain would have written it. Then every reader of run folders reads the copy. A reader may refuse it with an error
of facetrain in one line; it may not raise anything else, change a file, take more than a minute, or accept a
checkpoint whose files differ from those that were saved. Some copies are also resumed to their end: a run that
continues must have the weights of the undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
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
from pathlib import Path
from typing import Any

import torch

from facetrain.checkpoint import manifest as manifests
from facetrain.checkpoint.commit import complete_steps, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.doctor.run_checks import check_checkpoints
from facetrain.errors import FacetrainError
from facetrain.models.model_file import open_model
from facetrain.run import training
from facetrain.run.list_runs import list_runs
from facetrain.run.report import write_run_report
from tests.soak.kills import Starter
from tests.soak.settings import Setting, write_data

_MAX_SECONDS = 60
_RESUMED_EVERY, _REPORTED_EVERY = 100, 20
"""One of so many damaged runs is resumed, or described by a report, whose figures take a second."""
_KEPT_STEPS = 3
_JUNK = [
    b"\0" * 64,
    b"\xff" * 64,
    b"[" * 5000,
    b'{"a":' * 5000,
    b"NaN\n",
    b"&a [*a, *a]\n",
    b"!!python/name:os.system\n",
]
_CRAFTED = ("edit", "foreign", "rename")
"""Damages whose checkpoints are complete: checksums cannot tell them from saved ones."""


class Hang(BaseException):
    """A reader took too long. Not an Exception: no handler of a reader may catch it."""


@dataclass
class Tally:
    """Counts of all damages."""

    by_kind: Counter[str] = field(default_factory=Counter)
    by_target: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    """Damages that at least one reader refused."""
    resumed: int = 0
    continued: int = 0
    """Resumed runs that reached the end with the weights of the undisturbed run."""
    foreign_accepted: Counter[str] = field(default_factory=Counter)
    """Complete checkpoints of another run or another step that a resume accepted."""
    faults: Counter[str] = field(default_factory=Counter)
    first_faults: list[str] = field(default_factory=list)

    def add(self, other: dict[str, Any]) -> None:
        """Add the counts of another tally, as a dict."""
        for name, value in other.items():
            if isinstance(value, dict):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)


class Damager:
    """Damages copies of a run."""

    def __init__(self, original: Path, foreign: Path, rng: random.Random) -> None:
        self._original, self._other, self._rng = original, foreign, rng

    def damage(self, run: Path) -> tuple[str, str]:
        """Apply one damage; return its kind and the role of its target."""
        rng = self._rng
        files = sorted(path for path in run.rglob("*") if path.is_file())
        folders = [
            run / "checkpoints",
            *(step_folder(run / "checkpoints", s) for s in complete_steps(run / "checkpoints")),
        ]
        kind = rng.choice([
            "truncate", "flip", "flip", "append", "junk", "zeros", "delete", "swap", "link", "loop", "folder", "pipe",
            "edit", "edit", "edit", "foreign", "rename", "delete folder", "link folder", "file for folder",
        ])  # fmt: skip
        # By role: the many lines of the log would otherwise be damaged rarely, and the shards most of the time.
        roles: dict[str, list[Path]] = {}
        for path in files:
            roles.setdefault(_role(path), []).append(path)
        target = rng.choice(roles[rng.choice(sorted(roles))])
        if kind in ("delete folder", "link folder", "file for folder"):
            target = rng.choice(folders)
        elif kind == "edit":
            editable = [p for p in files if p.suffix in (".json", ".jsonl", ".yaml") or p.name == "latest"]
            target = rng.choice(editable)
        elif kind in ("foreign", "rename"):
            target = folders[-1]
        role = _role(target)
        getattr(self, "_" + kind.replace(" ", "_"))(target, files)
        return kind, role

    def _truncate(self, path: Path, files: list[Path]) -> None:
        os.truncate(path, self._rng.randrange(path.stat().st_size + 1))

    def _flip(self, path: Path, files: list[Path]) -> None:
        data = bytearray(path.read_bytes())
        for _ in range(self._rng.choice([1, 1, 8])):
            if data:
                data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        path.write_bytes(data)

    def _append(self, path: Path, files: list[Path]) -> None:
        with path.open("ab") as file:
            file.write(self._rng.choice([*_JUNK, self._rng.randbytes(100), path.read_bytes()]))

    def _junk(self, path: Path, files: list[Path]) -> None:
        path.write_bytes(self._rng.choice([b"", *_JUNK, self._rng.randbytes(1000)]))

    def _zeros(self, path: Path, files: list[Path]) -> None:
        data = bytearray(path.read_bytes())
        start = self._rng.randrange(len(data) + 1)
        data[start : start + 512] = bytes(len(data[start : start + 512]))
        path.write_bytes(data)

    def _delete(self, path: Path, files: list[Path]) -> None:
        path.unlink()

    def _swap(self, path: Path, files: list[Path]) -> None:
        other = self._rng.choice(files)
        mine, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(mine)

    def _link(self, path: Path, files: list[Path]) -> None:
        path.unlink()
        path.symlink_to(
            self._rng.choice(
                ["/etc/passwd", "/dev/zero", "nowhere", str(self._original), "..", files[0].name]
            )
        )

    def _loop(self, path: Path, files: list[Path]) -> None:
        path.unlink()
        path.symlink_to(path.name)

    def _folder(self, path: Path, files: list[Path]) -> None:
        path.unlink()
        path.mkdir()

    def _pipe(self, path: Path, files: list[Path]) -> None:
        path.unlink()
        os.mkfifo(path)

    def _foreign(self, path: Path, files: list[Path]) -> None:
        steps = complete_steps(self._other / "checkpoints")
        source = step_folder(self._other / "checkpoints", self._rng.choice(steps))
        target = path.parent / source.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)

    def _rename(self, path: Path, files: list[Path]) -> None:
        path.rename(step_folder(path.parent, self._rng.choice([1, 17, 23, 10**12])))

    def _delete_folder(self, path: Path, files: list[Path]) -> None:
        shutil.rmtree(path)

    def _link_folder(self, path: Path, files: list[Path]) -> None:
        shutil.rmtree(path)
        path.symlink_to(self._rng.choice([path.name, ".", "/", str(self._original)]))

    def _file_for_folder(self, path: Path, files: list[Path]) -> None:
        shutil.rmtree(path)
        path.write_bytes(b"file")

    def _edit(self, path: Path, files: list[Path]) -> None:
        """Change a value, as another version or a person would; a manifest gets the right checksum again."""
        rng, text = self._rng, path.read_text(errors="replace")
        values = [None, -1, 0, 1, 2**63, 1e308, "x", "../x", [], {}, True, [[]] * 50, float("nan")]
        if path.name == manifests.MANIFEST:
            body = json.loads(text)
            version = body.pop("format"), body.pop("sha256")
            place = body
            while isinstance(place, dict) and place and rng.random() < 0.6:
                key = rng.choice(sorted(place))
                if not isinstance(place[key], dict) or not place[key]:
                    break
                place = place[key]
            if isinstance(place, dict) and place:
                place[rng.choice(sorted(place))] = rng.choice(values)
            number = rng.choice([version[0], version[0], 0, 2, 99, "1", None])
            path.write_text(json.dumps({"format": number, "sha256": manifests.checksum(body)} | body))
        elif path.name == "latest":
            path.write_text(
                rng.choice(
                    ["step_00000004", "step_99999999", "../../x", "/etc/passwd", "", "step_00000004\n\n"]
                )
            )
        else:
            lines = text.splitlines() or [""]
            number = rng.randrange(len(lines))
            key, colon, _ = lines[number].partition(":")
            if path.suffix == ".yaml" and colon:
                lines[number] = f"{key}: {json.dumps(rng.choice(values))}"
            else:
                lines[number] = rng.choice(
                    ["", "{}", "[]", "null", '{"step": "x"}', '{"step": -1, "loss": []}', "[" * 2000]
                )
            path.write_text("\n".join(lines) + "\n")


def _role(path: Path) -> str:
    """Return the name of a file or folder without its numbers."""
    return "".join(c for c in path.name if not c.isdigit())


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
        if with_report:
            yield "model", lambda: void(open_model(run, torch.device("cpu")))
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
def _limited(seconds: float) -> Iterator[None]:
    def hang(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def damage_often(
    original: Path, foreign: Path, whole: Path, folder: Path, count: int, seed: int, deadline: float
) -> Tally:
    """Damage copies of `original`, and read each with all readers."""
    rng, tally = random.Random(seed), Tally()
    damager, readers = Damager(original, foreign, rng), Readers(original)
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / "run"
    for number in range(count):
        if time.monotonic() > deadline:
            break
        _remove(run)
        shutil.copytree(original, run, symlinks=True)
        done = [damager.damage(run)]
        for kind, target in done:
            tally.by_kind[kind] += 1
            tally.by_target[target] += 1
        name = " and ".join(f"{kind} {target}" for kind, target in done)
        before, refused = _tree(run), False
        is_crafted = any(kind in _CRAFTED for kind, _ in done)
        with_report = number % _REPORTED_EVERY == 0
        for reader, read in readers.read(run, is_crafted=is_crafted, with_report=with_report):
            try:
                with _limited(_MAX_SECONDS):
                    read()
            except FacetrainError as error:
                refused = True
                if len(str(error).splitlines()) > 1:
                    _add_fault(tally, f"{reader}: {name}: message of several lines", str(error))
            except (Exception, Hang) as error:
                _add_fault(tally, f"{reader}: {name}: {type(error).__name__}", traceback.format_exc()[-1500:])
        if _tree(run) != before:
            _add_fault(tally, f"{name}: a reader changed the run folder", "")
        tally.refused += refused
        if number % _RESUMED_EVERY == _RESUMED_EVERY - 1:
            _resume(tally, run, whole, name, done)
    _remove(run)
    return tally


def _add_fault(tally: Tally, name: str, details: str) -> None:
    if name not in tally.faults:
        tally.first_faults.append(f"{name}\n{details}")
    tally.faults[name] += 1


def _resume(tally: Tally, run: Path, whole: Path, name: str, done: list[tuple[str, str]]) -> None:
    """Resume a damaged run in a forked process, and compare its weights with those of the undisturbed run."""
    output = run.parent / "output"
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            os._exit(training.resume(load_config(run / "config.yaml"), run))
        except FacetrainError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(2)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(99)
    tally.resumed += 1
    code = _wait(child, 120)
    text = output.read_text(errors="replace")
    if code is None or code == 99 or "Traceback" in text:
        _add_fault(tally, f"resume: {name}: {'hangs' if code is None else 'traceback'}", text[-1500:])
    elif code == 0 and not any(target == "config.yaml" for _, target in done):
        try:
            is_equal = _weights(run) == _weights(whole)
        except FacetrainError:
            is_equal = False
        if is_equal:
            tally.continued += 1
        elif any(kind in _CRAFTED for kind, _ in done):
            tally.foreign_accepted[name] += 1
        else:
            _add_fault(tally, f"resume: {name}: other weights than the undisturbed run", text[-1500:])


def _wait(child: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
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
        f"reader, {sum(tally.faults.values()):,} faults; {tally.resumed:,} resumed, {tally.continued:,} of them "
        "continued to the weights of the undisturbed run"
    ]
    for title, counts in (
        ("damage", tally.by_kind),
        ("target", tally.by_target),
        ("accepted by resume", tally.foreign_accepted),
    ):
        lines += [
            "",
            f"| {title} | number |",
            "|---|---|",
            *(f"| {name} | {n:,} |" for name, n in sorted(counts.items())),
        ]
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
            tally = damage_often(
                original, foreign, whole, folder / f"damaged_{number}", count, seed, deadline
            )
            (folder / f"{number}.json").write_text(json.dumps(vars(tally)))
            os._exit(0)
        children.append(child)
    total = Tally()
    for number, child in enumerate(children):
        os.waitpid(child, 0)
        total.add(json.loads((folder / f"{number}.json").read_text()))
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
