"""Writers of WebDataset and Parquet shards, which the readers read back unchanged."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from facetrain.data.formats.arrow_columns import import_pyarrow

_TAR_IMAGES = 10_000
_PARQUET_IMAGES, _GROUP_IMAGES = 50_000, 1000
"""Images of a .parquet file and of a row group."""


class LabeledImage(NamedTuple):
    """Encoded image as it is written."""

    name: str | None
    label: int
    data: bytes


def write_webdataset(folder: Path, images: Iterable[LabeledImage], identities: list[str]) -> None:
    """Write .tar shards of images KEY.SUFFIX, each with its label in a .cls file; a key has no dot."""
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
    schema = pa.schema({"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()})
    described = {"huggingface": json.dumps({"info": {"features": features}})}
    for number, part in enumerate(_parts(images, _PARQUET_IMAGES)):
        # Without compression and dictionary, so that images can be read in place. Without a copy of the schema, which
        # would have the names a second time: they can be millions.
        with pyarrow.parquet.ParquetWriter(
            folder / f"train-{number:05}.parquet",
            schema,
            compression="none",
            use_dictionary=False,
            store_schema=False,
            write_page_checksum=True,
        ) as writer:
            writer.add_key_value_metadata(described)
            for group in _parts(part, _GROUP_IMAGES):
                rows = list(group)
                column = [{"bytes": image.data, "path": image.name} for image in rows]
                table = pa.table({"image": column, "label": [image.label for image in rows]}, schema=schema)
                writer.write_table(table, row_group_size=len(rows))


def _parts(images: Iterable[Any], size: int) -> Iterator[Iterator[Any]]:
    """Yield iterators over consecutive parts of at most `size` images; each must be used up before the next."""
    iterator = iter(images)
    for first in iterator:
        yield itertools.chain([first], itertools.islice(iterator, size - 1))
