"""Evaluation sets of CVLface: folders that `save_to_disk` of Hugging Face's `datasets` wrote, with Arrow files.

    state.json, dataset_info.json    names of the files
    data-00000-of-00001.arrow        a row for each image: image, is_same, index

Images 2i and 2i + 1 by the column `index` are a pair.
"""

# N images, two per pair

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.formats.arrow_columns import arrow_errors, image_fields, import_pyarrow
from facetrain.errors import PairsError
from facetrain.files import parse_json, read_regular_text
from facetrain.verify.sets.known_subjects import known_subjects
from facetrain.verify.sets.pair_set import PairSet

_COLUMNS = ("image", "is_same")


def open_saved_pairs(folder: Path, name: str) -> PairSet | None:
    """Read a saved set of pairs; return None for another folder.

    Raises:
        PairsError: the set lacks a column, has a selection of rows, or its rows are not pairs.
        DataError: pyarrow is not installed, or a file cannot be read.
    """
    state = folder / "state.json"
    if not state.is_file() or not (folder / "dataset_info.json").is_file():
        return None
    table = _read_table(folder, state)
    missing = [column for column in _COLUMNS if column not in table.schema.names]
    if missing:
        raise PairsError(
            f"{folder}: has no column {missing[0]}; a set of pairs has image and is_same; for IJB and TinyFace give "
            "folders as in docs/evaluation.md"
        )
    with arrow_errors(folder):
        table.validate(full=True)
        encoded = [image_fields(chunk)[0] for chunk in table["image"].chunks]
        if any(column is None for column in encoded):
            raise PairsError(
                f"{folder}: its column image has no bytes; save the set with its images embedded"
            )
        images = [image for column in encoded for image in column.to_pylist()]
        same_N = table["is_same"].to_numpy()
        if table["is_same"].null_count or same_N.dtype.kind not in "biu" or not np.isin(same_N, (0, 1)).all():
            raise PairsError(
                f"{folder}: its column is_same has a value other than true and false, or 1 and 0"
            )
        index_N = table["index"].to_numpy() if "index" in table.schema.names else np.arange(len(images))
        if index_N.dtype.kind not in "iu":  # as texts, 10 would be before 2
            raise PairsError(f"{folder}: its column index has a value other than whole numbers")
    given_N, rows_N = np.unique(index_N, return_counts=True)
    unpaired = given_N[(rows_N > 1) | ~np.isin(given_N ^ 1, given_N)]
    if "index" in table.schema.names and len(unpaired):
        # Sorted, the images behind it would be pairs of two pairs.
        raise PairsError(
            f"{folder}: its rows are not the images 2i and 2i + 1 of each pair by the column index, each once: see "
            f"index {unpaired[0]}; save the set again with whole pairs"
        )
    order = np.argsort(index_N)
    same_N, images = same_N[order], [images[at] for at in order.tolist()]
    if not len(images) or len(images) % 2 or (same_N[0::2] != same_N[1::2]).any():
        raise PairsError(
            f"{folder}: its {len(images):,} rows are not two images of each pair with one is_same"
        )
    if None in images:
        raise PairsError(
            f"{folder}: image {images.index(None)} has no bytes; save the set with its images embedded"
        )
    same_P = same_N[0::2].astype(bool)
    return PairSet(name, images, same_P, known_subjects(images, same_P), path=folder)


def _read_table(folder: Path, state: Path) -> Any:
    """Return the rows of all files."""
    pa = import_pyarrow(folder)
    with arrow_errors(state):
        content = parse_json(read_regular_text(state))
        files = content.get("_data_files") if isinstance(content, dict) else None
        if not isinstance(files, list) or not all(isinstance(entry, dict) for entry in files):
            raise PairsError(f"{state}: does not list the files of the set, under _data_files")
        if content.get("_indices_files"):
            raise PairsError(f"{folder}: has a selection of rows; save it again after flatten_indices()")
        names = [entry["filename"] for entry in files]
    tables = []
    for name in names:
        # A name from a file may not lead out of the folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise PairsError(f"{state}: the file name {name!r} is not in the folder")
        with arrow_errors(folder / name), (folder / name).open("rb") as file:
            tables.append(pa.ipc.open_stream(file).read_all())
    if not tables:
        raise PairsError(f"{folder}: has no files of rows")
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise PairsError(f"{folder}: its files have different columns; save the set again") from error
