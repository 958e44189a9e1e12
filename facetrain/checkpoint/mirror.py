"""Copy of a run's checkpoints in an object store, the mirror of the run.

    s3://bucket/runs/NAME/
      run_id.txt, config.yaml, metrics.jsonl, …      files of the run folder
      claim                                          id of the run, and a random text of the process that uploads it
      checkpoints/step_00002000/
        rows_00000_of_00002.5f3a90c2….safetensors    name of a file, with the beginning of its checksum
        manifest.json                                written last: without it there is no checkpoint
        left_1_manifest.json                         instead, if the run went back to an earlier step: once, twice, …

A checkpoint appears and disappears by one request, which writes or deletes its manifest. An object with a checksum in
its name never gets another content. So what an interrupted upload has left is never mistaken for a file of a later one,
and a checkpoint is saved again under the same step without a moment in which it is incomplete.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path

from facetrain.checkpoint.commit import (
    CHECKPOINTS,
    STEP_NAME,
    best_step,
    make_scratch_folder,
    publish,
    put_aside,
    scratch_folder,
    step_folder,
)
from facetrain.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    is_regular_file,
    parse_manifest,
    read_manifest,
)
from facetrain.checkpoint.mirror_store import MirrorStore
from facetrain.checkpoint.run_id import RUN_ID_FILE, run_id_of
from facetrain.errors import CheckpointError, DamagedCheckpointError, UsageError
from facetrain.files import make_folder, os_errors_as, sha256_of
from facetrain.remote.address import public
from facetrain.remote.filesystem import side_by_side

_LEFT_MANIFEST = re.compile(rf"left_\d+_{MANIFEST}")
_PROCESS = secrets.token_hex(8)
"""Name of this process in a claim: hosts may have processes of the same number."""
_CLAIM = "claim"
"""Object that says which process uploads. Its name is not that of a file of the run folder."""
_DOWNLOADS = 8
"""Files at a time: one connection to a store is slower than a disk. Each has a part of 16 MiB in memory."""
_OBJECT = re.compile(rf"{CHECKPOINTS}/{STEP_NAME.pattern}/(.+)")
RECORDS = frozenset({".csv", ".html", ".json", ".jsonl", ".png", ".txt", ".yaml"})
"""Suffixes of the files of a run folder that a run writes while it trains. Others, such as exported models, are large,
and not needed to continue it."""
_FILE = re.compile(r"[A-Za-z0-9_]+\.[a-z]+")
"""Name of a file of the run folder."""


class Mirror:
    """The mirror of one run. Every method waits for the store, and repeats what may pass.

    All methods raise a CheckpointError with the address and the reason if the store does not do what is asked.
    """

    def __init__(self, url: str, *, process: str = _PROCESS) -> None:
        """Take the address of the run: that of the mirror and the name of the run folder."""
        self._store, self._process = MirrorStore(url), process
        self.url = self._store.url

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in ascending order."""
        return _complete(self._objects())

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a complete checkpoint.

        Raises:
            DamagedCheckpointError: it is damaged.
            CheckpointError: another version of facetrain has written it.
        """
        return self._read_manifest(_manifest_name(step))

    def _read_manifest(self, name: str) -> Manifest:
        try:
            return parse_manifest(self._store.read(name), f"{public(self.url)}/{name}")
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"{error}; continue from another one with --checkpoint STEP"
            ) from error

    def read_text(self, name: str) -> str:
        """Return a file of the run folder, which is text."""
        return self._store.read(name)

    def check_run(self, run_id: str) -> None:
        """Check that the checkpoints in the mirror, if there are any, are of this run.

        Raises:
            UsageError: they are of another run.
        """
        found: str | None = run_id
        if steps := self.steps():
            newest = next(self._sound_manifests(reversed(steps)), None)
            found = self._store.read(RUN_ID_FILE).strip() if newest is None else run_id_of(newest)
        if found != run_id:
            raise UsageError(
                f"{public(self.url)}: holds the checkpoints of another run (id {found}, and this one has {run_id}); "
                f"continue that one in another folder, by `facetrain resume {public(self.url)}`, or begin this one "
                "with another run.name"
            )

    def claim(self, run_id: str) -> None:
        """Take the mirror for this process: a run that continues at its start, a new one before its first upload.

        Two runs could begin before either has a checkpoint, and one run could be continued on two hosts.

        Raises:
            UsageError: another run has checkpoints there.
        """
        self.check_run(run_id)
        self._write_claim(run_id)

    def require_claim(self, run_id: str) -> None:
        """Check that no other process has claimed the mirror since.

        A claim that is gone is written again: it is the only object that a run does not renew, and a store that removes
        old objects removes it first.

        Raises:
            CheckpointError: another run has, or another process of this run.
        """
        if not self._store.find(_CLAIM):
            self._write_claim(run_id)
        other, _, process = self._store.read(_CLAIM).strip().partition(" ")
        if (other, process) == (run_id, self._process):
            return
        if other != run_id:
            raise CheckpointError(
                f"{public(self.url)}: another run of this name has begun to use it (id {other}, and this one has "
                f"{run_id}); set run.name of one of them to another name"
            )
        raise CheckpointError(
            f"{public(self.url)}: another process has continued this run (id {run_id}) since, on another host or in "
            "a copy of the folder, and its checkpoints count there; end one of the two"
        )

    def _write_claim(self, run_id: str) -> None:
        self._store.write(_CLAIM, f"{run_id} {self._process}\n")

    def upload(self, folder: Path, step: int, files: Iterable[FileEntry]) -> None:
        """Upload files of a checkpoint from its folder, except those that are there already."""
        for entry in self.missing(step, files):
            self._store.upload(folder / entry.name, _object_name(step, entry))

    def missing(self, step: int, files: Iterable[FileEntry]) -> list[FileEntry]:
        """Return the given files of a checkpoint that are not in the mirror yet."""
        present = self._objects()
        return [entry for entry in files if present.get(_object_name(step, entry)) != entry.size]

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint complete, all of whose files are there."""
        self._store.write(_manifest_name(manifest.step), manifest.dump())

    def remove_surplus(self, committed: int, *, keep: int, best_metric: str | None) -> None:
        """Remove all checkpoints except the newest `keep` and the best one, and what interrupted uploads have left.

        The step that was committed last counts even if the store does not list its manifest yet. No other rank may
        upload at the same time.
        """
        objects = self._objects()
        steps = sorted({*_complete(objects), committed})
        kept: set[int | None] = {*steps[-keep:]}
        if best_metric:
            kept.add(best_step({each.step: each for each in self._sound_manifests(steps)}, best_metric))
        # The manifests first: a checkpoint whose removal is interrupted must not be found.
        for step in set(steps) - kept:
            self._store.remove(_manifest_name(step))
        left = [(name, step) for name, step, file in _parsed(objects) if _LEFT_MANIFEST.fullmatch(file)]
        kept_names = {each for name, step in left for each in self._left_objects(name, step, objects)}
        for name, step, file in _parsed(objects):
            if step not in kept and file != MANIFEST and name not in kept_names:
                self._store.remove(name)

    def _sound_manifests(self, steps: Iterable[int]) -> Iterator[Manifest]:
        """Yield the manifests of steps, without the damaged ones."""
        for step in steps:
            with suppress(DamagedCheckpointError):
                yield self.manifest(step)

    def _left_objects(self, name: str, step: int, objects: Iterable[str]) -> set[str]:
        """Return the objects of a checkpoint that the run has left; others of the step are of another one.

        If its manifest `name` is damaged, any object of the step may be one of them.
        """
        if (files := self._files_of(name)) is None:
            return {name for name, other, _ in _parsed(objects) if other == step}
        return {name, *(_object_name(step, entry) for entry in files)}

    def _files_of(self, name: str) -> tuple[FileEntry, ...] | None:
        """Return the files that a manifest lists; None if it is damaged."""
        with suppress(DamagedCheckpointError):
            return self._read_manifest(name).files
        return None

    def leave_after(self, step: int) -> None:
        """Keep the checkpoints after a step, from which the run continues, but no longer count them."""
        objects = self._objects()
        for later in _complete(objects):
            if later > step:
                # A number for each: a run may go back over the same step more than once.
                count = sum(
                    other == later and bool(_LEFT_MANIFEST.fullmatch(file))
                    for _, other, file in _parsed(objects)
                )
                self._store.copy(_manifest_name(later), _manifest_name(later, f"left_{count + 1}_{MANIFEST}"))
                self._store.remove(_manifest_name(later))

    def has_left(self, manifest: Manifest) -> bool:
        """Return whether a checkpoint, by its files, is one that the run no longer counts."""
        return any(
            self._files_of(name) == manifest.files
            for name, step, file in _parsed(self._objects())
            if step == manifest.step and _LEFT_MANIFEST.fullmatch(file)
        )

    def fetch(self, step: int, checkpoints: Path, *, records_to: Path | None = None) -> None:
        """Make a checkpoint of the mirror complete on this disk: download what the folder of checkpoints lacks.

        A local checkpoint of the step with another manifest is put aside. The records of the run go to the run folder
        `records_to`, if it is given.

        Raises:
            DamagedCheckpointError: a file differs from its checksum.
            CheckpointError: the step is not in the mirror, or the disk cannot be written to.
        """
        with os_errors_as(CheckpointError, checkpoints):
            make_folder(checkpoints)
            target, scratch = step_folder(checkpoints, step), scratch_folder(checkpoints, step)
            make_scratch_folder(scratch)
            try:
                self._store.download(_manifest_name(step), scratch / MANIFEST)
                manifest = read_manifest(scratch)
                is_same = is_regular_file(target / MANIFEST) and sha256_of(target / MANIFEST) == sha256_of(
                    scratch / MANIFEST
                )
                if os.path.lexists(target) and not is_same:
                    put_aside(target)
                if records_to:
                    # First: where the checkpoint is complete, the next start fetches nothing. One that is new on this
                    # disk was written on another one, which has gone on with the run.
                    self.fetch_files(records_to, replace=not is_same)
                folder = target if is_same else scratch
                self._fetch_files(step, folder, manifest.files)
                if not is_same:
                    publish(scratch, target)
            finally:
                # Under another name: a download that still runs could create a file while the folder is removed.
                with suppress(FileNotFoundError):  # published
                    shutil.rmtree(scratch.rename(f"{scratch}.left"), ignore_errors=True)

    def _fetch_files(self, step: int, folder: Path, files: Iterable[FileEntry]) -> None:
        """Download the files of a checkpoint that a folder lacks, or has with another content, side by side.

        The first error, or Ctrl-C, ends the method at once. The other downloads end at their next part, which may come
        after the folder is removed: they then write no more.
        """
        is_ended = threading.Event()

        def report(_: int) -> None:
            if is_ended.is_set():
                raise CancelledError

        def fetch_file(entry: FileEntry) -> None:
            path = folder / entry.name
            if not is_regular_file(path) or sha256_of(path) != entry.sha256:
                self._store.download(_object_name(step, entry), path, entry.sha256, report)

        try:
            side_by_side(fetch_file, files, _DOWNLOADS)
        finally:
            is_ended.set()

    def upload_files(self, paths: Iterable[Path]) -> None:
        """Upload files of the run folder."""
        with tempfile.TemporaryDirectory() as folder:
            for path in paths:
                if path.suffix in RECORDS:
                    # A copy: training appends to records, and a request announces the size in advance.
                    path = Path(shutil.copyfile(path, Path(folder, path.name)))
                self._store.upload(path, path.name)

    def fetch_files(self, folder: Path, *, replace: bool) -> None:
        """Download the records of the run folder; `replace` all that exist, or only those that grow."""
        with os_errors_as(CheckpointError, folder):
            for name in self._store.find(""):
                is_wanted = _FILE.fullmatch(name) and Path(name).suffix in RECORDS
                if is_wanted and (replace or name.endswith(".jsonl") or not os.path.lexists(folder / name)):
                    self._store.download(name, folder / name)

    def _objects(self) -> dict[str, int]:
        """Return the sizes in bytes of the objects of all checkpoints, by their names in the mirror."""
        return self._store.find(CHECKPOINTS)


def _manifest_name(step: int, name: str = MANIFEST) -> str:
    return f"{CHECKPOINTS}/{step_folder(Path(), step).name}/{name}"


def _object_name(step: int, entry: FileEntry) -> str:
    stem, _, suffix = entry.name.rpartition(".")
    return _manifest_name(step, f"{stem}.{entry.sha256[:16]}.{suffix}")


def _parsed(objects: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """Yield the name, the step and the file of each object of a checkpoint."""
    for name in objects:
        if found := _OBJECT.fullmatch(name):
            yield name, int(found[1]), found[2]


def _complete(objects: Iterable[str]) -> list[int]:
    return sorted(step for _, step, file in _parsed(objects) if file == MANIFEST)
