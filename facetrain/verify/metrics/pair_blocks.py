"""Numbers of pairs per block, for many bootstrap draws of their subjects at once."""

# R draws   S subjects   P pairs   B blocks

from __future__ import annotations

import numpy as np


class PairBlocks:
    """Pairs sorted into blocks, for example one block per fold and threshold step.

    A draw gives each subject a multiplicity w. A genuine pair then counts w times, and an impostor pair
    the product of the multiplicities of its two subjects (the vertex bootstrap, see `bootstrap`).
    """

    def __init__(self, block_P: np.ndarray, blocks: int, first_P: np.ndarray, second_P: np.ndarray) -> None:
        """Sort the pairs by block.

        Args:
            block_P: block of each pair, int (P,) in [0, blocks).
            blocks: number of blocks.
            first_P: subject id of the first side of each pair, int (P,).
            second_P: subject id of the second side.
        """
        order = np.argsort(block_P, kind="stable")
        self._blocks = blocks
        self._first = first_P[order]
        # A genuine pair has the factor 1 for its second side: index −1 is the column of ones in `counts`.
        self._second = np.where(first_P == second_P, -1, second_P)[order]
        sorted_blocks = block_P[order]
        # np.add.reduceat cannot sum an empty range, so only blocks with pairs are summed.
        self._starts = np.flatnonzero(np.diff(sorted_blocks, prepend=-1))
        self._nonempty = sorted_blocks[self._starts]

    def counts(self, drawn_RS: np.ndarray) -> np.ndarray:
        """Return the number of pairs in each block for each draw: uint16 (R, S) -> float64 (R, B)."""
        count_RB = np.zeros((len(drawn_RS), self._blocks))
        if len(self._first):
            one_R1 = np.ones((len(drawn_RS), 1), np.uint16)
            drawn = np.concatenate([drawn_RS, one_R1], axis=1)
            weight_RP = np.take(drawn, self._first, axis=1)
            weight_RP *= np.take(drawn, self._second, axis=1, mode="wrap")
            count_RB[:, self._nonempty] = np.add.reduceat(weight_RP, self._starts, axis=1, dtype=np.int64)
        return count_RB


def every_subject_once(subjects: int = 1) -> np.ndarray:
    """Return the draw that has every subject once, which is the set itself: uint16 (1, S)."""
    return np.ones((1, subjects), np.uint16)
