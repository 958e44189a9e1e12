"""Reader of checkpoints, on any number of ranks.

Nothing in a checkpoint is trusted except what its manifest lists: a file is compared with the size and
the checksum there before a tensor is read from it.
"""

# D columns of a table (of class centers: embedding size)

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from facetrain.checkpoint.commit import LATEST, STEP_NAME, complete_steps, step_folder
from facetrain.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    is_regular_file,
    read_manifest,
    sha256_of,
)
from facetrain.distributed.agreement import decide_on_leader, fail_together
from facetrain.distributed.world import World
from facetrain.errors import CheckpointError, NoCheckpointError

_HASHING_THREADS = 4
_ADVICE = "the checkpoint is damaged; resume from an older one: facetrain resume RUN_DIR --checkpoint STEP"


class Checkpoint:
    """A complete checkpoint on disk."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest of a checkpoint folder.

        Raises:
            CheckpointError: as `read_manifest`.
        """
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        row_files = [
            (entry.start, entry.stop, entry)
            for entry in self.manifest.files
            if entry.start is not None and entry.stop is not None
        ]
        self._row_files = sorted(row_files, key=lambda item: item[:2])
        self._verified: set[str] = set()

    @classmethod
    def open(cls, path: Path, step: int | None = None) -> Checkpoint:
        """Open the checkpoint in a run folder, a checkpoints folder, its `latest` file, or a checkpoint folder.

        From a folder with several checkpoints, open the one of `step`, by default the newest. The newest
        is found by its folder's name and not by `latest`, which a crash can leave one checkpoint behind.

        Raises:
            NoCheckpointError: there is no checkpoint, or none of this step.
            CheckpointError: the manifest is damaged, or `latest` names no checkpoint.
        """
        path = Path(path)
        if path.name == LATEST and is_regular_file(path):
            return cls(path.parent / _read_latest(path))
        if (path / MANIFEST).exists():
            return cls(path)
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        steps = complete_steps(folder)
        if not steps:
            raise NoCheckpointError(f"{path}: contains no checkpoint")
        if step is not None and step not in steps:
            raise NoCheckpointError(
                f"{path}: no checkpoint of step {step}; choose one of {', '.join(map(str, steps))}"
            )
        return cls(step_folder(folder, step if step is not None else steps[-1]))

    @property
    def step(self) -> int:
        """Number of training steps before the checkpoint was written."""
        return self.manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        """JSON that the run stored beside the tensors."""
        return self.manifest.meta

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
        for first, past, entry in self._row_files:
            if first <= next_class < min(past, stop):
                end = min(past, stop)
                shards.append(self._read_rows(entry, name, next_class - first, end - first))
                next_class = end
        if next_class < stop:
            raise CheckpointError(
                f"{self.folder}: has no rows of class {next_class:,}; it has {self.manifest.num_classes:,} classes"
            )
        return shards[0] if len(shards) == 1 else torch.cat(shards) if shards else torch.empty(0)

    def verify(self) -> None:
        """Compare every file with its size and checksum.

        Raises:
            CheckpointError: a file is missing, truncated, changed, or a link.
        """
        with ThreadPoolExecutor(_HASHING_THREADS) as threads:
            list(threads.map(self._verify_file, self.manifest.files))

    def _read_rows(self, entry: FileEntry, name: str, start: int, stop: int) -> Tensor:
        with self._open_file(entry.name) as file:
            if name not in file.keys():  # noqa: SIM118
                raise CheckpointError(f"{self.folder}: {entry.name} has no table {name}")
            rows: Tensor = file.get_slice(name)[start:stop]
        if len(rows) != stop - start:
            raise CheckpointError(f"{self.folder}: {entry.name} has fewer rows than {MANIFEST} lists")
        return rows

    def _open_file(self, name: str) -> Any:
        entry = next((entry for entry in self.manifest.files if entry.name == name), None)
        if entry is None:
            raise CheckpointError(f"{self.folder}: {MANIFEST} does not list {name}")
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
            raise CheckpointError(f"{path}: missing or not a regular file; {_ADVICE}")
        size = path.stat().st_size
        if size != entry.size:
            raise CheckpointError(f"{path}: has {size:,} bytes, expected {entry.size:,}; {_ADVICE}")
        if sha256_of(path) != entry.sha256:
            raise CheckpointError(f"{path}: checksum differs from the one in {MANIFEST}; {_ADVICE}")
        self._verified.add(entry.name)


def open_on_all_ranks(world: World, path: Path, step: int | None = None) -> Checkpoint:
    """Open the checkpoint that the leader finds, on every rank. Collective.

    The leader decides, because the ranks may see different checkpoints: machines do not see changes of
    shared storage at the same moment.

    Raises:
        CheckpointError: as `Checkpoint.open`, or a rank finds another checkpoint under the same path.
    """

    def open_on_leader() -> list[str]:
        checkpoint = Checkpoint.open(path, step)
        return [str(checkpoint.folder), checkpoint.manifest.dump()]

    folder, manifest = decide_on_leader(world, open_on_leader)
    with fail_together(world):
        checkpoint = Checkpoint(Path(folder))
        if checkpoint.manifest.dump() != manifest:
            raise CheckpointError(
                f"rank {world.rank}: {folder}: not the checkpoint that rank 0 sees under this path; "
                "use a folder that all machines of the run share"
            )
    return checkpoint


def _read_latest(latest: Path) -> str:
    with latest.open(encoding="utf-8", errors="replace") as file:
        name = file.read(64).strip()
    # The name becomes a path, so anything but a checkpoint beside the file is refused.
    if not STEP_NAME.fullmatch(name):
        raise CheckpointError(f"{latest}: does not name a checkpoint; give the checkpoint's folder instead")
    return name
