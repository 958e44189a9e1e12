"""Evaluation sets of every protocol, opened by path or by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from facetrain.errors import PairsError
from facetrain.verify.ijb import IjbSet, is_ijb, open_ijb
from facetrain.verify.pair_set import PairSet, load_pair_set, require_distinct_names
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
    """Open a `.bin` file, or a folder in the layout of IJB, TinyFace or MegaFace.

    `target` is a path, or a name in `folder`; for folders the name in upper case is tried too.

    Raises:
        PairsError: there is no such set, or it does not have the layout of its protocol.
    """
    # A name prefers the .bin file of the data folder: a folder ./lfw of images must not hide lfw.bin.
    is_bin_name = Path(target).name == target and (folder / f"{target}.bin").is_file()
    for path in (Path(target), folder / target, folder / target.upper()):
        if is_bin_name or not path.is_dir():
            continue
        name = path.name.lower()
        if is_ijb(path):
            return open_ijb(path, name)
        if is_tinyface(path):
            return open_tinyface(path, name)
        if is_megaface(path):
            return open_megaface(path, name)
        raise PairsError(
            f"{path}: unknown layout of an evaluation set; expected IJB (meta/ with lists), TinyFace "
            "(Gallery_Match/, Probe/) or MegaFace (probes/, distractors/), see docs/evaluation.md"
        )
    return load_pair_set(target, folder)


def open_evaluation_sets(targets: Iterable[str], folder: Path) -> list[EvaluationSet]:
    """Open several sets.

    Raises:
        PairsError: as `open_evaluation_set`, or two sets have the same name.
    """
    sets = [open_evaluation_set(target, folder) for target in targets]
    require_distinct_names([one.name for one in sets])
    return sets
