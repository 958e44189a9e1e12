"""Templates: several images of one person as one embedding, and millions of pairs of them compared."""

# N images   T templates   P pairs   D embedding

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_ROWS = 1 << 15
"""Images pooled at once: 64 MiB of embeddings with 512 numbers."""
_PRODUCTS = 1 << 24
"""Products held at once: 64 MiB."""
_DENSE = 64
"""A whole matrix of products is cheaper than single ones if at least one in so many is wanted."""


def pool_templates(
    embedding_ND: np.ndarray, template_N: np.ndarray, media_N: np.ndarray, weight_N: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the templates, ascending, and their unit embeddings: (T,), float32 (T, D).

    Images of one template that come from one medium, the frames of a video, are averaged; the media of a
    template are added. So a long video does not outweigh a photograph (IJB-B's evaluation code, and
    Whitelam et al., "IARPA Janus Benchmark-B face dataset", 2017). Lengths count: an image that the
    network is unsure of is short. `weight_N` is the detector's confidence in each image.
    """
    order = np.lexsort((media_N, template_N))
    template, starts_T = np.unique(template_N[order], return_index=True)
    pooled_TD = np.empty((len(template), embedding_ND.shape[1]), np.float32)
    ends_T = np.append(starts_T[1:], len(order))
    for first, past in _runs(ends_T, _ROWS):
        rows = order[starts_T[first] : ends_T[past - 1]]
        embedding = embedding_ND[rows]
        if weight_N is not None:
            embedding = embedding * weight_N[rows, None].astype(np.float32)
        pooled_TD[first:past] = _pool(embedding, template_N[rows], media_N[rows])
    return template, pooled_TD / np.maximum(np.linalg.norm(pooled_TD, axis=1, keepdims=True), 1e-12)


def _pool(embedding_ND: np.ndarray, template_N: np.ndarray, media_N: np.ndarray) -> np.ndarray:
    """ReaderPool rows that are sorted by template and medium."""
    new_template = np.diff(template_N, prepend=template_N[0] - 1) != 0
    new_medium = new_template | (np.diff(media_N, prepend=media_N[0]) != 0)
    starts = np.flatnonzero(new_medium)
    mean = np.add.reduceat(embedding_ND, starts, axis=0)
    mean /= np.diff(np.append(starts, len(embedding_ND)))[:, None]
    return np.add.reduceat(mean, np.flatnonzero(new_template[starts]), axis=0)


def _runs(ends_T: np.ndarray, limit: int) -> Iterator[tuple[int, int]]:
    """Cut templates into runs of at most `limit` images, or of one template that has more."""
    first = 0
    while first < len(ends_T):
        before = ends_T[first - 1] if first else 0
        past = max(int(np.searchsorted(ends_T, before + limit, side="right")), first + 1)
        yield first, past
        first = past


def score_pairs(unit_TD: np.ndarray, first_P: np.ndarray, second_P: np.ndarray) -> np.ndarray:
    """Return the cosine similarity of pairs of rows: float32 (P,).

    Lists like IJB-C's compare a few thousand templates with nearly all others. They are scored as blocks
    of one matrix product, of which the wanted ones are kept; short lists pair by pair.
    """
    rows, columns = np.unique(first_P), np.unique(second_P)
    if len(first_P) * _DENSE < len(rows) * len(columns):
        return _one_by_one(unit_TD, first_P, second_P)
    score_P = np.empty(len(first_P), np.float32)
    order = np.argsort(first_P, kind="stable")
    other_DC = np.ascontiguousarray(unit_TD[columns].T)
    step = max(1, _PRODUCTS // len(columns))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        kept = order[slice(*np.searchsorted(first_P, [block[0], block[-1] + 1], sorter=order))]
        product = unit_TD[block] @ other_DC
        row, column = np.searchsorted(block, first_P[kept]), np.searchsorted(columns, second_P[kept])
        score_P[kept] = product[row, column]
    return score_P


def _one_by_one(unit_TD: np.ndarray, first_P: np.ndarray, second_P: np.ndarray) -> np.ndarray:
    score_P = np.empty(len(first_P), np.float32)
    step = max(1, _PRODUCTS // unit_TD.shape[1])
    for start in range(0, len(first_P), step):
        part = slice(start, start + step)
        score_P[part] = np.einsum("pd,pd->p", unit_TD[first_P[part]], unit_TD[second_P[part]])
    return score_P
