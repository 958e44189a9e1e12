"""Writer of checkpoints: every rank writes its shard, and the leader commits when all ranks have written.

`torch.distributed.checkpoint` stores its table of contents as a pickle, which can run code when it is
loaded. Here tensors are safetensors files and everything else is JSON.
"""

from __future__ import annotations

import errno
import shutil
import socket
import threading
from collections.abc import Callable, Set
from dataclasses import asdict, dataclass
from pathlib import Path

from facetrain.checkpoint import commit
from facetrain.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from facetrain.checkpoint.snapshot import HostCopy, Snapshot, TensorFile
from facetrain.checkpoint.tensor_file import write_tensors
from facetrain.distributed import collectives
from facetrain.distributed.process_lifetime import own_local_rank
from facetrain.files import error_reason, write_atomically
from facetrain.telemetry.log import warn
from facetrain.telemetry.memory import available_bytes
from facetrain.text import count_text

_GIB = 1 << 30


@dataclass(frozen=True)
class SaveOutcome:
    """Outcome of a save."""

    step: int
    failure: str = ""
    """Why the checkpoint was not written, in which case the older ones are unchanged. Empty: it is complete."""
    files: tuple[FileEntry, ...] = ()
    """Files that this rank has written."""
    manifest: Manifest | None = None
    """Manifest of a complete checkpoint; only the leader has it."""


class CheckpointWriter:
    """Writer of a run's checkpoints, in a background thread by default.

    `save` copies the state to host memory, starts the thread and returns. `poll` commits the checkpoint
    when all ranks have written, and abandons it when one rank failed.

    All methods are collective: every rank must call them at the same step. The thread calls no
    collectives, because they could interleave with the collectives of training, differently on each rank.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        asynchronous: bool = True,
        best_metric: str | None = None,
        sync_run: Callable[[], None] = lambda: None,
        is_owner: bool | None = None,
        steps_in_use: Callable[[], Set[int]] = frozenset,
    ) -> None:
        """Prepare to write checkpoints into a folder.

        `keep` is the number of newest checkpoints to keep; with `best_metric` ("lfw/accuracy", say) the
        best checkpoint by this metric is kept too. With `asynchronous=False`, `save` returns after the commit.
        `sync_run` writes to the disk what the run has reported so far, and raises an OSError if that is not possible.
        Every rank calls it before a checkpoint is committed, in the thread that writes. `is_owner` says whether this
        rank creates, commits and removes folders on its disk: by default the leader alone, and one rank of each host
        if they share no folder. There the folder of each host gets the files of its ranks, and the manifest.
        `steps_in_use` returns steps that this rank still reads; what any rank reads is not removed.
        """
        self._is_owner = collectives.rank() == 0 if is_owner is None else is_owner
        self._steps_in_use = steps_in_use
        self._sync_run = sync_run
        self._folder, self._keep, self._best_metric = folder, keep, best_metric
        self._asynchronous = asynchronous
        self._host_copy = HostCopy()
        self.is_prepared = not asynchronous
        """Whether the buffers for saves are allocated or being allocated; the same on every rank."""
        # A save in flight: copy → files, written by a thread → reports to the leader → manifest and rename, or removal.
        self._thread: threading.Thread | None = None
        self._removal: threading.Thread | None = None
        self._has_warned_of_removal = False
        self._snapshot: Snapshot | None = None
        self._scratch = folder
        self._files: list[FileEntry] = []
        self._last_bytes = 0
        self._reason = ""

    @property
    def in_flight(self) -> bool:
        """Whether a save was started and is neither committed nor abandoned; the same on every rank."""
        return self._snapshot is not None

    def prepare(self, snapshot: Snapshot) -> None:
        """Start to allocate the buffers for such snapshots, so that the first save is not slower than the others.

        Where a host has no room for the buffers of its ranks, all saves are synchronous from then on, with one warning:
        the system may end a process that takes more memory than there is, page-locked memory above all.
        """
        self.is_prepared = True
        if not snapshot.copy_rows:
            return
        files = _files_of(snapshot)
        shortage = _shortage(sum(tensor.nbytes for file in files for tensor in file.tensors.values()))
        if not shortage:
            self._host_copy.prepare(files)
            return
        self._asynchronous = False
        if collectives.rank() == 0:
            warn(f"{shortage}; training waits for each checkpoint, as with checkpoint.async: false")

    def save(self, snapshot: Snapshot) -> SaveOutcome | None:
        """Finish the previous save, then start to save a snapshot.

        Return the outcome of the previous save, or None if none was in flight. With `asynchronous=False`
        return the outcome of this save instead. A snapshot that cannot be copied to host memory is
        written before the call returns; its outcome comes from the next `poll`, `save` or `finish`.
        """
        if not self.is_prepared:
            self.prepare(snapshot)
        # One save at a time: the thread may still write from the buffers that this one copies into.
        previous = self.end_save()
        self._snapshot, self._reason, self._files = snapshot, "", []
        self._make_scratch_folder(snapshot.step)
        if not self._reason:
            files = _files_of(snapshot)
            # Tables that fill the host's memory, or are on a disk, cannot be copied.
            copied = self._copy(files) if self._asynchronous and snapshot.copy_rows else None
            # Training waits for the copy to host memory only, and for the writing if there is none.
            if copied is None:
                self._write(files)
            else:
                self._thread = threading.Thread(
                    target=self._write, args=(copied,), name="checkpoint", daemon=True
                )
                self._thread.start()
        return previous if self._asynchronous else self.end_save()

    def poll(self) -> SaveOutcome | None:
        """Commit or abandon the save in flight if all ranks have ended writing and removing; else return None."""
        # One small reduction for each step, and only while a save is in flight, which all ranks know alike.
        if not self.in_flight or collectives.any_rank(self._is_busy):
            return None
        return self._complete()

    def finish(self) -> SaveOutcome | None:
        """Do as `end_save`, and wait until old checkpoints are removed."""
        outcome = self.end_save()
        self._end_removal()
        return outcome

    def end_save(self) -> SaveOutcome | None:
        """Wait for the save in flight, commit or abandon it, and return its outcome; None if there is none."""
        # Each rank waits for its own thread first. No collective is in flight meanwhile, so a slow disk delays the
        # others but does not put them out of step.
        if self._thread is not None:
            self._thread.join()
        return self._complete() if self.in_flight else None

    @property
    def _is_busy(self) -> bool:
        return any(thread and thread.is_alive() for thread in (self._thread, self._removal))

    def _end_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()
            self._removal = None

    def _make_scratch_folder(self, step: int) -> None:
        """Create the folder of this save on each disk. Collective."""
        # The leader's, because the name is random.
        self._scratch = self._folder / collectives.broadcast_json(
            commit.scratch_folder(self._folder, step).name
        )
        if self._is_owner:
            try:
                # The room that this save needs may be that of a checkpoint which is being removed.
                if self._removal and shutil.disk_usage(self._folder).free < self._last_bytes:
                    self._end_removal()
                commit.make_scratch_folder(self._scratch)
            except OSError as error:
                self._reason = self._describe(error)
        # The ranks write together, or none does.
        self._reason = next(filter(None, collectives.gather_json(self._reason)), "")

    def _copy(self, files: list[TensorFile]) -> list[TensorFile] | None:
        """Return a copy of the files in host memory; None, with a warning, if it cannot be had."""
        try:
            return self._host_copy.take(files)
        except RuntimeError as error:  # raised by torch: no host memory, or none that can be page-locked
            warn(f"{self._describe(error)}; training waits until the checkpoint is written without a copy")
            self._host_copy = HostCopy()
            return None

    def _write(self, files: list[TensorFile]) -> None:
        """Write the files of this rank."""
        try:
            self._files = [self._write_file(file) for file in files]
            # A run that resumes from this checkpoint does not report its steps again: their records must not be lost
            # by a power cut that the checkpoint survives.
            self._sync_run()
        except Exception as error:  # a failed save must not end the training, whatever the reason
            self._reason = self._describe(error)

    def _write_file(self, file: TensorFile) -> FileEntry:
        name = f"{file.name}.safetensors"
        size, sha256 = write_tensors(self._scratch / name, file.tensors)
        return FileEntry(name, size, sha256, file.start, file.stop)

    def _describe(self, error: Exception) -> str:
        """Return rank, path and reason of an error, on one line."""
        path, reason = getattr(error, "filename", None) or self._folder, error_reason(error)
        if isinstance(error, FileNotFoundError) and collectives.rank() > 0:
            # The leader has created the folder, so this rank's host has other storage.
            reason += "; use a folder that all hosts of the run share"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason += "; free space on the disk"
        return f"rank {collectives.rank()}: {path}: {reason}"

    def _complete(self) -> SaveOutcome:
        """Commit the save if every rank has written its files, else remove its folder. Collective."""
        assert self._snapshot is not None
        snapshot = self._snapshot
        # The leader must know that every file is on the disk before it writes the manifest, which lists them all.
        files = [asdict(entry) for entry in self._files]
        reports = collectives.gather_json([self._reason, files, sorted(self._steps_in_use())])
        reason = next((reason for reason, _, _ in reports if reason), "")
        if not reason:
            self._last_bytes = sum(entry["size"] for _, entries, _ in reports for entry in entries)
        manifest = None
        if collectives.rank() == 0 and not reason:
            manifest = Manifest(
                step=snapshot.step,
                world_size=collectives.world_size(),
                num_classes=snapshot.num_classes,
                files=tuple(FileEntry(**entry) for _, entries, _ in reports for entry in entries),
                meta=snapshot.meta,
                metrics=snapshot.metrics,
            )
        text = collectives.broadcast_json(manifest.dump() if manifest else "")
        if self._is_owner:
            # If a rank has failed, the older checkpoints stay the newest: nothing was renamed.
            in_use = {step for _, _, steps in reports for step in steps}
            reason = reason or self._commit(snapshot.step, text, in_use)
            if reason:
                shutil.rmtree(self._scratch, ignore_errors=True)
        # All ranks must agree on the outcome: the last checkpoint of a run decides how it ends.
        reason = next(filter(None, collectives.gather_json(reason)), "")
        self._snapshot = self._thread = None
        return SaveOutcome(snapshot.step, reason, tuple(self._files), manifest)

    def _commit(self, step: int, manifest: str, in_use: set[int]) -> str:
        """Write the manifest, publish the folder and begin to remove old ones; return why it was not published."""
        # It must not meet a folder that gets or loses its name now.
        self._end_removal()
        try:
            # Last of all files: what has a manifest is complete, whatever its folder is called.
            write_atomically(self._scratch / MANIFEST, manifest)
            commit.publish(self._scratch, commit.step_folder(self._folder, step))
        except OSError as error:
            return self._describe(error)
        # In a thread: removing many gigabytes takes a file system seconds, in which training would wait.
        self._removal = threading.Thread(
            target=self._remove_old, args=(step, in_use), name="checkpoint-removal", daemon=True
        )
        self._removal.start()
        return ""

    def _remove_old(self, saved_step: int, in_use: set[int]) -> None:
        # After the commit, never before: at each moment at least one complete checkpoint has its name.
        commit.remove_replaced(commit.step_folder(self._folder, saved_step))
        try:
            commit.remove_surplus(self._folder, keep=self._keep, best_metric=self._best_metric, spared=in_use)
        except OSError as error:  # the next save tries again
            if not self._has_warned_of_removal:
                warn(f"{self._describe(error)}; this checkpoint stays, whatever checkpoint.keep says")
            self._has_warned_of_removal = True


def _files_of(snapshot: Snapshot) -> list[TensorFile]:
    """Return the files that this rank writes."""
    return snapshot.files(collectives.rank(), collectives.world_size())


def _shortage(needed: int) -> str:
    """Return which host has no room for `needed` bytes of each of its ranks, in words; empty: none. Collective.

    Every rank returns the same. A host that does not say how much memory it has left counts as one with room.
    """
    reports = collectives.gather_json([own_local_rank(), socket.gethostname(), needed, available_bytes()])
    # By the first rank of a host and not by its name: containers and images may all have the same one.
    of_host: dict[int, list[tuple[str, int, int | None]]] = {}
    for rank, (local_rank, *report) in enumerate(reports):
        of_host.setdefault(rank - local_rank, []).append(tuple(report))
    for ranks in of_host.values():
        total = sum(size for _, size, _ in ranks)
        left = min((left for _, _, left in ranks if left is not None), default=total)
        if total > left:
            return (
                f"{ranks[0][0]}: the copy of a checkpoint needs {total / _GIB:.1f} GiB of host memory for its "
                f"{count_text(len(ranks), 'rank')}, {left / _GIB:.1f} GiB are left"
            )
    return ""
