"""Writers of zip archives, WebDataset and Parquet shards and LMDB databases, which the readers read back unchanged."""

from __future__ import annotations

import io
import itertools
import json
import struct
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from facetrain.data.formats.arrow_columns import import_pyarrow
from facetrain.data.formats.lmdb_dataset import IDENTITIES, KEYS, LENGTH, NUM_CLASSES
from facetrain.data.unique_names import unique_name
from facetrain.errors import DataError, missing_package

_TAR_IMAGES = 10_000
_PARQUET_IMAGES, _GROUP_IMAGES = 50_000, 1000
"""Images of a .parquet file and of a row group."""
_TRANSACTION_IMAGES = 1000
_MAP_BYTES = 1 << 40
"""Address space of a database; the file grows only as far as it is written."""


class LabeledImage(NamedTuple):
    """Encoded image as it is written."""

    name: str | None
    label: int
    data: bytes


def write_zip(path: Path, images: Iterable[LabeledImage], identities: list[str]) -> None:
    """Write an archive without compression, with the images' order and labels in labels.csv."""
    table = io.StringIO()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for image in images:
            assert image.name is not None, "an image of an archive has a name"
            # The time in a ZipInfo is fixed: the same images give the same file.
            archive.writestr(zipfile.ZipInfo(image.name), image.data)
            table.write(f"{image.name}\t{image.label}\n")
        archive.writestr(zipfile.ZipInfo("labels.tsv"), table.getvalue(), zipfile.ZIP_DEFLATED)


def write_webdataset(folder: Path, images: Iterable[LabeledImage], identities: list[str]) -> None:
    """Write .tar shards of images FOLDER/KEY.SUFFIX, each with its label in a .cls file; a key has no dot."""
    for number, shard in enumerate(_parts(images, _TAR_IMAGES)):
        with tarfile.open(folder / f"{number:06}.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            for image in shard:
                assert image.name is not None, "an image of a shard has a name"
                key = image.name.rpartition(".")[0]
                for name, data in ((image.name, image.data), (f"{key}.cls", str(image.label).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def write_parquet(folder: Path, images: Iterable[LabeledImage], identities: list[str]) -> None:
    """Write .parquet files with the columns image {bytes, path} and label, as Hugging Face's `datasets` names them."""
    pa = import_pyarrow(folder)
    import pyarrow.parquet

    is_named = identities != [str(label) for label in range(len(identities))]
    label_type = (
        {"names": identities, "_type": "ClassLabel"} if is_named else {"dtype": "int64", "_type": "Value"}
    )
    features = {"image": {"_type": "Image"}, "label": label_type}
    schema = pa.schema(
        {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()},
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    for number, part in enumerate(_parts(images, _PARQUET_IMAGES)):
        # Without compression and dictionary, so that images can be read in place.
        with pyarrow.parquet.ParquetWriter(
            folder / f"train-{number:05}.parquet", schema, compression="none", use_dictionary=False
        ) as writer:
            for group in _parts(part, _GROUP_IMAGES):
                rows = list(group)
                column = [{"bytes": image.data, "path": image.name} for image in rows]
                table = pa.table({"image": column, "label": [image.label for image in rows]}, schema=schema)
                writer.write_table(table, row_group_size=len(rows))


def write_lmdb(path: Path, images: Iterable[LabeledImage], identities: list[str]) -> None:
    """Write a database in the layout of HaiyuWu's trainers: (image, label) in msgpack; names are keys.

    Raises:
        DataError: the package lmdb is not installed, or it cannot write.
    """
    try:
        import lmdb
    except ImportError as error:
        raise DataError(f"{path}: {missing_package(error, 'lmdb')}") from error
    keys: list[bytes] = []
    taken = set[str]()
    try:
        with lmdb.open(str(path), map_size=_MAP_BYTES, subdir=False, lock=False) as database:
            for part in _parts(images, _TRANSACTION_IMAGES):
                with database.begin(write=True) as transaction:
                    for image in part:
                        keys.append(_key(image.name, len(keys), taken, database.max_key_size()))
                        transaction.put(keys[-1], b"\x92" + _packed(image.data) + _packed(image.label))
            with database.begin(write=True) as transaction:
                transaction.put(KEYS, _packed_list(keys))
                transaction.put(LENGTH, _packed(len(keys)))
                transaction.put(NUM_CLASSES, _packed(len(identities)))
                if identities != [str(label) for label in range(len(identities))]:
                    transaction.put(IDENTITIES, _packed_list([name.encode() for name in identities]))
    except lmdb.Error as error:
        raise DataError(f"{path}: the database cannot be written: {error}") from error


def _key(name: str | None, number: int, taken: set[str], most_bytes: int) -> bytes:
    """Return the name of an image as a key, with its number if the name is taken; its number without a usable name."""
    stem, dot, suffix = (name or "").rpartition(".")
    # Not of a folder: its dots are no beginning of a suffix.
    stem, suffix = (stem, dot + suffix) if dot and "/" not in suffix else (name or "", "")
    if not name or name.startswith("__") or name.encode("utf-8", "surrogateescape").isdigit():
        return str(number).encode()
    key = unique_name(stem, suffix, number, taken, ignore_case=False).encode("utf-8", "surrogateescape")
    return key if len(key) <= most_bytes else str(number).encode()


def _packed(value: bytes | int) -> bytes:
    """Return bytes or a whole number below 2^32 in msgpack."""
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    return bytes([value]) if value < 128 else b"\xce" + struct.pack(">I", value)


def _packed_list(values: list[bytes]) -> bytes:
    return b"\xdd" + struct.pack(">I", len(values)) + b"".join(map(_packed, values))


def _parts(images: Iterable[Any], size: int) -> Iterator[Iterator[Any]]:
    """Yield iterators over consecutive parts of at most `size` images; each must be used up before the next."""
    iterator = iter(images)
    for first in iterator:
        yield itertools.chain([first], itertools.islice(iterator, size - 1))
