"""MegaFace protocol: each probe is searched with one mate among up to a million distractors.

Kemelmacher-Shlizerman et al., "The MegaFace benchmark: 1 million faces for recognition at scale", 2016.
"""

# Q probes   N distractors   D embedding   Z gallery sizes   M ordered pairs of a probe and its mate   S subjects
# R draws of subjects

from __future__ import annotations

import numpy as np

from facetrain.embeddings.embedding_files import Embeddings
from facetrain.embeddings.exact_search import rescore, search_exactly, unit_rows
from facetrain.embeddings.normalization import is_rejected
from facetrain.verify.metrics import bootstrap
from facetrain.verify.metrics.draws import DRAWS, Draws
from facetrain.verify.metrics.result import Result
from facetrain.verify.metrics.scored_pairs import add_replicates

RANKS = (1, 10)
"""Ranks that MegaFace reports."""


def distractor_counts(distractors: int) -> list[int]:
    """Return the gallery sizes that are reported: 10, 100, 1000 and so on, and all distractors."""
    powers = [10**power for power in range(1, 10) if 10**power < distractors]
    return [*powers, distractors]


def megaface_result(
    probe_QD: np.ndarray,
    subject_Q: np.ndarray,
    distractor_ND: np.ndarray,
    *,
    draws: Draws = DRAWS,
) -> Result:
    """Return the rank-1 and rank-10 rate for each gallery size, with intervals over subjects.

    Every ordered pair of two images of one person is one search: the first is the probe, the second its only
    mate in a gallery of distractors. `rank1` is the share of searches whose mate is more similar than all
    distractors; `rank1@1000` the share among the first 1000 distractors.

    Args:
        probe_QD: unit embeddings of the probes, float32 (Q, D).
        subject_Q: subject id of each probe, int (Q,) from 0 without gaps.
        distractor_ND: unit embeddings of the distractors, float32 (N, D), in random order.
        draws: bootstrap draws of subjects; 0 gives no intervals.
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
    hit_S = {name: np.bincount(subject_M, weights=hit_M, minlength=subjects) for name, hit_M in hits.items()}

    def metrics(drawn_RS: np.ndarray) -> dict[str, np.ndarray]:
        drawn = drawn_RS.astype(np.float64)
        return {name: bootstrap.share(drawn @ hit, drawn @ count_S) for name, hit in hit_S.items()}

    add_replicates(result, bootstrap.replicate(metrics, subjects, draws, pairs=subjects))
    return result


def mate_pairs(subject_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all ordered pairs of two images of one subject as indices of probe and mate: int (M,) each."""
    # Stable: the searches of a person are in the order of the images.
    order = np.argsort(subject_Q, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(subject_Q[order])) + 1)
    probe = [np.repeat(group, len(group) - 1) for group in groups]
    mate = [np.concatenate([np.delete(group, at) for at in range(len(group))]) for group in groups]
    return np.concatenate(probe), np.concatenate(mate)


def count_closer_distractors(
    probe_QD: np.ndarray, distractor_ND: np.ndarray, mates: tuple[np.ndarray, np.ndarray], sizes: list[int]
) -> np.ndarray:
    """Return how many of the first `size` distractors are at least as similar as the mate: int (Z, M).

    Counts stop at the largest of `RANKS`, so the most similar distractors of each probe are enough. Their cosines and
    the cosines of the mates are computed in float64 and one by one: equal embeddings have equal cosines.
    """
    probe_M, mate_M = mates
    most = max(RANKS)
    similarity_M = rescore(unit_rows(probe_QD), probe_QD, probe_M, mate_M)
    rejected_Q = is_rejected(probe_QD)
    rejected_M = rejected_Q[probe_M] | rejected_Q[mate_M]
    probes = Embeddings(probe_QD, [""] * len(probe_QD), np.full(len(probe_QD), -1))
    best_QK = np.full((len(probe_QD), most), -np.inf)
    counts, start = [], 0
    for size in sizes:
        # Each size adds distractors to the size before: every distractor is compared once.
        added = distractor_ND[start:size]
        added = added[~is_rejected(added)]  # rejected distractors are below every mate
        gallery = Embeddings(added, [""] * len(added), np.full(len(added), -1))
        cosine_QK = search_exactly(probes, gallery, most).cosine_QK
        best_QK = -np.sort(-np.concatenate([best_QK, cosine_QK], axis=1), axis=1)[:, :most]
        closer_M = np.count_nonzero(best_QK[probe_M] >= similarity_M[:, None], axis=1)
        # A rejected probe or mate is below every distractor.
        counts.append(np.where(rejected_M, min(size, most), closer_M))
        start = size
    return np.stack(counts)
