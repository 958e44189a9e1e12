"""Reader of checkpoints, on any number of ranks.

Nothing in a checkpoint is trusted except what its manifest lists: a file is compared with the size and
the checksum there before a tensor is read from it.
"""

# D columns of a table (of class centers: embedding size)

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from facetrain.checkpoint.commit import CHECKPOINTS, LATEST, STEP_NAME, complete_steps, step_folder
from facetrain.checkpoint.manifest import MANIFEST, FileEntry, Manifest, is_regular_file, read_manifest
from facetrain.checkpoint.run_id import check_identity
from facetrain.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from facetrain.files import os_errors_as, sha256_of
from facetrain.own_parts import allow_option
from facetrain.remote.filesystem import side_by_side
from facetrain.text import shell_path

_HASHING_THREADS = 4


class Checkpoint:
    """A complete checkpoint on disk."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        """Read the manifest of a checkpoint folder, or take it if the folder is not there yet.

        Raises:
            CheckpointError: as `read_manifest`.
        """
        self.folder = folder
        self.manifest: Manifest = manifest or read_manifest(folder)
        # Ascending, so that `rows` walks through the classes once.
        self._row_files = sorted(
            (file for file in self.manifest.files if file.stop is not None),
            key=lambda file: (file.start or 0, file.stop or 0),
        )
        self._verified: set[str] = set()

    @classmethod
    def open(cls, path: Path, step: int | None = None) -> Checkpoint:
        """Open the checkpoint in a run folder, a checkpoints folder, its `latest` file, or a checkpoint folder.

        From a folder with several checkpoints, open the one of a step, or by default the newest. The newest is found by
        its folder's name and not by `latest`, which a crash can leave one checkpoint behind. A checkpoint that is found
        in a folder must have been written by its run, at the step in its name. One that is given by its path may be of
        any run.

        Raises:
            NoCheckpointError: there is no checkpoint, or none of this step.
            DamagedCheckpointError: the manifest is damaged. The message names the newest sound checkpoint.
            ForeignCheckpointError: the checkpoint is one of another run or of another step.
            CheckpointError: `latest` names no checkpoint.
        """
        path = Path(path)
        if path.name == LATEST and is_regular_file(path):
            return cls._open_member(path.parent / _read_latest(path))
        is_run = (path / CHECKPOINTS).is_dir()  # it may be named like a checkpoint
        if not is_run and ((path / MANIFEST).exists() or (STEP_NAME.fullmatch(path.name) and path.is_dir())):
            with _next_step_named(path):
                return cls(path)
        folder = path / CHECKPOINTS if is_run else path
        steps = complete_steps(folder)
        if not steps:
            missing = f"; the one that {LATEST} names is missing" if (folder / LATEST).exists() else ""
            raise NoCheckpointError(
                f"{path}: contains no checkpoint{missing}; give the folder of a run that has saved one (`facetrain "
                "runs` lists them)"
            )
        if step is not None and step not in steps:
            raise NoCheckpointError(
                f"{path}: no checkpoint of step {step}; choose one of {', '.join(map(str, steps))}"
            )
        return cls._open_member(step_folder(folder, step if step is not None else steps[-1]))

    @classmethod
    def _open_member(cls, folder: Path) -> Checkpoint:
        """Open a checkpoint of a run."""
        with _next_step_named(folder):
            checkpoint = cls(folder)
        # A checkpoint that is found in a folder could have got there by a copy; one that is given by its path is meant.
        check_identity(folder, checkpoint.manifest)
        return checkpoint

    @property
    def step(self) -> int:
        """Number of training steps before the checkpoint was written."""
        return self.manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        """JSON that the run stored beside the tensors."""
        return self.manifest.meta

    @property
    def names_code(self) -> bool:
        """Whether the config of the run names code of one's own: the checkpoint has digests of its source files."""
        return any(name.partition(" ")[0] == "code" for name in self.meta)

    def replicated(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the replicated tensors whose names begin with a prefix, without the prefix in their names.

        Raises:
            CheckpointError: the file is damaged.
        """
        with self._open_file("replicated.safetensors") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}

    def rank_state(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors that one rank stored for itself.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        with self._open_file(f"rank_{rank:05d}.safetensors") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return the rows of classes [start, stop) of a table: (stop - start, D).

        The rows are collected from the files of all ranks that wrote them.

        Raises:
            CheckpointError: the table or some of these classes are not in the checkpoint, or a file is damaged.
        """
        shards, next_class = [], start
        for file in self._row_files:
            # The ranges of the files and of this rank need not match: another number of ranks may have written them.
            first, end = file.start or 0, min(file.stop or 0, stop)
            if first <= next_class < end:
                shards.append(self._read_rows(file.name, name, next_class - first, end - first))
                next_class = end
        if next_class < stop:
            raise CheckpointError(
                f"{self.folder}: has no rows of class {next_class:,}; it has {self.manifest.num_classes:,} classes"
            )
        return shards[0] if len(shards) == 1 else torch.cat(shards) if shards else torch.empty(0)

    def verify(self) -> None:
        """Compare every file with its size and checksum.

        Raises:
            DamagedCheckpointError: a file is missing, truncated, changed, or a link.
        """
        # hashlib releases Python's lock, and one thread hashes more slowly than a fast disk reads. A ThreadPoolExecutor
        # would hold up Ctrl-C until large files are read to their end.
        side_by_side(self._verify_file, self.manifest.files, _HASHING_THREADS)

    def verify_sizes(self) -> None:
        """Compare every file with its size, without reading it.

        Raises:
            DamagedCheckpointError: a file is missing, truncated, or a link.
        """
        for entry in self.manifest.files:
            path = self.folder / entry.name
            if not is_regular_file(path) or path.stat().st_size != entry.size:
                raise DamagedCheckpointError(
                    f"{path}: missing, or not of {entry.size:,} bytes; the checkpoint is damaged"
                )

    def _read_rows(self, file_name: str, table: str, start: int, stop: int) -> Tensor:
        with self._open_file(file_name) as file:
            if table not in file.keys():  # noqa: SIM118
                raise CheckpointError(f"{self.folder}: {file_name} has no table {table}")
            rows: Tensor = file.get_slice(table)[start:stop]
        if len(rows) != stop - start:
            raise CheckpointError(f"{self.folder}: {file_name} has fewer rows than {MANIFEST} lists")
        return rows

    def _open_file(self, name: str) -> Any:
        # The manifest alone says which files belong to the checkpoint; another file in the folder is never opened.
        entry = next((entry for entry in self.manifest.files if entry.name == name), None)
        if entry is None:
            raise CheckpointError(f"{self.folder}: {MANIFEST} does not list {name}")
        with _next_step_named(self.folder):
            self._verify_file(entry)
        try:
            return safe_open(str(self.folder / name), framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / name}: {error}") from error

    def _verify_file(self, entry: FileEntry) -> None:
        if entry.name in self._verified:
            return
        path = self.folder / entry.name
        if not is_regular_file(path):
            raise DamagedCheckpointError(f"{path}: missing or not a regular file; the checkpoint is damaged")
        with os_errors_as(DamagedCheckpointError, path):
            size = path.stat().st_size
            # The size first: a file that was cut off is found without reading it.
            if size != entry.size or sha256_of(path) != entry.sha256:
                raise DamagedCheckpointError(
                    f"{path}: checksum differs from the one in {MANIFEST} ({size:,} of {entry.size:,} bytes); the "
                    "checkpoint is damaged"
                )
        # Once for each file: the tables of a large head are read in many pieces.
        self._verified.add(entry.name)


def _newest_sound(folder: Path, without: str) -> Checkpoint | None:
    """Return the newest checkpoint of a run, except for one, whose files all have their checksums; None without one."""
    for step in reversed(complete_steps(folder)):
        path = step_folder(folder, step)
        if path.name == without:
            continue
        with suppress(CheckpointError):
            checkpoint = Checkpoint(path)
            check_identity(path, checkpoint.manifest)
            checkpoint.verify()
            return checkpoint
    return None


@contextmanager
def _next_step_named(folder: Path) -> Iterator[None]:
    """Add the newest sound checkpoint, and the command that continues from it, to the error of a damaged one.

    The search reads whole checkpoints, so it takes seconds: only a command that fails anyway does it.
    """
    try:
        yield
    except DamagedCheckpointError as error:
        if not STEP_NAME.fullmatch(folder.name):
            raise DamagedCheckpointError(f"{error}; copy it again from its run") from error
        run_folder = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder.parent
        sound = _newest_sound(folder.parent, without=folder.name)
        advice = "no other checkpoint of the run is sound: start a new run"
        if sound is not None:
            command = f"facetrain resume {shell_path(run_folder)} --checkpoint {sound.step}"
            command += allow_option(sound.names_code)
            advice = (
                f"the newest sound checkpoint is step {sound.step}: continue from it with `{command}`, or "
                f"evaluate {sound.folder}"
            )
        raise DamagedCheckpointError(f"{error}; {advice}") from error


def _read_latest(latest: Path) -> str:
    with latest.open(encoding="utf-8", errors="replace") as file:
        name = file.read(64).strip()
    # The name becomes a path, so anything but a checkpoint beside the file is refused.
    if not STEP_NAME.fullmatch(name):
        raise CheckpointError(f"{latest}: does not name a checkpoint; give the checkpoint's folder instead")
    return name
