"""Readers of all formats of datasets."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from facetrain.data.formats.base import Format
from facetrain.data.formats.names import SUFFIXES

FORMATS: tuple[Format, ...] = tuple(
    replace(import_module(f"{__package__}.{name}").FORMAT, suffixes=suffixes)
    for name, suffixes in SUFFIXES.items()
)
"""All formats in the order of precedence."""
