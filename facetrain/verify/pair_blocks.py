"""Pairs summed by cell, for many draws of their subjects at once."""

# R draws   S subjects   P pairs   C cells

from __future__ import annotations

import numpy as np


class PairBlocks:
    """Which cell each pair falls into, and whose pair it is.

    A subject that was drawn w times brings its genuine pairs w times; a pair of two subjects comes as
    often as the product of both.
    """

    def __init__(self, cell_P: np.ndarray, cells: int, first_P: np.ndarray, second_P: np.ndarray) -> None:
        """Take the cell of every pair, and the subject of either side."""
        order = np.argsort(cell_P, kind="stable")
        self._cells = cells
        self._first = first_P[order]
        # A pair of one subject has the factor 1 for its other side, which stands behind all subjects.
        self._second = np.where(first_P == second_P, -1, second_P)[order]
        sorted_cells = cell_P[order]
        # reduceat cannot sum an empty range: only the cells that occur are summed.
        self._starts = np.flatnonzero(np.diff(sorted_cells, prepend=-1))
        self._occurring = sorted_cells[self._starts]

    def sums(self, drawn_RS: np.ndarray) -> np.ndarray:
        """Return how many pairs each cell has in each draw, float64 (R, C), from uint16 (R, S)."""
        sums_RC = np.zeros((len(drawn_RS), self._cells))
        if len(self._first):
            one_R1 = np.ones((len(drawn_RS), 1), np.uint16)
            drawn = np.concatenate([drawn_RS, one_R1], axis=1)
            times_RP = np.take(drawn, self._first, axis=1)
            times_RP *= np.take(drawn, self._second, axis=1, mode="wrap")
            sums_RC[:, self._occurring] = np.add.reduceat(times_RP, self._starts, axis=1, dtype=np.int64)
        return sums_RC


def every_subject_once(subjects: int = 1) -> np.ndarray:
    """Return the draw in which every subject comes once: the set as it is."""
    return np.ones((1, subjects), np.uint16)
