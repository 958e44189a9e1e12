"""Every rank writes its shard; the checkpoint appears when all have.

`torch.distributed.checkpoint` keeps its table of contents as a pickle, which runs code when it is
read. Here tensors are safetensors files and all else is JSON.
"""

from __future__ import annotations

import enum
import math
import shutil
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from facetrain.checkpoint import commit
from facetrain.checkpoint.commit import complete_steps, step_folder, take_away
from facetrain.checkpoint.manifest import NAME, FileEntry, Manifest, read_manifest
from facetrain.checkpoint.snapshot import HostCopy, Snapshot
from facetrain.checkpoint.tensor_file import write_tensors
from facetrain.distributed import collectives
from facetrain.errors import CheckpointError
from facetrain.files import write_atomically
from facetrain.telemetry.log import warn


@dataclass(frozen=True)
class Saved:
    """A checkpoint stands."""

    step: int
    folder: Path


@dataclass(frozen=True)
class SaveFailed:
    """A checkpoint could not be written; the older ones are as they were."""

    step: int
    reason: str


class _Stage(enum.IntEnum):
    IDLE, WRITING, WRITTEN, FAILED = range(4)


class CheckpointWriter:
    """Write checkpoints, in the background where asked.

    `save` copies the state to host memory, starts the writing and returns. `poll` commits when all
    ranks have written, and gives up when one could not. All methods are collective; the thread that
    writes is silent, because its words could meet those of the training on the way.
    """

    def __init__(
        self, folder: Path, *, keep: int = 3, asynchronous: bool = True, best_metric: str | None = None
    ) -> None:
        self._folder, self._keep, self._best_metric = folder, keep, best_metric
        self._asynchronous = asynchronous
        self._host_copy = HostCopy()
        self.is_prepared = not asynchronous
        """Whether memory for saves is there or on its way; the same on every rank."""
        self._stage = _Stage.IDLE
        self._thread: threading.Thread | None = None
        self._removal: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._scratch = folder
        self._files: list[FileEntry] = []
        self._reason = ""

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun that is neither committed nor given up; the same on every rank."""
        return self._stage != _Stage.IDLE

    def prepare(self, snapshot: Snapshot) -> None:
        """Have the memory for saves of such a snapshot fetched beside the training, so that the first need not."""
        self.is_prepared = True
        if snapshot.copy_rows:
            self._host_copy.prepare(snapshot, leader=collectives.rank() == 0)

    def save(self, snapshot: Snapshot) -> Saved | SaveFailed | None:
        """Begin to save, after the save before has ended; return what became of the latter, if there was one.

        Without `asynchronous` the save is finished on return, and its own outcome is returned. What
        memory has no room for a copy of is written before it returns in either case.
        """
        before, self.is_prepared = self.finish(), True
        self._stage, self._snapshot, self._reason, self._files = _Stage.WRITING, snapshot, "", []
        self._open_scratch(snapshot.step)
        if self._stage == _Stage.FAILED:
            return before if self._asynchronous else self.finish()
        if not self._asynchronous:
            self._write(snapshot)
            return self.finish()
        if not snapshot.copy_rows:
            self._write(snapshot)
            return before
        try:
            self._snapshot = self._host_copy.take(snapshot, leader=collectives.rank() == 0)
        except RuntimeError as error:  # torch's own, of the host's memory or of page-locked memory
            warn(f"{self._told(error)}; training waits until the checkpoint is written without a copy")
            self._host_copy = HostCopy()
            self._write(snapshot)
            return before
        self._thread = threading.Thread(
            target=self._write, args=(self._snapshot,), name="checkpoint", daemon=True
        )
        self._thread.start()
        return before

    def poll(self) -> Saved | SaveFailed | None:
        """End a save that all ranks have written or one has failed at; None if there is no such."""
        if not self.in_flight or collectives.any_rank(self._stage == _Stage.WRITING):
            return None
        return self._settle()

    def finish(self) -> Saved | SaveFailed | None:
        """Wait for the save in flight, and end it."""
        if self._thread is not None:
            self._thread.join()
        outcome = self._settle() if self.in_flight else None
        if self._removal is not None:
            self._removal.join()
            self._removal = None
        return outcome

    def _open_scratch(self, step: int) -> None:
        """Make a folder for all ranks, of a new name: a rank that was lost may still be writing."""
        said = ["", ""]
        if collectives.rank() == 0:
            try:
                said[0] = commit.make_scratch(self._folder, step).name
            except OSError as error:
                said[1] = self._told(error)
        name, self._reason = collectives.broadcast_json(said)
        self._scratch = self._folder / name
        if self._reason:
            self._stage = _Stage.FAILED

    def _write(self, snapshot: Snapshot) -> None:
        rank, world_size = collectives.rank(), collectives.world_size()
        start, stop = snapshot.shard
        try:
            files = [
                self._file(f"rows_{rank:05d}_of_{world_size:05d}", snapshot.rows, start, stop),
                self._file(f"rank_{rank:05d}", snapshot.rank_state),
            ]
            if rank == 0:
                files.append(self._file("replicated", snapshot.replicated))
        except Exception as error:  # whatever it is, training goes on
            self._reason = self._told(error)
            self._stage = _Stage.FAILED
            return
        self._files, self._stage = files, _Stage.WRITTEN

    def _file(
        self, stem: str, tensors: dict[str, Tensor], start: int | None = None, stop: int | None = None
    ) -> FileEntry:
        name = f"{stem}.safetensors"
        size, sha256 = write_tensors(self._scratch / name, tensors)
        return FileEntry(name, size, sha256, start, stop)

    def _told(self, error: Exception) -> str:
        where = getattr(error, "filename", None) or self._folder
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, FileNotFoundError) and collectives.rank() > 0:
            reason += "; all machines of a run need one folder that they share"
        return f"rank {collectives.rank()}: {where}: {reason}"

    def _settle(self) -> Saved | SaveFailed:
        assert self._snapshot is not None
        snapshot = self._snapshot
        reports = collectives.gather_json([self._reason, [asdict(entry) for entry in self._files]])
        reason = next((reason for reason, _ in reports if reason), "")
        if collectives.rank() == 0:
            files = tuple(FileEntry(**entry) for _, entries in reports for entry in entries)
            reason = reason or self._commit(snapshot, files)
            if reason and self._scratch != self._folder:
                shutil.rmtree(self._scratch, ignore_errors=True)
        reason = collectives.broadcast_json(reason)
        self._stage, self._snapshot, self._thread = _Stage.IDLE, None, None
        if reason:
            return SaveFailed(snapshot.step, reason)
        return Saved(snapshot.step, commit.step_folder(self._folder, snapshot.step))

    def _commit(self, snapshot: Snapshot, files: tuple[FileEntry, ...]) -> str:
        """Make the checkpoint appear; return why it failed, if so."""
        manifest = Manifest(
            step=snapshot.step,
            world_size=collectives.world_size(),
            num_classes=snapshot.num_classes,
            files=files,
            meta=snapshot.meta,
            metrics=snapshot.metrics,
        )
        try:
            write_atomically(self._scratch / NAME, manifest.dump())
            commit.publish(self._scratch, commit.step_folder(self._folder, snapshot.step))
        except OSError as error:
            return self._told(error)
        # To give back many gigabytes takes a file system seconds: training does not wait for that.
        self._removal = threading.Thread(
            target=self._remove_surplus, args=(snapshot.step,), name="retention", daemon=True
        )
        self._removal.start()
        return ""

    def _remove_surplus(self, saved: int) -> None:
        commit.remove_replaced(commit.step_folder(self._folder, saved))
        with suppress(OSError):  # it is tried again after the next save
            for step in steps_to_remove(self._folder, keep=self._keep, best_metric=self._best_metric):
                remove_checkpoint(self._folder, step)


def steps_to_remove(folder: Path, *, keep: int, best_metric: str | None) -> list[int]:
    """Return the steps beyond the last `keep` (1 or more), but for the best by a metric."""
    steps = complete_steps(folder)
    old = steps[:-keep]
    best = _best(folder, steps, best_metric) if best_metric else None
    return [step for step in old if step != best]


def remove_checkpoint(folder: Path, step: int) -> None:
    """Remove the checkpoint of a step."""
    take_away(step_folder(folder, step))


def _best(folder: Path, steps: list[int], metric: str) -> int | None:
    values: dict[int, float] = {}
    for step in steps:
        try:
            value = read_manifest(step_folder(folder, step)).metrics[metric]
        except (CheckpointError, KeyError):
            continue
        if math.isfinite(value):
            values[step] = value
    # Of equals the newest: it has seen more.
    return max(values, key=lambda step: (values[step], step), default=None)
