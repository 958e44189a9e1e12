"""Names of the formats of datasets. A new format is a module with a `FORMAT` and a line here.

It imports nothing, so that a config can be read without the readers.
"""

from __future__ import annotations

SUFFIXES: dict[str, tuple[str, ...]] = {
    "record_dataset": (".rec",),
    "lmdb_dataset": (".lmdb",),
    "webdataset": (".tar", ".tar.gz", ".tgz"),
    "parquet": (),
    "image_list": (".lst", ".txt", ".csv", ".tsv"),
    "image_folder": (),
}
"""Modules of this package in the order of precedence (any folder may be one of images), each with the suffixes of files
that are a dataset."""
MIXTURE_SUFFIXES = (".yaml", ".yml")
"""Suffixes of files that mix datasets."""
DATASET_SUFFIXES = (*MIXTURE_SUFFIXES, *(suffix for suffixes in SUFFIXES.values() for suffix in suffixes))
"""Suffixes of files that are a dataset each."""
