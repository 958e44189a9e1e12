"""Every rank writes its shard; the checkpoint appears when all have.

`torch.distributed.checkpoint` keeps its table of contents as a pickle, which runs code when it is
read. Here tensors are safetensors files and all else is JSON.
"""

from __future__ import annotations

import enum
import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from facetrain.checkpoint import commit
from facetrain.checkpoint.manifest import NAME, FileEntry, Manifest, sha256_of
from facetrain.checkpoint.retention import remove_checkpoint, steps_to_remove
from facetrain.distributed import collectives


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step, as one rank holds it."""

    step: int
    replicated: dict[str, Tensor]
    """The same on all ranks; the leader writes it."""
    rows: dict[str, Tensor]
    """Tables of this rank's classes, row i of class `shard[0]` + i."""
    shard: tuple[int, int]
    num_classes: int
    rank_state: dict[str, Tensor]
    """What each rank has of its own: random states."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Everything else, as JSON."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest verification, for keeping the best."""


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
    ranks have written, and gives up when one could not. All methods are collective.
    """

    def __init__(
        self, folder: Path, *, keep: int = 3, asynchronous: bool = True, best_metric: str | None = None
    ) -> None:
        self._folder, self._keep, self._best_metric = folder, keep, best_metric
        self._asynchronous = asynchronous
        self._stage = _Stage.IDLE
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None
        self._files: list[FileEntry] = []
        self._reason = ""

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun that is neither committed nor given up; the same on every rank."""
        return self._stage != _Stage.IDLE

    def save(self, snapshot: Snapshot) -> Saved | SaveFailed | None:
        """Begin to save, after the save before has ended; return what became of the latter, if there was one.

        Without `asynchronous` the save is finished on return, and its own outcome is returned.
        """
        before = self.finish() if self.in_flight else None
        self._stage, self._snapshot, self._reason, self._files = _Stage.WRITING, snapshot, "", []
        if collectives.rank() == 0:
            self._prepare(snapshot.step)
        collectives.barrier()
        if not self._asynchronous:
            self._write(snapshot)
            return self._settle()
        self._snapshot = _on_host(snapshot, leader=collectives.rank() == 0)
        self._thread = threading.Thread(
            target=self._write, args=(self._snapshot,), name="checkpoint", daemon=True
        )
        self._thread.start()
        return before

    def poll(self) -> Saved | SaveFailed | None:
        """End a save that all ranks have written or one has failed at; return None where there is nothing to end."""
        if not self.in_flight or collectives.any_rank(self._stage == _Stage.WRITING):
            return None
        return self._settle()

    def finish(self) -> Saved | SaveFailed | None:
        """Wait for the save in flight, and end it."""
        if self._thread is not None:
            self._thread.join()
        return self._settle() if self.in_flight else None

    def _prepare(self, step: int) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch = commit.scratch_folder(self._folder, step)
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
        except OSError as error:
            self._fail(error)

    def _write(self, snapshot: Snapshot) -> None:
        if self._stage == _Stage.FAILED:
            return
        scratch = commit.scratch_folder(self._folder, snapshot.step)
        rank, world_size = collectives.rank(), collectives.world_size()
        start, stop = snapshot.shard
        try:
            files = [
                _write_tensors(
                    scratch / f"rows_{rank:05d}_of_{world_size:05d}.safetensors", snapshot.rows, start, stop
                )
            ]
            files.append(_write_tensors(scratch / f"rank_{rank:05d}.safetensors", snapshot.rank_state))
            if rank == 0:
                files.append(_write_tensors(scratch / "replicated.safetensors", snapshot.replicated))
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._fail(error)
            return
        self._files, self._stage = files, _Stage.WRITTEN

    def _fail(self, error: Exception) -> None:
        where = getattr(error, "filename", None) or self._folder
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        self._reason = f"rank {collectives.rank()}: {where}: {reason}"
        self._stage = _Stage.FAILED

    def _settle(self) -> Saved | SaveFailed:
        assert self._snapshot is not None
        snapshot = self._snapshot
        reports = collectives.gather_json([self._reason, [vars(entry) for entry in self._files]])
        reasons = [reason for reason, _ in reports if reason]
        reason = reasons[0] if reasons else None
        if collectives.rank() == 0:
            files = tuple(FileEntry(**entry) for _, entries in reports for entry in entries)
            reason = self._give_up(snapshot.step, reason) if reason else self._commit(snapshot, files)
        reason = collectives.broadcast_json(reason)
        self._stage, self._snapshot, self._thread = _Stage.IDLE, None, None
        if reason:
            return SaveFailed(snapshot.step, reason)
        return Saved(snapshot.step, commit.step_folder(self._folder, snapshot.step))

    def _give_up(self, step: int, reason: str) -> str:
        shutil.rmtree(commit.scratch_folder(self._folder, step), ignore_errors=True)
        return reason

    def _commit(self, snapshot: Snapshot, files: tuple[FileEntry, ...]) -> str | None:
        manifest = Manifest(
            step=snapshot.step,
            world_size=collectives.world_size(),
            num_classes=snapshot.num_classes,
            files=files,
            meta=snapshot.meta,
            metrics=snapshot.metrics,
        )
        try:
            commit.write_whole(commit.scratch_folder(self._folder, snapshot.step) / NAME, manifest.dump())
            commit.publish(self._folder, snapshot.step)
        except OSError as error:
            return self._give_up(
                snapshot.step, f"{error.filename or self._folder}: {error.strerror or error}"
            )
        for step in steps_to_remove(self._folder, keep=self._keep, best_metric=self._best_metric):
            try:
                remove_checkpoint(self._folder, step)
            except OSError:
                break  # it is tried again after the next save
        return None


def _on_host(snapshot: Snapshot, *, leader: bool) -> Snapshot:
    def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(
                tensor, non_blocking=True
            )
            for name, tensor in tensors.items()
        }

    copy = Snapshot(
        step=snapshot.step,
        replicated=copied(snapshot.replicated) if leader else {},
        rows=copied(snapshot.rows),
        shard=snapshot.shard,
        num_classes=snapshot.num_classes,
        rank_state=copied(snapshot.rank_state),
        meta=snapshot.meta,
        metrics=snapshot.metrics,
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copy


def _write_tensors(
    path: Path, tensors: dict[str, Tensor], start: int | None = None, stop: int | None = None
) -> FileEntry:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    commit.sync_to_disk(path)
    return FileEntry(path.name, os.path.getsize(path), sha256_of(path), start, stop)
