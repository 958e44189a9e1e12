"""Read a checkpoint on any number of ranks, and trust nothing in it that its manifest does not vouch for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from facetrain.checkpoint.commit import LATEST, complete_steps, step_folder
from facetrain.checkpoint.manifest import NAME, FileEntry, Manifest, read_manifest, sha256_of
from facetrain.errors import CheckpointError


class Checkpoint:
    """A whole checkpoint on disk. A file is compared with its checksum before the first tensor is read from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._trusted: set[str] = set()

    @classmethod
    def open(cls, path: Path, step: int | None = None) -> Checkpoint:
        """Open a run's folder, its checkpoints folder, or one checkpoint; the newest where no step is given.

        Raises:
            CheckpointError: there is none.
        """
        path = Path(path)
        if (path / NAME).exists():
            return cls(path)
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        steps = complete_steps(folder)
        if not steps:
            raise CheckpointError(f"{path}: holds no checkpoint")
        if step is not None and step not in steps:
            raise CheckpointError(
                f"{path}: has no checkpoint of step {step}; there are {', '.join(map(str, steps))}"
            )
        return cls(step_folder(folder, step if step is not None else _latest(folder, steps)))

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
            return {
                name[len(prefix) :]: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)
            }  # noqa: SIM118

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
        for entry in sorted(
            (e for e in self.manifest.files if e.start is not None), key=lambda e: (e.start or 0, e.stop or 0)
        ):
            first, past = entry.start or 0, entry.stop or 0
            if first <= at < min(past, stop):
                with self._reader(entry.name) as file:
                    if name not in file.keys():  # noqa: SIM118
                        raise CheckpointError(f"{self.folder}: {entry.name} holds no table {name}")
                    parts.append(file.get_slice(name)[at - first : min(past, stop) - first])
                at = min(past, stop)
        if at < stop:
            raise CheckpointError(
                f"{self.folder}: holds no rows of class {at:,}; it has {self.manifest.num_classes:,} classes"
            )
        return torch.cat(parts) if parts else torch.empty(0)

    def verify(self) -> None:
        """Compare every file with its size and checksum.

        Raises:
            CheckpointError: a file is missing, cut off, changed, or a link.
        """
        for entry in self.manifest.files:
            self._trust(entry)

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
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path}: is missing, or no plain file; the checkpoint is not whole")
        if path.stat().st_size != entry.size:
            raise CheckpointError(
                f"{path}: has {path.stat().st_size:,} bytes, not {entry.size:,}; the checkpoint is damaged"
            )
        if sha256_of(path) != entry.sha256:
            raise CheckpointError(f"{path}: its checksum is not the one in {NAME}; the checkpoint is damaged")
        self._trusted.add(entry.name)


def _latest(folder: Path, steps: list[int]) -> int:
    # The newest whole one, even if a crash came between its rename and that of `latest`.
    named = folder / LATEST
    if named.is_file():
        name = named.read_text(encoding="utf-8", errors="replace").strip()
        known = {step_folder(folder, step).name: step for step in steps}
        return max(known.get(name, -1), steps[-1])
    return steps[-1]
