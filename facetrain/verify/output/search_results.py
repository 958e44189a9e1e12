"""Results of a search by name: the gallery entries that were found for each probe."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facetrain.embeddings.embedding_files import Embeddings
from facetrain.embeddings.exact_search import Found
from facetrain.errors import UsageError
from facetrain.files import os_errors_as, spreadsheet_text

_ROUNDING = 1e-12
"""Tolerance of `lowest`: the cosine of an embedding with itself is 1 up to float64 rounding."""


@dataclass(frozen=True)
class SearchResults:
    """Names, labels and cosines of the entries found; they are looked up in each iteration, so none take memory."""

    found: Found
    probes: Embeddings
    gallery: Embeddings
    lowest: float | None = None
    """Smallest cosine of a result; None: all results."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the name of each probe, and the entries that were found for it."""
        for probe, rows in enumerate(self.found.row_QK):
            cosines = self.found.cosine_QK[probe].tolist()
            yield {
                "probe": self.probes.name[probe],
                "found": [
                    {
                        "name": self.gallery.name[row],
                        "label": int(self.gallery.label[row]),
                        "cosine": cosine,
                        "row": row,
                    }
                    for row, cosine in zip(rows.tolist(), cosines, strict=True)
                    if self.lowest is None or cosine >= self.lowest - _ROUNDING
                ],
            }

    def write_csv(self, path: Path) -> None:
        """Write one line per entry found.

        Raises:
            UsageError: the file cannot be written.
        """
        with os_errors_as(UsageError, path), path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["probe", "rank", "name", "label", "cosine", "row"])
            for result in self:
                for rank, entry in enumerate(result["found"], start=1):
                    probe, name = spreadsheet_text(result["probe"]), spreadsheet_text(entry["name"])
                    writer.writerow(
                        [probe, rank, name, entry["label"], f"{entry['cosine']:.6f}", entry["row"]]
                    )
