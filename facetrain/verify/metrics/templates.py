"""Template embeddings: several images of one person pooled into one, and scores of millions of template pairs."""

# N images   T templates   P pairs   D embedding

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from facetrain.distinct import distinct
from facetrain.embeddings.normalization import l2_normalize

_MAX_IMAGES = 1 << 15
"""Images that are pooled at once: 64 MiB of embeddings with 512 float32 numbers."""
_MAX_PRODUCTS = 1 << 24
"""Products in memory at once: 64 MiB of float32."""
_MOST_UNUSED = 256
"""Products of a matrix that take less time than the product of one pair by itself."""


def pool_templates(
    embedding_ND: np.ndarray, template_N: np.ndarray, media_N: np.ndarray, weight_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pool the embeddings of each template: return its id, int (T,) ascending, and unit embedding, float32 (T, D).

    Images of one template from one medium, such as the frames of a video, are averaged; the media of a template
    are summed, so that a long video counts as much as a photograph (Whitelam et al., "IARPA Janus Benchmark-B
    face dataset", 2017, and InsightFace's IJB code). The embeddings are not normalized before, because the
    length of an embedding reflects the image quality.

    Args:
        embedding_ND: embeddings, float32 (N, D).
        template_N: template id of each image, int (N,).
        media_N: medium id of each image within its template, int (N,).
        weight_N: factor of each image, the detector's score, float (N,).
    """
    # Sorted by template and medium, so that sums over neighbors pool both.
    order = np.lexsort((media_N, template_N))
    template, starts_T = np.unique(template_N[order], return_index=True)
    pooled_TD = np.empty((len(template), embedding_ND.shape[1]), np.float32)
    ends_T = np.append(starts_T[1:], len(order))
    for first, end in _template_ranges(ends_T, _MAX_IMAGES):
        rows = order[starts_T[first] : ends_T[end - 1]]
        embedding = embedding_ND[rows] * weight_N[rows, None].astype(np.float32)
        pooled_TD[first:end] = _pool(embedding, template_N[rows], media_N[rows])
    return template, l2_normalize(pooled_TD)


def _pool(embedding_ND: np.ndarray, template_N: np.ndarray, media_N: np.ndarray) -> np.ndarray:
    """Average over media, then sum over templates; the rows are sorted by template and medium."""
    new_template = np.diff(template_N, prepend=template_N[0] - 1) != 0
    new_medium = new_template | (np.diff(media_N, prepend=media_N[0]) != 0)
    starts = np.flatnonzero(new_medium)
    mean = np.add.reduceat(embedding_ND, starts, axis=0)
    mean /= np.diff(np.append(starts, len(embedding_ND)))[:, None]
    return np.add.reduceat(mean, np.flatnonzero(new_template[starts]), axis=0)


def _template_ranges(ends_T: np.ndarray, limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of templates with at most `limit` images in total; a larger template is a range by itself."""
    first = 0
    while first < len(ends_T):
        before = ends_T[first - 1] if first else 0
        end = max(int(np.searchsorted(ends_T, before + limit, side="right")), first + 1)
        yield first, end
        first = end


def score_pairs(
    first_TD: np.ndarray, second_TD: np.ndarray, first_P: np.ndarray, second_P: np.ndarray
) -> np.ndarray:
    """Return the cosine similarity of rows of `first_TD` and rows of `second_TD`, of length 1: float32 (P,).

    The pair lists of IJB compare a few thousand templates with nearly all others, so the scores are entries of blocks
    of one matrix product. A list with a small part of the pairs of its templates is computed pair by pair.
    """
    rows, columns = distinct(first_P), distinct(second_P)
    score_P = np.empty(len(first_P), np.float32)
    if len(rows) * len(columns) > _MOST_UNUSED * len(first_P):
        step = max(1, _MAX_PRODUCTS // first_TD.shape[1])
        for start in range(0, len(first_P), step):
            part = slice(start, start + step)
            score_P[part] = np.einsum("pd,pd->p", first_TD[first_P[part]], second_TD[second_P[part]])
        return score_P
    # The pairs of a block of rows are then neighbors.
    order = np.argsort(first_P, kind="stable")
    other_DC = np.ascontiguousarray(second_TD[columns].T)
    step = max(1, _MAX_PRODUCTS // len(columns))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        kept = order[slice(*np.searchsorted(first_P, [block[0], block[-1] + 1], sorter=order))]
        product = first_TD[block] @ other_DC
        row, column = np.searchsorted(block, first_P[kept]), np.searchsorted(columns, second_P[kept])
        score_P[kept] = product[row, column]
    return score_P
