"""MegaFace protocol: each probe is searched with one mate among up to a million distractors.

Kemelmacher-Shlizerman et al., "The MegaFace benchmark: 1 million faces for recognition at scale", 2016.
"""

# Q probes   q probes of one block   N distractors   n distractors of one block   D embedding   Z gallery sizes
# M ordered pairs of a probe and its mate   m pairs of one block   C candidates   S subjects   H hit rates
# R draws of subjects

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from facetrain.embeddings.exact_search import float32_error, rescore, unit_rows
from facetrain.embeddings.normalization import is_rejected
from facetrain.verify.metrics import bootstrap
from facetrain.verify.metrics.result import Result
from facetrain.verify.metrics.scored_pairs import REPLICATES, add_replicates

RANKS = (1, 10)
"""Ranks that MegaFace reports."""
_BLOCK = 1 << 14
"""Distractors that are searched at a time: 32 MiB of embeddings of size 512."""
_PROBES_PER_BLOCK = 1024
_PAIRS_PER_BLOCK = 256


def distractor_counts(distractors: int) -> list[int]:
    """Return the gallery sizes that are reported: 10, 100, 1000 and so on, and all distractors."""
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
    """Return the rank-1 and rank-10 rate for each gallery size, with intervals over subjects.

    Every ordered pair of two images of one person is one search: the first is the probe, the second its only
    mate in a gallery of distractors. `rank1` is the share of searches whose mate is more similar than all
    distractors; `rank1@1000` the share among the first 1000 distractors.

    Args:
        probe_QD: unit embeddings of the probes, float32 (Q, D).
        subject_Q: subject id of each probe, int (Q,) from 0 without gaps.
        distractor_ND: unit embeddings of the distractors, float32 (N, D), in random order.
        replicates: bootstrap draws of subjects; 0 gives no intervals.
        seed: seed of the draws.
    """
    mates = mate_pairs(subject_Q)
    sizes = distractor_counts(len(distractor_ND))
    closer_ZM = count_closer_distractors(probe_QD, distractor_ND, mates, sizes)
    # A person with one image has no search, and is no subject of the bootstrap.
    searched, subject_M = np.unique(subject_Q[mates[0]], return_inverse=True)
    subjects = len(searched)
    rejected = int(is_rejected(probe_QD).sum() + is_rejected(distractor_ND).sum())
    result = Result("distractors", {"searches": float(len(subject_M))}, subjects=subjects, rejected=rejected)
    result.metrics["distractors"] = float(len(distractor_ND))
    hits = {
        f"rank{rank}" if size == sizes[-1] else f"rank{rank}@{size}": closer_ZM[row] < rank
        for row, size in enumerate(sizes)
        for rank in RANKS
    }
    result.metrics |= {name: float(hit_M.mean()) for name, hit_M in hits.items()}
    count_S = np.bincount(subject_M, minlength=subjects)
    hit_SH = np.stack(
        [np.bincount(subject_M, weights=hit_M, minlength=subjects) for hit_M in hits.values()], axis=1
    )
    draws = bootstrap.draw_subjects(subjects, replicates, pairs=subjects, seed=seed)
    rates = [_hit_rates(drawn_RS.astype(np.float64), count_S, hit_SH) for drawn_RS in draws]
    if rates:
        add_replicates(result, dict(zip(hits, np.concatenate(rates).T, strict=True)))
    return result


def _hit_rates(drawn_RS: np.ndarray, count_S: np.ndarray, hit_SH: np.ndarray) -> np.ndarray:
    """Return each hit rate in each draw: float64 (R, H), NaN for a draw without searches."""
    count_R1 = (drawn_RS @ count_S)[:, None]
    hit_RH = drawn_RS @ hit_SH
    return np.divide(hit_RH, count_R1, out=np.full(hit_RH.shape, np.nan), where=count_R1 > 0)


def mate_pairs(subject_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all ordered pairs of two images of one subject as indices of probe and mate: int (M,) each."""
    order = np.argsort(subject_Q, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(subject_Q[order])) + 1)
    probe = [np.repeat(group, len(group) - 1) for group in groups]
    mate = [np.concatenate([np.delete(group, at) for at in range(len(group))]) for group in groups]
    return np.concatenate(probe), np.concatenate(mate)


def count_closer_distractors(
    probe_QD: np.ndarray, distractor_ND: np.ndarray, mates: tuple[np.ndarray, np.ndarray], sizes: list[int]
) -> np.ndarray:
    """Return how many of the first `size` distractors are at least as similar as the mate: int (Z, M).

    Counts stop at the largest of `RANKS`. Similarities that differ from the mate's by more than rounding are compared
    in float32; the others are computed in float64 and one by one, so that equal embeddings have equal ones.
    """
    probe_M, mate_M = mates
    unit_QD = unit_rows(probe_QD)
    similarity_M = rescore(unit_QD, probe_QD, probe_M, mate_M)
    rejected_Q = is_rejected(probe_QD)
    rejected_M = rejected_Q[probe_M] | rejected_Q[mate_M]
    closer_M = np.zeros(len(probe_M), np.int64)
    counts = []
    for start, end in _distractor_ranges(sizes):
        # A copy: the distractors may be mapped from a file, read-only. Rejected ones are below every mate.
        block_nD = np.array(distractor_ND[start:end], np.float32)
        _add_closer(closer_M, similarity_M, probe_M, unit_QD, block_nD[~is_rejected(block_nD)])
        # A rejected probe or mate is below every distractor.
        closer_M[rejected_M] = min(end, max(RANKS))
        if end in sizes:
            counts.append(np.minimum(closer_M, max(RANKS)))
    return np.stack(counts)


def _add_closer(
    closer_M: np.ndarray,
    similarity_M: np.ndarray,
    probe_M: np.ndarray,
    unit_QD: np.ndarray,
    block_nD: np.ndarray,
) -> None:
    """Add, in place, the number of distractors of a block that are at least as similar as the mate of each pair.

    Pairs that have reached the largest of `RANKS` are left as they are.
    """
    if not len(block_nD):
        return
    error = float32_error(block_nD.shape[1])
    unit_nD = unit_rows(block_nD).astype(np.float32)
    for first in range(0, len(unit_QD), _PROBES_PER_BLOCK):
        cosine_qn = unit_QD[first : first + _PROBES_PER_BLOCK].astype(np.float32) @ unit_nD.T
        is_open_M = (closer_M < max(RANKS)) & (probe_M >= first) & (probe_M < first + len(cosine_qn))
        pair = np.flatnonzero(is_open_M)
        # Most mates are more similar than the whole block.
        pair = pair[cosine_qn.max(1)[probe_M[pair] - first] >= similarity_M[pair] - error]
        for at in range(0, len(pair), _PAIRS_PER_BLOCK):
            pair_m = pair[at : at + _PAIRS_PER_BLOCK]
            excess_mn = cosine_qn[probe_M[pair_m] - first]
            excess_mn -= similarity_M[pair_m, None].astype(np.float32)
            closer_M[pair_m] += np.count_nonzero(excess_mn > error, axis=1)
            is_near_mn = np.abs(excess_mn, out=excess_mn) <= error
            is_near_mn[closer_M[pair_m] >= max(RANKS)] = False
            position, distractor = np.nonzero(is_near_mn)
            _add_near(closer_M, similarity_M, probe_M, unit_QD, block_nD, pair_m[position], distractor)


def _add_near(
    closer_M: np.ndarray,
    similarity_M: np.ndarray,
    probe_M: np.ndarray,
    unit_QD: np.ndarray,
    block_nD: np.ndarray,
    pair_C: np.ndarray,
    distractor_C: np.ndarray,
) -> None:
    """Add, in place, the candidates that are at least as similar as the mate in float64; `pair_C` is sorted.

    If all embeddings are alike, every distractor is a candidate of every pair. They are compared a few at a time, and
    only until the pair has reached the largest of `RANKS`.
    """
    number_C = np.arange(len(pair_C)) - np.searchsorted(pair_C, pair_C)
    end = max(RANKS)
    while len(pair_C):
        now_C = number_C < end
        pair, distractor = pair_C[now_C], distractor_C[now_C]
        is_closer = rescore(unit_QD, block_nD, probe_M[pair], distractor) >= similarity_M[pair]
        np.add.at(closer_M, pair[is_closer], 1)
        later_C = ~now_C & (closer_M[pair_C] < max(RANKS))
        pair_C, distractor_C, number_C = pair_C[later_C], distractor_C[later_C], number_C[later_C]
        end *= 2


def _distractor_ranges(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `_BLOCK` distractors; every size is the end of one."""
    start = 0
    for size in sizes:
        while start < size:
            end = min(start + _BLOCK, size)
            yield start, end
            start = end
