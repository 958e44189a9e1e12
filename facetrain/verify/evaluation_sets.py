"""From the name of a set to the set, whatever its protocol."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from facetrain.errors import PairsError
from facetrain.verify.ijb import IjbSet, is_ijb, open_ijb
from facetrain.verify.pair_set import PairSet, load_pair_set
from facetrain.verify.search_sets import (
    DistractorSet,
    SearchSet,
    is_megaface,
    is_tinyface,
    open_megaface,
    open_tinyface,
)

EvaluationSet = PairSet | IjbSet | SearchSet | DistractorSet


def open_evaluation_set(target: str, folder: Path) -> EvaluationSet:
    """Open a set by its path or by its name in a folder: a .bin, or a folder laid out as IJB, TinyFace or MegaFace.

    Raises:
        PairsError: there is none, or it is not what its layout says.
    """
    # A name means a set of the folder: images that lie in ./lfw do not stand in the way of lfw.bin.
    named = Path(target).name == target and (folder / f"{target}.bin").is_file()
    for path in (Path(target), folder / target, folder / target.upper()):
        if named or not path.is_dir():
            continue
        name = path.name.lower()
        if is_ijb(path):
            return open_ijb(path, name)
        if is_tinyface(path):
            return open_tinyface(path, name)
        if is_megaface(path):
            return open_megaface(path, name)
        raise PairsError(
            f"{path}: a folder that is none of IJB (meta/ with lists), TinyFace (Gallery_Match/, Probe/) "
            "and MegaFace (probes/, distractors/); docs/evaluation.md shows each"
        )
    return load_pair_set(target, folder)


def open_evaluation_sets(targets: Iterable[str], folder: Path) -> list[EvaluationSet]:
    """Open several sets, which must have different names.

    Raises:
        PairsError: as `open_evaluation_set`, or two sets have the same name.
    """
    sets = [open_evaluation_set(target, folder) for target in targets]
    names = [found.name for found in sets]
    if len(set(names)) < len(names):
        raise PairsError(f"two sets have the same name: {', '.join(sorted(names))}")
    return sets
