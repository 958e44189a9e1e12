"""Readers of damaged run folders, each with a limit of its time."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from facetrain.checkpoint.commit import complete_steps, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.models.embedding_model import open_model
from facetrain.run.report.list_runs import list_runs
from facetrain.run.report.page import write_run_report

MAX_SECONDS = 120
"""Seconds that a reader or a resume may take, by the clock: it finds one that waits without end."""
_MAX_CPU_SECONDS = 20
"""Seconds that a reader may take on the processor: on a loaded machine only these show that it is slow."""


class Hang(BaseException):
    """A reader took too long. Not an Exception: no handler of a reader may catch it."""


@contextmanager
def limited() -> Iterator[None]:
    """End the context by `Hang` if it takes too long."""

    def hang(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, hang)
    signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


class Readers:
    """All readers of a run folder."""

    def __init__(self, original: Path) -> None:
        self._saved = {
            step: _digests(step_folder(original / "checkpoints", step))
            for step in complete_steps(original / "checkpoints")
        }

    def calls(self, run: Path, *, is_crafted: bool, with_report: bool) -> dict[str, Callable[[], object]]:
        """Return the call of each reader by its name."""
        report = {"report": lambda: write_run_report(run, run.parent / "report.html")}
        return {
            "config": lambda: load_config(run / "config.yaml"),
            "newest checkpoint": lambda: self._load(run, is_crafted=is_crafted),
            "runs": lambda: list_runs(run),
            "model": lambda: open_model(run, torch.device("cpu")),
        } | (report if with_report else {})

    def _load(self, run: Path, *, is_crafted: bool) -> None:
        checkpoint = Checkpoint.open(run)
        checkpoint.verify()
        checkpoint.replicated()
        checkpoint.rank_state(0)
        checkpoint.rows("weight", 0, checkpoint.manifest.num_classes)
        if not is_crafted and _digests(checkpoint.folder) != self._saved.get(checkpoint.step):
            raise AssertionError(f"accepted a damaged checkpoint of step {checkpoint.step}")


def _digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.is_symlink() and path.suffix == ".safetensors"
    }
