"""Verification sets: images two by two, and whether each pair shows one person."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin import read_bin
from facetrain.errors import PairsError


@dataclass(frozen=True)
class PairSet:
    """A verification set; images 2i and 2i+1 are pair i."""

    name: str
    images: list[bytes]
    same: np.ndarray
    """bool (pairs,)"""
    subject: np.ndarray | None = None
    """Who is in each image, int (images,) from 0 without gaps, where something tells."""


def load_pair_set(target: str, folder: Path) -> PairSet:
    """Read a .bin set by its path, or by its name in a folder.

    Raises:
        PairsError: there is none, with the names that there are; or it is not such a set.
    """
    path = Path(target)
    if path.suffix != ".bin":
        path = folder / f"{target}.bin"
    if not path.exists():
        there = sorted(p.stem for p in path.parent.glob("*.bin")) if path.parent.is_dir() else []
        hint = f"there are {', '.join(there)}" if there else f"{path.parent} holds no .bin files"
        raise PairsError(f"{path}: no such verification set; {hint}")
    images, same = read_bin(path)
    return PairSet(path.stem, images, same)


def load_pair_sets(targets: Iterable[str], folder: Path, made: Sequence[PairSet] = ()) -> list[PairSet]:
    """Read several sets, which must have different names; those that are `made` have no files.

    Raises:
        PairsError: as `load_pair_set`, or two sets have the same name.
    """
    by_name = {pairs.name: pairs for pairs in made}
    sets = [by_name.get(target) or load_pair_set(target, folder) for target in targets]
    names = [pairs.name for pairs in sets]
    if len(set(names)) < len(names):
        raise PairsError(f"two verification sets have the same name: {', '.join(sorted(names))}")
    return sets
