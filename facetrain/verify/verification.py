"""A set of pairs, scored by the published protocol, with intervals and exact curves."""

# P pairs   N images, two per pair   D embedding   S subjects   R draws of them

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from facetrain.verify.bootstrap import draw_subjects
from facetrain.verify.fold_accuracy import squared_distances
from facetrain.verify.pair_set import PairSet
from facetrain.verify.result import Result
from facetrain.verify.scored_pairs import (
    REPLICATES,
    ScoredPairs,
    add_fold_accuracy,
    add_replicates,
    bootstrap_fold_accuracy,
    pair_result,
)
from facetrain.verify.subjects import connected_subjects, dense_ids


def verification_result(
    plain_ND: np.ndarray,
    mirrored_ND: np.ndarray,
    pairs: PairSet,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> tuple[Result, ScoredPairs]:
    """Score a set from the embeddings of its images and of their mirror images, as the published numbers do."""
    subject_N = pairs.subject if pairs.subject is not None else inferred_subjects(pairs)
    scored = score_pairs(plain_ND + mirrored_ND, pairs.same, subject_N)
    result = pair_result(scored, protocol="verification", replicates=replicates, seed=seed)
    add_fold_accuracy(result, scored, replicates=replicates, seed=seed)
    alone = score_pairs(plain_ND, pairs.same, subject_N)
    found, replicate = bootstrap_fold_accuracy(alone, replicates=replicates, seed=seed)
    result.metrics["accuracy_no_flip"] = found.mean
    # Of both, as InsightFace's XNorm.
    norm_N = (np.linalg.norm(plain_ND, axis=1) + np.linalg.norm(mirrored_ND, axis=1)) / 2
    result.metrics["xnorm"] = float(norm_N.mean())
    if replicates:
        drawn = draw_subjects(scored.subjects, replicates, pairs=len(pairs.same), seed=seed)
        mean_R = _means(norm_N, subject_N, drawn)
        add_replicates(result, {"accuracy_no_flip": replicate["accuracy"], "xnorm": mean_R})
    return result, scored


def _means(value_N: np.ndarray, subject_N: np.ndarray, drawn: Iterable[np.ndarray]) -> np.ndarray:
    """Return the mean over the images of the subjects in each draw: (R,)."""
    sum_S, count_S = np.bincount(subject_N, weights=value_N), np.bincount(subject_N)
    return np.concatenate([(drawn_RS @ sum_S) / (drawn_RS @ count_S) for drawn_RS in drawn])


def score_pairs(embedding_ND: np.ndarray, same_P: np.ndarray, subject_N: np.ndarray) -> ScoredPairs:
    """Return the cosine similarity of rows 2i and 2i+1, in float64."""
    # From the distance, not from the product: both must tell the same pairs apart, to the last bit.
    score_P = 1 - squared_distances(np.asarray(embedding_ND, np.float64)) / 2
    number_P = np.arange(len(same_P))
    return ScoredPairs(score_P, same_P, 2 * number_P, 2 * number_P + 1, subject_N)


def inferred_subjects(pairs: PairSet) -> np.ndarray:
    """Return the subject of every image of a set that names nobody: what genuine pairs and equal bytes connect."""
    image_N = dense_ids(pairs.images)
    first_P, second_P = image_N[0::2], image_N[1::2]
    return connected_subjects(first_P, second_P, pairs.same, int(image_N.max()) + 1)[image_N]
