"""Cross-group impostor matrix: the false match rate between people of two groups, for every two groups of a column."""

# P pairs   V groups

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from facetrain.verify.metrics.bootstrap import share

_MAX_GROUPS = 50
"""Most groups of a matrix; a column with more is no grouping of people."""


@dataclass(frozen=True)
class CrossGroups:
    """False match rates within and between the groups of people of one column, at one threshold."""

    column: str
    groups: list[str]
    """Names of the groups, in alphabetical order."""
    impostors_VV: np.ndarray
    """Number of impostor pairs of two groups, int (V, V), symmetric."""
    fmr_VV: np.ndarray
    """Share of them that is accepted, float (V, V); NaN without pairs."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields; a rate without pairs is None."""
        rates = [[None if np.isnan(rate) else rate for rate in row] for row in self.fmr_VV.tolist()]
        return {
            "column": self.column,
            "groups": self.groups,
            "fmr": rates,
            "impostors": self.impostors_VV.tolist(),
        }


def cross_groups(
    score_P: np.ndarray,
    same_P: np.ndarray,
    sides: tuple[np.ndarray, np.ndarray],
    threshold: float,
    column: str,
) -> CrossGroups | None:
    """Return the matrix of a column; None for fewer than two groups, or too many.

    FMR differs most between people of one group: auditors compare the diagonal with the rest (Grother, Ngan and
    Hanaoka, NISTIR 8280, 2019, "cross-region false match rates").

    Args:
        score_P: similarity scores, float (P,).
        same_P: True for a genuine pair, bool (P,).
        sides: group of the first and of the second image of each pair, str (P,) each; pairs with an empty one are left
            out.
        threshold: score from which pairs are accepted.
        column: name of the column.
    """
    known_P = (sides[0] != "") & (sides[1] != "")
    score_P, same_P = score_P[known_P], same_P[known_P]
    groups, group_2P = np.unique(np.concatenate([side[known_P] for side in sides]), return_inverse=True)
    if not 2 <= len(groups) <= _MAX_GROUPS:
        return None
    first_P, second_P = group_2P.reshape(2, -1)

    def count(chosen_P: np.ndarray) -> np.ndarray:
        cells = np.bincount(first_P[chosen_P] * len(groups) + second_P[chosen_P], minlength=len(groups) ** 2)
        count_VV = cells.reshape(len(groups), -1)
        # A pair has no order; a pair of one group is counted once.
        return np.asarray(count_VV + count_VV.T - np.diag(np.diag(count_VV)))

    impostors_VV, accepted_VV = count(~same_P), count(~same_P & (score_P >= threshold))
    return CrossGroups(column, groups.tolist(), impostors_VV, share(accepted_VV, impostors_VV))
