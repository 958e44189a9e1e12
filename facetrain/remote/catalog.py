"""Catalog of detectors, models and datasets: where they can be had, under which terms, or why not.

`catalog.yaml` has what is about the files. Terms and sizes of a published dataset are those of its card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from facetrain.errors import UsageError
from facetrain.files import packaged_folder
from facetrain.strict_yaml import parse_yaml

CARD_FOLDER = packaged_folder(
    Path(__file__).parents[1] / "data" / "published_cards",
    Path(__file__).parents[2] / "datasets",
)
CARD_SUFFIX = ".card.yaml"


@dataclass(frozen=True)
class Entry:
    """Something that people ask for."""

    name: str
    kind: str
    """detector, model, verification set or training set."""
    about: str
    terms: str
    state: str
    """What was found on the date."""
    checked: date
    address: str | None = None
    """Address of the file; None if it cannot be downloaded without asking its owner."""
    file: str | None = None
    """Name of the file, where the address does not end with it."""
    bytes: int | None = None
    sha256: str | None = None
    card: str | None = None
    origin: str | None = None
    people: int | None = None
    images: int | None = None
    is_withdrawn: bool = False
    """Whether it is no longer handed out."""
    ask: str = ""
    """How to get it, or what to do with the file."""
    nearest: str | None = None
    """Name of the entry to take instead."""

    def require_address(self) -> str:
        """Return the address, with the checksum if it is known.

        Raises:
            UsageError: there is none.
        """
        if self.address is None:
            raise UsageError(f"{self.name}: {self.advice()}")
        return self.address + (f"#sha256={self.sha256}" if self.sha256 else "")

    def advice(self) -> str:
        """Return the state, and what to do about it."""
        parts = [f"{self.state} ({self.checked})", self.ask]
        if available := nearest_available(self):
            parts.append(f"nearest that can be had: facetrain get {available.name}")
        return "; ".join(filter(None, parts))


@cache
def catalog() -> Mapping[str, Entry]:
    """Return all entries by their names, in the order of the file."""
    content = parse_yaml(Path(__file__).with_name("catalog.yaml").read_text(encoding="utf-8"))
    return {name: _entry(name, fields) for name, fields in content.items()}


def nearest_available(entry: Entry) -> Entry | None:
    """Return the nearest entry that has an address; None if there is none."""
    while entry.nearest is not None:
        entry = catalog()[entry.nearest]
        if entry.address is not None:
            return entry
    return None


def _entry(name: str, fields: dict[str, Any]) -> Entry:
    card = fields.get("card")
    if card is None:
        return Entry(name=name, **fields)
    values = parse_yaml((CARD_FOLDER / f"{card}{CARD_SUFFIX}").read_text(encoding="utf-8"))
    numbers = {key: values.get(key) for key in ("origin", "people", "images")}
    return Entry(**({"name": name, "about": values["name"], "terms": values["license"]} | numbers | fields))
