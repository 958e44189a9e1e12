"""Score files written from columns."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from facetrain.verify.metrics.scored_pairs import ScoredPairs


def write(path: Path, columns: Mapping[str, Any]) -> Path:
    """Write columns of equal length as a table with a header line; return the path."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
    return path


def columns_of(pairs: ScoredPairs, **more: Any) -> dict[str, Any]:
    """Return the columns of scored pairs with the two people of each, and further ones."""
    first, second = pairs.sides
    return {
        "score": [repr(float(score)) for score in pairs.score_P],
        "genuine": pairs.same_P.astype(int),
        "subject_1": first,
        "subject_2": second,
        **more,
    }
