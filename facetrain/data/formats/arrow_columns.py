"""Columns of Parquet tables with images: which they are, and the labels and names in them."""

# N images

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.formats.labels import number_identities, require_labels, require_names
from facetrain.distinct import distinct
from facetrain.errors import DataError, missing_package
from facetrain.files import damage_reason, parse_json
from facetrain.text import count_text, listed, printable

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "image_bytes", "bytes")
LABEL_COLUMNS = ("label", "identity", "class", "cls", "id")
_NUMBERS = ("integer", "floating")
_TEXTS = ("string", "large_string", "string_view")
_BYTES = ("binary", "large_binary", "binary_view")
_METADATA = b"huggingface"
"""Key of the schema's metadata under which `datasets` stores the types of the columns."""


def import_pyarrow(path: Path) -> Any:
    """Return the package pyarrow.

    Raises:
        DataError: it is not installed; the message begins with `path`.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path}: {missing_package(error, 'parquet')}") from error
    return pyarrow


@contextlib.contextmanager
def arrow_errors(path: Path) -> Iterator[None]:
    """Turn errors of pyarrow and of the operating system into DataError, with the path of the file."""
    pa = import_pyarrow(path)
    try:
        yield
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path}: {printable(damage_reason(error))}") from error


def image_fields(column: Any) -> tuple[Any, Any]:
    """Return the columns of the images and of their paths of an image column: bytes, or a struct {bytes, path}.

    A column is None if there is none, or if its values are not bytes or texts.
    """
    from pyarrow import types

    fields = {"bytes": column}
    if types.is_struct(column.type):
        fields = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
    images, paths = fields.get("bytes"), fields.get("path")
    if images is not None and not _is_any(images.type, _BYTES):
        images = None
    return images, paths if paths is not None and _is_any(paths.type, _TEXTS) else None


def pick_column(names: list[str], wanted: tuple[str, ...], what: str, path: Path) -> str:
    """Return the first of the wanted columns that a table has.

    Raises:
        DataError: it has none of them.
    """
    for name in wanted:
        if name in names:
            return name
    raise DataError(
        f"{path}: no column for the {what}: it has {listed(names)}; rename one to {' or '.join(wanted)}"
    )


def label_values(column: Any, name: str, path: Path) -> np.ndarray:
    """Return the values of a column of labels, (N,); texts as objects, of which rows with equal labels share one.

    Raises:
        DataError: a label is missing, or is neither a number nor a text.
    """
    if column.null_count:
        raise DataError(f"{path}: {count_text(column.null_count, 'row has', 'rows have')} no label")
    # Before they are converted: dates have a wider range than in Python, and pyarrow ends the process on some types.
    if not _is_any(column.type, _NUMBERS + _TEXTS + _BYTES):
        raise DataError(
            f"{path}: column {printable(name)} has values of type {printable(str(column.type))[:100]}; expected whole "
            "numbers or texts"
        )
    if _is_any(column.type, _NUMBERS):
        return np.asarray(column.to_numpy())
    # Not an array of texts: each of them would be as long as the longest.
    shared: dict[Any, Any] = {}
    values = (shared.setdefault(value, value) for chunk in column.chunks for value in chunk.to_pylist())
    return np.fromiter(values, object, len(column))


def class_names(schema: Any, column: str) -> list[str]:
    """Return the names that `datasets` stores for the labels of a column (ClassLabel); empty without them.

    Names that are the labels themselves are none: so it numbers a given count of labels.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError):
        features = parse_json(schema.metadata[_METADATA].decode())["info"]["features"]
        if isinstance(features[column]["names"], list):
            names = [str(name) for name in features[column]["names"]]
            return names if names != [str(label) for label in range(len(names))] else []
    return []


def number_labels(values: np.ndarray, names: list[str], place: object) -> tuple[np.ndarray, list[str]]:
    """Return values of `label_values` as labels, int32 (N,), and the names of the labels.

    Args:
        values: numbers or texts, (N,).
        names: names of the numbers, if the values are numbers.
        place: beginning of messages.

    Raises:
        DataError: a label is negative, too large or not whole, or `require_names` refuses the name of one.
    """
    if values.dtype.kind in "iuf":
        labels = require_labels(values, place)
        present = distinct(labels).tolist() if names else []
        require_names((names[label] for label in present if label < len(names)), place)
        return labels, names
    texts = [
        value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value for value in values
    ]
    return number_identities(texts, place)


def _is_any(kind: Any, names: tuple[str, ...]) -> bool:
    """Return whether values of a type of pyarrow, in a dictionary or not, are of one of these kinds."""
    from pyarrow import types

    values = kind.value_type if types.is_dictionary(kind) else kind
    return any(getattr(types, f"is_{name}")(values) for name in names)
