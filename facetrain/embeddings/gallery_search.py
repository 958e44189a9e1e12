"""Search for the most similar embeddings of a gallery, by scikit-learn's brute-force neighbors.

The gallery is read in blocks. scikit-learn finds the candidates of a block in float32; their cosines are then computed
in float64.
"""

# Q probes   q some of them   G gallery   g entries of one block   D embedding   K results   C candidates of a probe

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facetrain.embeddings.embeddings import Embeddings, warn_of_unknown_model
from facetrain.embeddings.model_fingerprint import is_same_model
from facetrain.embeddings.normalization import unit_rows
from facetrain.errors import DataError
from facetrain.progress import ProgressCallback, ignore_progress
from facetrain.telemetry.log import warn
from facetrain.text import count_text

_PROBES_PER_PASS = 4096
"""Probes that share one pass over the gallery."""
_PROBES_AT_ONCE = 256
"""Probes whose candidates are compared at once in float64."""
_GATHERED = 1 << 22
"""Numbers of candidates in memory at once: 32 MiB of float64, those of 256 probes at the default of 5 results."""
_SPARE = 16
"""Candidates of a block beyond the number of results: so many entries may be so close that float32 mixes them up."""
_FLOAT32_ERROR = 1e-5
"""Difference of two cosines that float32 may take for another one."""
_FLOAT64_ERROR = 1e-12
"""The same of float64, summed in another order."""


@dataclass(frozen=True)
class Found:
    """Best gallery entries of each probe, best first; entries of equal cosine in the order of their rows."""

    row_QK: np.ndarray
    """Rows of the gallery, int64 (Q, K); −1 where no further entry was found."""
    cosine_QK: np.ndarray
    """Cosine similarities, float64 (Q, K); −∞ where no further entry was found."""


def search_gallery(
    probes: Embeddings,
    gallery: Embeddings,
    count: int,
    *,
    among: np.ndarray | None = None,
    other_model: bool = False,
    progress: ProgressCallback = ignore_progress,
) -> Found:
    """Return the `count` gallery entries of the highest cosine for each probe; all entries if there are fewer.

    An embedding of zeros, as of an image without a face, has no direction: such a probe finds nothing, and such an
    entry is never found; a warning states their number.

    Needs memory for the results, 4,096 probes and one block of the gallery. `progress` is called with the number of
    comparisons.

    Args:
        probes: embeddings to search for.
        gallery: embeddings to search among.
        count: number of entries for each probe.
        among: True for the entries of the gallery that are searched, bool (G,); None for all.
        other_model: whether probes and gallery may be of two models, which must have been trained to fit together.
        progress: called after every block of the gallery.

    Raises:
        DataError: the embeddings are of different sizes or models, a file cannot be read, or a number is not finite.
    """
    _require_comparable(probes, gallery, other_model)
    among = np.ones(gallery.count, bool) if among is None else among
    kept = min(count, int(among.sum()))
    found = Found(np.full((probes.count, kept), -1), np.full((probes.count, kept), -np.inf))
    zero_probes = zero_entries = 0
    for first in range(0, probes.count, _PROBES_PER_PASS):
        probe_QD = unit_rows(probes.rows(first, first + _PROBES_PER_PASS))
        chosen = slice(first, first + len(probe_QD))
        best = Found(found.row_QK[chosen], found.cosine_QK[chosen])  # views
        is_zero_Q = ~probe_QD.any(1)
        zero_probes += int(is_zero_Q.sum())
        for start, entry_gD in gallery.blocks():
            among_g, has_direction_g = among[start : start + len(entry_gD)], entry_gD.any(1)
            row_g = start + np.flatnonzero(among_g & has_direction_g)
            if first == 0:
                zero_entries += int((among_g & ~has_direction_g).sum())
            if len(row_g):
                _add_block(probe_QD, unit_rows(entry_gD[row_g - start]), row_g, best)
            compared = first * gallery.count + (start + len(entry_gD)) * len(probe_QD)
            progress(compared, probes.count * gallery.count)
        best.row_QK[is_zero_Q], best.cosine_QK[is_zero_Q] = -1, -np.inf
    # The product of an embedding with itself may be rounded to a number above 1.
    np.minimum(found.cosine_QK, 1, out=found.cosine_QK)
    _warn_of_zeros(probes, zero_probes, "find nothing")
    _warn_of_zeros(gallery, zero_entries, "are never found")
    return found


def _warn_of_zeros(faces: Embeddings, zeros: int, effect: str) -> None:
    if zeros:
        warn(f"{faces.path}: {zeros:,} of {count_text(faces.count, 'image')} {effect}; embedding of zeros")


def _require_comparable(probes: Embeddings, gallery: Embeddings, other_model: bool) -> None:
    """Check that probes and gallery have embeddings of one size and, without `other_model`, of one model.

    Raises:
        DataError: they have not.
    """
    if gallery.size != probes.size:
        raise DataError(
            f"{gallery.path} has embeddings of size {gallery.size}, {probes.path} of size {probes.size}; embed both "
            "with one model"
        )
    if other_model:
        return
    warn_of_unknown_model(gallery)
    warn_of_unknown_model(probes)
    if not is_same_model(gallery.model, probes.model):
        raise DataError(
            f"{gallery.path} has embeddings of another model than {probes.path}, whose cosines mean nothing; embed "
            "both with one model, or give --other-model for models that were trained to fit together"
        )


def _add_block(probe_QD: np.ndarray, entry_gD: np.ndarray, row_g: np.ndarray, best: Found) -> None:
    """Replace results, in place, by better entries of a block; `row_g` are their rows in the gallery."""
    from sklearn.neighbors import NearestNeighbors

    neighbors = NearestNeighbors(algorithm="brute", metric="cosine").fit(entry_gD.astype(np.float32))
    kept = best.row_QK.shape[1]
    for start in range(0, len(probe_QD), _PROBES_AT_ONCE):
        part = slice(start, start + _PROBES_AT_ONCE)
        probe_qD, candidates = probe_QD[part], min(kept + _SPARE, len(entry_gD))
        entry_qC = neighbors.kneighbors(probe_qD.astype(np.float32), candidates, return_distance=False)
        cosine_qC = _cosines(probe_qD, entry_gD, entry_qC)
        if candidates < len(entry_gD):
            # A gallery with many copies of a face: other entries may be as close as the candidates.
            ranked_qC = np.sort(cosine_qC, axis=1)
            unclear_q = ranked_qC[:, -kept] - ranked_qC[:, 0] < _FLOAT32_ERROR
            for query in np.flatnonzero(unclear_q).tolist():
                entry_1C, cosine_1C = _nearest(probe_qD[query : query + 1], entry_gD, kept)
                _merge(best, slice(start + query, start + query + 1), row_g[entry_1C], cosine_1C)
                entry_qC[query], cosine_qC[query] = entry_1C[0, 0], -np.inf  # done
        _merge(best, part, row_g[entry_qC], cosine_qC)


def _cosines(probe_qD: np.ndarray, entry_gD: np.ndarray, entry_qC: np.ndarray) -> np.ndarray:
    """Return the cosine of each probe and each of its candidates, (q, C)."""
    step = max(1, _GATHERED // (entry_qC.shape[1] * entry_gD.shape[1]))
    parts = [slice(start, start + step) for start in range(0, len(probe_qD), step)]
    return np.concatenate(
        [np.einsum("qd,qcd->qc", probe_qD[part], entry_gD[entry_qC[part]]) for part in parts]
    )


def _nearest(probe_1D: np.ndarray, entry_gD: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all entries among which the `kept` nearest of a probe are, and their cosines: (1, C) each."""
    cosine_g = entry_gD @ probe_1D[0]
    # Equal entries have equal cosines, but not in a product of matrices.
    least = np.partition(cosine_g, -kept)[-kept] - _FLOAT64_ERROR
    entry_1C = np.flatnonzero(cosine_g >= least)[None]
    return entry_1C, np.einsum("qd,qcd->qc", probe_1D, entry_gD[entry_1C])


def _merge(best: Found, part: slice, row_qC: np.ndarray, cosine_qC: np.ndarray) -> None:
    """Replace the results of some probes, in place, by better candidates."""
    kept = best.row_QK.shape[1]
    row = np.concatenate([best.row_QK[part], row_qC], axis=1)
    cosine = np.concatenate([best.cosine_QK[part], cosine_qC], axis=1)
    # By cosine, and for equal cosines by row.
    order = np.lexsort((row, -cosine))[:, :kept]
    best.row_QK[part] = np.take_along_axis(row, order, 1)
    best.cosine_QK[part] = np.take_along_axis(cosine, order, 1)
