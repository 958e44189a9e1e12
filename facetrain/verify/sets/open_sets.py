"""Evaluation sets of every protocol, opened by path or by name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from facetrain.errors import PairsError
from facetrain.remote.address import is_remote
from facetrain.remote.download import local_path
from facetrain.verify.sets.ijb import IjbSet, open_ijb
from facetrain.verify.sets.pair_set import PairSet, is_set_name, load_pair_set, require_distinct_names
from facetrain.verify.sets.saved_pairs import open_saved_pairs
from facetrain.verify.sets.search_sets import SearchSet, open_tinyface

AnySet = PairSet | IjbSet | SearchSet


def open_set(target: str, folder: Path) -> AnySet:
    """Open a `.bin` set of pairs, or a folder in the layout of IJB, TinyFace or CVLface.

    `target` is a path, or a name in `folder`; for folders the name in upper case is tried too.

    Raises:
        PairsError: there is no such set, or it does not have the layout of its protocol.
    """
    if is_remote(target):
        target = str(local_path(target))
    places = () if is_set_name(target, folder) else (Path(target), folder / target, folder / target.upper())
    for path in filter(Path.is_dir, places):
        if path.name in ("", ".."):  # a set has the name of its folder, also of the current one, "."
            path = Path(os.path.abspath(path))
        name = path.name.lower()
        for open_layout in (open_ijb, open_tinyface, open_saved_pairs):
            found = open_layout(path, name)
            if found is not None:
                return found
        raise PairsError(
            f"{path}: unknown layout of an evaluation set; expected IJB (meta/ with lists), TinyFace "
            "(Gallery_Match/, Probe/) or a set of CVLface (state.json), see docs/evaluation.md; make pairs of a folder "
            "of images, or of a pair list and its images, with `facetrain data pairs`"
        )
    return load_pair_set(target, folder)


def open_sets(targets: Iterable[str], folder: Path) -> list[AnySet]:
    """Open several sets.

    Raises:
        PairsError: as `open_set`, or two sets have the same name, or that of IJB's 1:N protocol.
    """
    sets = [open_set(target, folder) for target in targets]
    searches = [one.search_name for one in sets if isinstance(one, IjbSet) and one.probes is not None]
    require_distinct_names([target.name for target in sets] + searches)
    return sets
