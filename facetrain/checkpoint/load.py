"""Read a checkpoint on any number of ranks, and trust nothing in it that its manifest does not vouch for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from facetrain.checkpoint.commit import LATEST, STEP_NAME, complete_steps, step_folder
from facetrain.checkpoint.manifest import NAME, FileEntry, Manifest, is_plain_file, read_manifest, sha256_of
from facetrain.distributed.agreement import decide_on_leader, fail_together
from facetrain.distributed.world import World
from facetrain.errors import CheckpointError, NoCheckpointError

_HASHING_THREADS = 4
_ADVICE = "the checkpoint is damaged: go on from an older one, facetrain resume RUN_DIR --checkpoint STEP"


class Checkpoint:
    """A whole checkpoint on disk. A file is compared with its checksum before a tensor is read from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        row_files = [
            (entry.start, entry.stop, entry)
            for entry in self.manifest.files
            if entry.start is not None and entry.stop is not None
        ]
        self._row_files = sorted(row_files, key=lambda item: item[:2])
        self._trusted: set[str] = set()

    @classmethod
    def open(cls, path: Path, step: int | None = None) -> Checkpoint:
        """Open a run's folder, its checkpoints folder, its `latest`, or one checkpoint.

        Of several it is that of `step`, or the newest: also where a crash came between the moment at
        which that appeared and the one at which `latest` would have named it.

        Raises:
            NoCheckpointError: there is none.
        """
        path = Path(path)
        if path.name == LATEST and is_plain_file(path):
            return cls(path.parent / _named_by(path))
        if (path / NAME).exists():
            return cls(path)
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        steps = complete_steps(folder)
        if not steps:
            raise NoCheckpointError(f"{path}: holds no checkpoint")
        if step is not None and step not in steps:
            raise NoCheckpointError(
                f"{path}: has no checkpoint of step {step}; there are {', '.join(map(str, steps))}"
            )
        return cls(step_folder(folder, step if step is not None else steps[-1]))

    @property
    def step(self) -> int:
        """The step after which it was written."""
        return self.manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        """What the run put beside the tensors."""
        return self.manifest.meta

    def replicated(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors whose names begin with a prefix, under the rest of their names."""
        with self._reader("replicated.safetensors") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}

    def rank_state(self, rank: int) -> dict[str, Tensor]:
        """Return what a rank had of its own."""
        with self._reader(f"rank_{rank:05d}.safetensors") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return the rows of classes [start, stop) of a table, from whichever files hold them.

        Raises:
            CheckpointError: some of these classes, or the table, are not in the checkpoint.
        """
        parts, at = [], start
        for first, past, entry in self._row_files:
            if first <= at < min(past, stop):
                parts.append(self._part(entry, name, at - first, min(past, stop) - first))
                at = min(past, stop)
        if at < stop:
            raise CheckpointError(
                f"{self.folder}: holds no rows of class {at:,}; it has {self.manifest.num_classes:,} classes"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)

    def verify(self) -> None:
        """Compare every file with its size and checksum.

        Raises:
            CheckpointError: a file is missing, cut off, changed, or a link.
        """
        with ThreadPoolExecutor(_HASHING_THREADS) as threads:
            list(threads.map(self._trust, self.manifest.files))

    def _part(self, entry: FileEntry, name: str, start: int, stop: int) -> Tensor:
        with self._reader(entry.name) as file:
            if name not in file.keys():  # noqa: SIM118
                raise CheckpointError(f"{self.folder}: {entry.name} holds no table {name}")
            part: Tensor = file.get_slice(name)[start:stop]
        if len(part) != stop - start:
            raise CheckpointError(f"{self.folder}: {entry.name} holds fewer rows than {NAME} says")
        return part

    def _reader(self, name: str) -> Any:
        entry = next((entry for entry in self.manifest.files if entry.name == name), None)
        if entry is None:
            raise CheckpointError(f"{self.folder}: its manifest has no {name}")
        self._trust(entry)
        try:
            return safe_open(str(self.folder / name), framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / name}: {error}") from error

    def _trust(self, entry: FileEntry) -> None:
        if entry.name in self._trusted:
            return
        path = self.folder / entry.name
        if not is_plain_file(path):
            raise CheckpointError(f"{path}: is missing, or no plain file; {_ADVICE}")
        size = path.stat().st_size
        if size != entry.size:
            raise CheckpointError(f"{path}: has {size:,} bytes, not {entry.size:,}; {_ADVICE}")
        if sha256_of(path) != entry.sha256:
            raise CheckpointError(f"{path}: its checksum is not the one in {NAME}; {_ADVICE}")
        self._trusted.add(entry.name)


def _named_by(latest: Path) -> str:
    with latest.open(encoding="utf-8", errors="replace") as file:
        name = file.read(64).strip()
    if not STEP_NAME.fullmatch(name):
        raise CheckpointError(f"{latest}: names no checkpoint")
    return name


def open_on_all_ranks(world: World, path: Path, step: int | None = None) -> Checkpoint:
    """Open on every rank the checkpoint that the leader finds, as `Checkpoint.open` does. Collective.

    Raises:
        CheckpointError: there is none, or another machine sees none or another one in its place.
    """

    def newest() -> list[str]:
        found = Checkpoint.open(path, step)
        return [str(found.folder), found.manifest.dump()]

    folder, content = decide_on_leader(world, newest)
    with fail_together(world):
        checkpoint = Checkpoint(Path(folder))
        if checkpoint.manifest.dump() != content:
            raise CheckpointError(
                f"rank {world.rank}: {folder}: is another checkpoint here than rank 0 has there; "
                "all machines of a run need one folder that they share"
            )
    return checkpoint
