"""Columns of Arrow and Parquet tables with images: which they are, and the labels and names in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.formats.base import MAX_LABEL
from facetrain.errors import DataError, missing_package
from facetrain.files import error_reason, listed, open_regular, parse_json, printable

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "image_bytes", "bytes")
LABEL_COLUMNS = ("label", "identity", "class", "cls", "id")
_LABEL_KINDS = (
    "boolean", "integer", "floating", "decimal",
    "string", "large_string", "string_view", "binary", "large_binary", "binary_view",
)  # fmt: skip
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
        raise DataError(f"{path}: {error_reason(error)}") from error


def arrow_batches(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of a file in Arrow's stream format, and the buffer that is the whole file in memory.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    pa = import_pyarrow(path)
    with arrow_errors(path):
        os.close(open_regular(path))
        with pa.memory_map(str(path)) as mapped:
            file = mapped.read_buffer()
            mapped.seek(0)
            for batch in pa.ipc.open_stream(mapped):
                # Before any column is used: pyarrow ends the process on lengths and offsets that do not fit.
                batch.validate(full=True)
                yield batch, file


def image_fields(column: Any) -> tuple[Any, Any]:
    """Return the arrays of the images and of their paths of an image column: bytes, or a struct {bytes, path}.

    The paths are None without the field, or if they are no texts. So are the images.
    """
    types = import_pyarrow(Path()).types
    fields = {"bytes": column, "path": None}
    if types.is_struct(column.type):
        names = [column.type.field(number).name for number in range(column.type.num_fields)]
        fields = {"bytes": None, "path": None} | dict(zip(names, column.flatten(), strict=True))
    images, paths = fields["bytes"], fields["path"]
    if images is not None and types.is_dictionary(images.type):
        images = images.dictionary_decode()
    if images is not None and not (types.is_binary(images.type) or types.is_large_binary(images.type)):
        images = None
    return images, paths if paths is not None and is_text(paths.type) else None


def value_places(array: Any) -> tuple[np.ndarray, Any]:
    """Return the first byte and the size of each value of an array of bytes or texts, and the buffer that they are in.

    The places are int64 (N, 2); the size of a null is −1, and the buffer None if there are no bytes.

    Raises:
        ValueError: a place is outside of the buffer.
    """
    _, offsets, data = array.buffers()
    places = np.zeros((len(array), 2), np.int64)
    if data is not None and len(array):
        width = np.int64 if str(array.type).startswith("large_") else np.int32
        ends = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1].astype(np.int64)
        places[:, 0], places[:, 1] = ends[:-1], np.diff(ends)
        if ends[0] < 0 or ends[-1] > data.size or (places[:, 1] < 0).any():
            raise ValueError("a column is damaged")
    if array.null_count:
        places[array.is_null().to_numpy(zero_copy_only=False), 1] = -1
    return places, data


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


def require_labels(kind: Any, name: str, path: Path) -> None:
    """Check that values of a type of pyarrow can be labels, before they are converted.

    Dates and durations have a wider range than in Python, and pyarrow ends the process on some types.

    Raises:
        DataError: they are neither numbers nor texts; the message names the column and begins with `path`.
    """
    types = import_pyarrow(path).types
    values = kind.value_type if types.is_dictionary(kind) else kind
    if not any(getattr(types, f"is_{kind_name}")(values) for kind_name in _LABEL_KINDS):
        raise DataError(
            f"{path}: column {printable(name)} has values of type {printable(str(values))[:100]}; expected whole "
            "numbers or texts"
        )


def is_text(kind: Any) -> bool:
    """Return whether the values of a type of pyarrow are texts, in a dictionary or not."""
    from pyarrow import types

    values = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(values) or types.is_large_string(values)


def decoded_bytes(column: Any) -> int:
    """Return the bytes of a column of pyarrow, of texts, images or structs of them, without its dictionaries."""
    import pyarrow as pa
    import pyarrow.compute

    if isinstance(column, pa.ChunkedArray):
        return sum(map(decoded_bytes, column.chunks))
    if pa.types.is_struct(column.type):
        return sum(map(decoded_bytes, column.flatten()))
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    size = pyarrow.compute.binary_length(column.dictionary).to_numpy(zero_copy_only=False)
    return int(size[column.indices.drop_null().to_numpy(zero_copy_only=False)].sum())


def class_names(schema: Any, column: str) -> list[str]:
    """Return the names that `datasets` stores for the labels of a column (ClassLabel); empty without them."""
    with contextlib.suppress(ValueError, KeyError, TypeError, UnicodeDecodeError):
        features = parse_json((schema.metadata or {})[_METADATA].decode())["info"]["features"]
        names = features[column]["names"]
        if isinstance(names, list):
            return [str(name) for name in names]
    return []


def require_equal_names(names: list[str], path: Path, other_names: list[str], other_path: Path) -> None:
    """Check that two files of a dataset have the same names for the numbers of their identities.

    Raises:
        DataError: the names differ; the message has the first difference.
    """
    if names == other_names:
        return
    pairs = zip_longest(names, other_names)
    number, pair = next((number, pair) for number, pair in enumerate(pairs) if pair[0] != pair[1])
    first, second = ("no name" if name is None else repr(listed([name])) for name in pair)
    raise DataError(
        f"{path} and {other_path}: their labels have different names: {number} is {first} in one and {second} in the "
        "other; write them as one dataset, or put them into two folders and train on a mixture of them"
    )


def number_labels(labels: np.ndarray, names: list[str], place: Path) -> tuple[np.ndarray, list[str]]:
    """Return the labels, int32 (N,), and the names of the identities; empty without names.

    Whole numbers are labels, with the given names, also if they are stored as floats. Texts are numbered in sorted
    order.

    Raises:
        DataError: a label is negative, too large or not whole; the message begins with `place`.
    """
    if labels.dtype.kind in "iuf":
        if len(not_whole := np.flatnonzero(labels != np.floor(labels))):
            raise DataError(
                f"{place}: the label of row {not_whole[0]:,} is {labels[not_whole[0]]}; expected whole numbers or texts"
            )
        # As float: the limit is beyond the largest number of 16 bits.
        if len(labels) and not 0 <= float(labels.min()) <= float(labels.max()) < MAX_LABEL:
            raise DataError(
                f"{place}: the labels range from {labels.min()} to {labels.max()}; they must be from 0 to 2^31"
            )
        return labels.astype(np.int32), names
    # Not an array of texts: each of them would be as long as the longest.
    texts = [label_text(value) for value in labels.tolist()]
    distinct = sorted(set(texts))
    number_of = {text: number for number, text in enumerate(distinct)}
    return np.fromiter((number_of[text] for text in texts), np.int32, len(texts)), distinct


def label_values(column: Any, name: str, path: Path) -> np.ndarray:
    """Return the values of a column of labels, (N,); texts as objects, of which rows with equal labels share one.

    Raises:
        DataError: a label is missing, or is neither a number nor a text.
    """
    types = import_pyarrow(path).types
    if column.null_count:
        raise DataError(f"{path}: {column.null_count:,} rows have no label")
    require_labels(column.type, name, path)
    if not (is_text(column.type) or types.is_binary(column.type) or types.is_dictionary(column.type)):
        return column.to_numpy()
    parts = [np.empty(0, object)]
    for chunk in column.chunks:
        encoded = chunk if types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        texts = np.array([*map(label_text, encoded.dictionary.to_pylist())], object)
        parts.append(texts[encoded.indices.to_numpy()])
    return np.concatenate(parts)


def label_text(value: Any) -> str:
    """Return the text of a label; some programs write texts as bytes."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
