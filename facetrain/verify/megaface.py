"""MegaFace's protocol: a person's other image searched among up to a million strangers."""

# Q probes   N distractors   D embedding   M pairs of a probe and its mate   Z sizes   R draws of subjects

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from facetrain.verify import bootstrap
from facetrain.verify.result import Result
from facetrain.verify.scored_pairs import REPLICATES, add_replicates

RANKS = (1, 10)
_AT_ONCE = 1 << 24
"""Similarities held at once: 64 MiB."""


def distractor_counts(distractors: int) -> list[int]:
    """Return the sizes of gallery that are told: 10, 100, … and all."""
    powers = [10**power for power in range(1, 10) if 10**power < distractors]
    return [*powers, distractors]


def megaface_result(
    probe_QD: np.ndarray,
    subject_Q: np.ndarray,
    distractor_ND: np.ndarray,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Result:
    """Search every image of a person with every other one as the only mate among distractors.

    The protocol of Kemelmacher-Shlizerman et al., "The MegaFace benchmark", 2016: `rank1` is the share
    of searches whose mate comes before all distractors, `rank1@1000` that among the first 1000 of them.
    Embeddings have length 1.
    """
    mates = mate_pairs(subject_Q)
    sizes = distractor_counts(len(distractor_ND))
    rank_ZM = count_closer_distractors(probe_QD, distractor_ND, mates, sizes)
    owner_M = subject_Q[mates[0]]
    subjects = int(subject_Q.max()) + 1
    result = Result("distractors", {"searches": float(len(owner_M))}, subjects=subjects)
    result.metrics["distractors"] = float(len(distractor_ND))
    hits = {
        f"rank{rank}" if size == sizes[-1] else f"rank{rank}@{size}": rank_ZM[row] < rank
        for row, size in enumerate(sizes)
        for rank in RANKS
    }
    result.metrics |= {name: float(hit_M.mean()) for name, hit_M in hits.items()}
    count_S = np.bincount(owner_M, minlength=subjects)
    hit_SH = np.stack(
        [np.bincount(owner_M, weights=hit, minlength=subjects) for hit in hits.values()], axis=1
    )
    drawn = bootstrap.draw_subjects(subjects, replicates, pairs=subjects, seed=seed)
    rates = [_rates(drawn_RS.astype(np.float64), count_S, hit_SH) for drawn_RS in drawn]
    if rates:
        add_replicates(result, dict(zip(hits, np.concatenate(rates).T, strict=True)))
    return result


def _rates(drawn_RS: np.ndarray, count_S: np.ndarray, hit_SH: np.ndarray) -> np.ndarray:
    count_R1 = (drawn_RS @ count_S)[:, None]
    hit_RH = drawn_RS @ hit_SH
    return np.divide(hit_RH, count_R1, out=np.full(hit_RH.shape, np.nan), where=count_R1 > 0)


def mate_pairs(subject_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return every ordered pair of two images of one subject: int (M,) twice."""
    order = np.argsort(subject_Q, kind="stable")
    runs = np.split(order, np.flatnonzero(np.diff(subject_Q[order])) + 1)
    probe = [np.repeat(run, len(run) - 1) for run in runs]
    mate = [np.concatenate([np.delete(run, at) for at in range(len(run))]) for run in runs]
    return np.concatenate(probe), np.concatenate(mate)


def count_closer_distractors(
    probe_QD: np.ndarray, distractor_ND: np.ndarray, mates: tuple[np.ndarray, np.ndarray], sizes: list[int]
) -> np.ndarray:
    """Return how many of the first `size` distractors are at least as alike as the mate: int (Z, M).

    Counting ends at the largest of `RANKS`: only a probe's most alike distractors are kept.
    """
    probe_M, mate_M = mates
    similarity_M = np.einsum("md,md->m", probe_QD[probe_M], probe_QD[mate_M])
    nearest_QK = np.full((len(probe_QD), max(RANKS)), -np.inf, np.float32)
    ranks = []
    for start, past in _parts(len(probe_QD), sizes):
        similarity = np.concatenate([nearest_QK, probe_QD @ distractor_ND[start:past].T], axis=1)
        nearest_QK = np.partition(similarity, -max(RANKS), axis=1)[:, -max(RANKS) :]
        if past in sizes:
            ranks.append(np.count_nonzero(nearest_QK[probe_M] >= similarity_M[:, None], axis=1))
    return np.stack(ranks)


def _parts(probes: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    step = max(1, _AT_ONCE // max(probes, 1))
    start = 0
    for size in sizes:
        while start < size:
            past = min(start + step, size)
            yield start, past
            start = past
