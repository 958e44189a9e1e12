"""Class centers of another run or program, and the initial class centers of a new run from them.

`model.init_from` names the file or folder, `head.init_from` says what happens to the class centers.
"""

# D embedding size   C classes   K this rank's classes

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from facetrain.checkpoint.commit import LATEST
from facetrain.errors import ModelError
from facetrain.head.class_shard import row_pieces
from facetrain.head.head_group import Head, HeadPart, head_parts
from facetrain.models.known_identities import IDENTITIES, CenterChoice, Names, choose_centers
from facetrain.models.model_file import CONFIG_KEY
from facetrain.models.read_model import open_checkpoint
from facetrain.models.weight_files import load_without_code, require_stored

_ADAFACE_CENTERS = "head.kernel"
"""Name of the class centers (D, K) in the `state_dict` of AdaFace's checkpoints."""
_RANK_FILE = re.compile(r"checkpoint_gpu_(\d+)\.pt")
"""Checkpoint of one rank, as arcface_torch names it."""


@dataclass(frozen=True)
class SavedCenters:
    """The class centers of a finished run, read on demand."""

    num_classes: int
    rows: Callable[[int, int], Tensor]
    """Returns the centers of classes [start, stop): (stop - start, D), float32."""
    names: Callable[[], Names | None] = lambda: None
    """Reads the names of the classes; returns None if they are unknown."""
    min_images: Any = None
    """`data.min_images_per_identity` of the run; None if it is unknown."""


def choose_centers_of(
    path: Path, names: Names | None, num_classes: int, *, may_grow: bool, min_images: int
) -> CenterChoice:
    """Choose the center of another run for each class of a new one; `names` are those of the classes.

    With `may_grow`, there may be new people. `min_images` is the new run's `data.min_images_per_identity`.

    Raises:
        ModelError: there are no centers, or they do not fit the people; see `choose_centers`. Or only numbers say who
            is who, and each run has left out other identities.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    centers = read_centers(path)
    known = centers.names()
    choice = choose_centers(path, known, centers.num_classes, names, num_classes, may_grow=may_grow)
    is_by_number = known is None or names is None
    # An identity that one run leaves out moves the numbers of all that follow.
    if is_by_number and num_classes != centers.num_classes and centers.min_images not in (None, min_images):
        raise ModelError(
            f"{path}: was trained with data.min_images_per_identity {centers.min_images}, and this run has "
            f"{min_images}: without names of identities, class n is not the same person in both; restore it, or use "
            "head.init_from: reinit"
        )
    return choice


def initialize_centers(head: Head, path: Path, number_C: np.ndarray) -> None:
    """Load centers of another run into the C classes of a head; `number_C` are their numbers there, -1 keeps a center.

    Raises:
        ModelError: there are no centers, or they do not fit the head.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    centers = read_centers(path)
    for part in head_parts(head):
        _initialize_part(part, centers, number_C[slice(*part.shard)], path)


def _initialize_part(part: HeadPart, centers: SavedCenters, number_K: np.ndarray, path: Path) -> None:
    """Load centers into this rank's K classes of a head; `number_K` are their numbers in the other run, or -1."""
    weight = part.head.row_state()["weight"]
    # In slices: the centers of all classes may not fit into memory twice.
    for start, stop in row_pieces(centers.num_classes):
        place = np.flatnonzero((number_K >= start) & (number_K < stop))
        if not len(place):
            continue
        number = number_K[place]
        # Only the rows between the first and the last one: mostly, people keep their order.
        first = int(number.min())
        rows = centers.rows(first, int(number.max()) + 1)
        if rows.shape[1] != weight.shape[1]:
            raise ModelError(
                f"{path}: its centers have {rows.shape[1]:,} numbers, the centers of the head {weight.shape[1]:,}; "
                "set model.embedding_size as in the other run"
            )
        chosen = rows[torch.from_numpy(number - first)]
        weight[torch.from_numpy(place).to(weight.device)] = chosen.to(weight)


def read_centers(path: Path) -> SavedCenters:
    """Return the class centers of a run, of arcface_torch's files (one per rank), or of AdaFace.

    Raises:
        ModelError: there are no centers, or centers of some ranks are missing.
        CheckpointError: the checkpoint is damaged, or the folder has none.
    """
    if path.is_dir() or (path.name == LATEST and path.is_file()):
        checkpoint, min_images = open_checkpoint(path), None
        with suppress(KeyError, TypeError):  # not written by a run
            min_images = checkpoint.meta["model"][CONFIG_KEY]["data"]["min_images_per_identity"]
        return SavedCenters(
            checkpoint.manifest.num_classes,
            lambda start, stop: checkpoint.rows("weight", start, stop),
            lambda: Names.from_tensors(checkpoint.replicated(IDENTITIES)),
            min_images,
        )
    if _RANK_FILE.fullmatch(path.name):
        return _read_arcface_torch_centers(path)
    columns = _matrix_in(path, "state_dict", _ADAFACE_CENTERS) if path.suffix == ".ckpt" else None
    if columns is None:
        raise ModelError(
            f"{path}: has no class centers; give a run folder, a checkpoint, arcface_torch's checkpoint_gpu_0.pt, or "
            f"AdaFace's .ckpt with {_ADAFACE_CENTERS}, or use head.init_from: reinit"
        )
    return SavedCenters(columns.shape[1], lambda start, stop: columns.T[start:stop].float())


def _read_arcface_torch_centers(path: Path) -> SavedCenters:
    """Join the shards that `PartialFC_V2` writes: consecutive classes, in the order of the ranks."""
    ranks = {
        int(match[1]): file for file in path.parent.iterdir() if (match := _RANK_FILE.fullmatch(file.name))
    }
    if sorted(ranks) != list(range(len(ranks))):
        raise ModelError(
            f"{path.parent}: has checkpoint_gpu_ files of ranks {', '.join(map(str, sorted(ranks)))}; "
            "add the files of all ranks from 0 on, because each has the centers of other classes"
        )
    shards = []
    for rank in range(len(ranks)):
        shard = _matrix_in(ranks[rank], "state_dict_softmax_fc", "weight")
        if shard is None:
            raise ModelError(f"{ranks[rank]}: has no matrix state_dict_softmax_fc.weight")
        shards.append(shard)
    sizes = [len(shard) for shard in shards]
    # PartialFC_V2 gives rank r of W ranks C // W classes, and one more if r < C % W.
    expected = [sum(sizes) // len(sizes) + (rank < sum(sizes) % len(sizes)) for rank in range(len(sizes))]
    if sizes != expected or len({shard.shape[1] for shard in shards}) > 1:
        raise ModelError(
            f"{path.parent}: the shards disagree on the number of classes or the length of the centers "
            f"({sizes} classes); files of several runs are mixed"
        )
    first_classes = np.cumsum([0, *sizes[:-1]]).tolist()

    def rows(start: int, stop: int) -> Tensor:
        # The shards are mapped into memory: joined as a whole, they would be copied on every rank.
        parts = zip(first_classes, shards, strict=True)
        return torch.cat([shard[max(start - first, 0) : max(stop - first, 0)] for first, shard in parts])

    return SavedCenters(sum(sizes), rows)


def _matrix_in(path: Path, section: str, name: str) -> Tensor | None:
    """Return a matrix of a section of a .pt file; None if the file has no such matrix."""
    value = load_without_code(path)
    state = value.get(section) if isinstance(value, dict) else None
    matrix = state.get(name) if isinstance(state, dict) else None
    if not isinstance(matrix, Tensor) or matrix.dim() != 2:
        return None
    require_stored(matrix, f"{path}: {name}")
    return matrix
