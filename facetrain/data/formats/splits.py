"""Files of Hugging Face's datasets: the split to train on, and the Arrow files of a folder."""

from __future__ import annotations

import re
from pathlib import Path

from facetrain.data.skipped_files import SkippedFile
from facetrain.errors import DataError
from facetrain.files import error_reason, listed, parse_json, read_regular_text

STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
_SPLIT = "train"
_SHARD = re.compile(r"(train|test|validation|valid|val|dev|eval)(?:\.\w+)*-\d{5}-of-\d{5}.*")
"""Name of a file of a split on Hugging Face's hub, also of a part of one, such as train.clean."""


def train_folder(path: Path) -> Path:
    """Return the folder of the split to train on, of a folder that `save_to_disk` wrote.

    Raises:
        DataError: it has several splits, and none is called train.
    """
    if not (path / SPLITS_FILE).exists():
        return path
    if (path / _SPLIT / STATE_FILE).exists():
        return path / _SPLIT
    raise _no_train(path, [one.parent.name for one in path.glob(f"*/{STATE_FILE}")])


def train_files(paths: list[Path]) -> tuple[list[Path], list[SkippedFile]]:
    """Return the files of the dataset to train on, and those that are left out: other splits, if there are several.

    A file without the name of a split, such as part1-00000-of-00001.parquet, belongs to the dataset.

    Raises:
        DataError: they belong to several splits, and none is called train.
    """
    split_of = {path: match[1] for path in paths if (match := _SHARD.fullmatch(path.name))}
    splits = set(split_of.values())
    if len(splits) < 2:
        return paths, []
    if _SPLIT not in splits:
        raise _no_train(paths[0].parent, splits)
    others = [path for path in paths if split_of.get(path, _SPLIT) != _SPLIT]
    skipped = [SkippedFile(path.name, "split", f"not a file of the split {_SPLIT!r}") for path in others]
    return [path for path in paths if path not in others], skipped


def data_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that `save_to_disk` wrote: those that its state.json lists.

    Raises:
        DataError: state.json is damaged, or the dataset is a selection of rows.
    """
    path = folder / STATE_FILE
    try:
        state = parse_json(read_regular_text(path))
        names = [entry["filename"] for entry in state["_data_files"]]
        if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise ValueError("_data_files must be names of files in the folder")
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise ValueError("it is a selection of rows; call flatten_indices() before save_to_disk()")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the state of a saved dataset: {error_reason(error)}") from None
    return [folder / name for name in names]


def _no_train(folder: Path, splits: list[str] | set[str]) -> DataError:
    return DataError(
        f"{folder}: has the splits {listed(sorted(splits))}, and none of them is {_SPLIT!r}; give a folder "
        "with one split"
    )
