"""Table of the formats of datasets. A new format is a module with a `FORMAT` and a line here."""

from __future__ import annotations

from importlib import import_module

from facetrain.data.formats.base import Format

_MODULES = (
    "record_dataset",
    "lmdb_dataset",
    "webdataset",
    "parquet",
    "image_list",
    "image_folder",
)
"""Modules of this package in the order of precedence; any folder may be one of images."""

FORMATS: tuple[Format, ...] = tuple(import_module(f"{__package__}.{name}").FORMAT for name in _MODULES)
