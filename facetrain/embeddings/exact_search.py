"""Exact search for the most similar embeddings of a gallery, in blocks.

A block is scanned in float32. The cosines of all entries that may belong to the best ones, given the largest possible
rounding error, are then computed in float64. The result is the exact order by cosine and row, for blocks of any size.
"""

# Q probes   q probes of one block   G gallery   g entries of one block   D embedding   K results   C candidates

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from facetrain.embeddings.embedding_files import Embeddings
from facetrain.errors import DataError
from facetrain.progress import ProgressCallback, ignore_progress

_PROBES_PER_PASS = 4096
"""Probes that share one pass over the gallery."""
_PROBES_PER_BLOCK = 1024
_PAIRS_AT_ONCE = 4096
"""Candidates whose cosines are computed at once in float64."""


@dataclass(frozen=True)
class Found:
    """Best gallery entries of each probe, best first; entries of equal cosine in the order of their rows."""

    row_QK: np.ndarray
    """Rows of the gallery, int64 (Q, K)."""
    cosine_QK: np.ndarray
    """Cosine similarities, float64 (Q, K)."""


def search_exactly(
    probes: Embeddings,
    gallery: Embeddings,
    count: int,
    *,
    among: np.ndarray | None = None,
    progress: ProgressCallback = ignore_progress,
) -> Found:
    """Return the `count` gallery entries of the highest cosine for each probe; all entries if there are fewer.

    Needs memory for the results, 4,096 probes and one block of the gallery. `progress` is called with the number of
    comparisons.

    Args:
        probes: embeddings to search for.
        gallery: embeddings to search among.
        count: number of entries for each probe.
        among: True for the entries of the gallery that are searched, bool (G,); None for all.
        progress: called after every block of the gallery.

    Raises:
        DataError: the embeddings have different sizes, a file cannot be read, or a number is not finite.
    """
    _require_same_size(probes, gallery)
    among = np.ones(gallery.count, bool) if among is None else among
    kept = min(count, int(among.sum()))
    row_QK = np.full((probes.count, kept), -1, np.int64)
    cosine_QK = np.full((probes.count, kept), -np.inf)
    for first in range(0, probes.count, _PROBES_PER_PASS):
        probe_QD = unit_rows(probes.rows(first, first + _PROBES_PER_PASS))
        chosen = slice(first, first + len(probe_QD))
        for start, entry_gD in gallery.blocks():
            end = start + len(entry_gD)
            row_g = start + np.flatnonzero(among[start:end])
            if len(row_g):
                entry_gD = entry_gD if len(row_g) == len(entry_gD) else entry_gD[row_g - start]
                _add_block(probe_QD, entry_gD, row_g, row_QK[chosen], cosine_QK[chosen])
            compared = first * gallery.count + end * len(probe_QD)
            progress(compared, probes.count * gallery.count)
    return Found(row_QK, cosine_QK)


def _require_same_size(probes: Embeddings, gallery: Embeddings) -> None:
    """Check that probes and gallery can be compared.

    Raises:
        DataError: their embeddings have different sizes.
    """
    if gallery.size != probes.size:
        raise DataError(
            f"{gallery.path} has embeddings of size {gallery.size}, {probes.path} of size {probes.size}; embed both "
            "with one model"
        )


def unit_rows(row_ND: np.ndarray) -> np.ndarray:
    """Return rows scaled to length 1 in float64, (N, D); rows of zeros stay zero."""
    row_ND = row_ND.astype(np.float64)
    # Row by row: the same row has the same length in every block.
    return row_ND / np.maximum(np.sqrt(np.einsum("nd,nd->n", row_ND, row_ND)), 1e-12)[:, None]


def rescore(
    probe_QD: np.ndarray, entry_gD: np.ndarray, probe_C: np.ndarray, entry_C: np.ndarray
) -> np.ndarray:
    """Return the cosine of each candidate pair of a unit probe, float64 (Q, D), and a stored entry: float64 (C,)."""
    cosine_C = np.empty(len(probe_C))
    for start in range(0, len(probe_C), _PAIRS_AT_ONCE):
        part = slice(start, start + _PAIRS_AT_ONCE)
        cosine_C[part] = np.einsum("nd,nd->n", probe_QD[probe_C[part]], unit_rows(entry_gD[entry_C[part]]))
    return cosine_C


def float32_error(size: int) -> float:
    """Return the largest rounding error of the cosine of two embeddings of a size in float32.

    That of a dot product of unit vectors is at most (D + 2) ε, and the normalization of both factors adds to it
    (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1).
    """
    return (size + 8) * 2.0**-24


def _best_of_each(
    probe_C: np.ndarray, row_C: np.ndarray, cosine_C: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the candidates that are among the best `count` of their probe, and the position of each: int (C',) both.

    The order is by cosine, and for equal cosines by row.
    """
    order = np.lexsort((row_C, -cosine_C, probe_C))
    ordered = probe_C[order]
    position = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    best = position < count
    return order[best], position[best]


def _add_block(
    probe_QD: np.ndarray,
    entry_gD: np.ndarray,
    row_g: np.ndarray,
    row_QK: np.ndarray,
    cosine_QK: np.ndarray,
) -> None:
    """Replace results, in place, by better entries of a block; `row_g` are their rows in the gallery."""
    kept, error = row_QK.shape[1], float32_error(entry_gD.shape[1])
    entry = torch.from_numpy(entry_gD)
    length = torch.linalg.vector_norm(entry, dim=1, dtype=torch.float64, keepdim=True).clamp_min_(1e-12)
    unit = (entry / length).float() if length.max() > 1e18 else entry / length.float()
    for first in range(0, len(probe_QD), _PROBES_PER_BLOCK):
        part = slice(first, first + _PROBES_PER_BLOCK)
        probe_qD = probe_QD[part]
        floor_q = cosine_QK[part, -1] - 2 * error
        probe_C, entry_C = _scan(torch.from_numpy(probe_qD).float(), unit, floor_q, kept, error)
        if not len(probe_C):
            continue
        cosine_C = rescore(probe_qD, entry_gD, probe_C, entry_C)
        changed = np.unique(probe_C)
        probe_C = np.append(np.repeat(changed, kept), probe_C)
        row_C = np.append(row_QK[part][changed], row_g[entry_C])
        cosine_C = np.append(cosine_QK[part][changed], cosine_C)
        best, position = _best_of_each(probe_C, row_C, cosine_C, kept)
        row_QK[part][probe_C[best], position] = row_C[best]
        cosine_QK[part][probe_C[best], position] = cosine_C[best]


def _scan(
    probe_qD: Tensor, unit_gD: Tensor, floor_q: np.ndarray, kept: int, error: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of a probe and an entry that may be among the best `kept` ones of the probe: int64 (C,) both.

    Args:
        probe_qD: unit probes, float32.
        unit_gD: unit entries of the block, float32.
        floor_q: cosine below which no entry can be among the best, float64; −inf at first.
        kept: number of results.
        error: largest rounding error of a cosine in float32.
    """
    cosine_qg = probe_qD @ unit_gD.T
    # Most blocks have no candidates for most probes: one pass for the maxima is cheaper than a comparison of all.
    floor = torch.from_numpy(floor_q.astype(np.float32))
    probe = (cosine_qg.amax(1) >= floor).nonzero()[:, 0]
    if not len(probe):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if len(probe) < len(cosine_qg):
        cosine_qg, floor = cosine_qg[probe], floor[probe]
    candidate_qg = cosine_qg >= floor[:, None]
    if kept < len(unit_gD) and int(candidate_qg.sum()) > 4 * kept * len(probe):
        # The first block, or one with much better entries than those before it.
        lowest = cosine_qg.topk(kept, sorted=True).values[:, -1:] - 2 * error
        candidate_qg &= cosine_qg >= lowest
    pair_C2 = candidate_qg.nonzero()
    return probe[pair_C2[:, 0]].numpy(), pair_C2[:, 1].numpy()
