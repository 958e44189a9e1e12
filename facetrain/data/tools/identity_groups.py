"""Identities that show two people, and identities that show one person together, by the similarity of groups."""

# N images   K identities   D embedding   P pairs

from __future__ import annotations

import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.loading.sampler import permute
from facetrain.data.tools.fault_calibration import FaultThreshold, calibrate_threshold
from facetrain.data.tools.label_faults import DUPLICATE_IDENTITY, MIXED_IDENTITY, LabelFault
from facetrain.data.tools.similarity import compute_centers, nearest_other_center

_KMEANS_ROUNDS = 10
_MAX_SEED_CANDIDATES = 4096
"""Images of one identity, evenly spaced, among which the seeds of 2-means are searched: the search is quadratic."""
_MIN_GROUP = 2
"""Images of a group that can be a person: a single image is an outlier."""
_LEAST_SIMILAR = 0.1
"""Share of the identities whose halves are less similar than two identities must be to become one."""
_PLANTED = 2000
"""Identities, at most, that are joined or halved to calibrate a threshold."""


def find_mixed_identities(
    embedding_ND: np.ndarray, label_N: np.ndarray, same_person: float
) -> tuple[list[LabelFault], FaultThreshold]:
    """Return the identities that show two people, and the calibration of −cosine of their groups.

    Each group must be one person: the mean cosine of its images and its center is at least `same_person`. The planted
    faults are pairs of identities under one label. The smaller groups get new labels above all others.

    Args:
        embedding_ND: unit rows, float32.
        label_N: labels, int64; rows with −1 are ignored.
        same_person: cosine of an image and a center from which they show one person.
    """
    members = _members(label_N, 2 * _MIN_GROUP)
    splits = [split for rows in members if (split := _split(embedding_ND, rows, same_person))]
    joined = [
        _split(embedding_ND, np.concatenate([members[one], members[other]]), same_person)
        for one, other in _random_pairs(len(members))
    ]
    score = np.array([-cosine for _, cosine in splits])
    planted = np.array([-split[1] for split in joined if split])
    calibration = calibrate_threshold(score, [planted], lowest=-same_person)
    mixed = [(rows, cosine) for rows, cosine in splits if -cosine >= calibration.threshold]
    faults = [
        LabelFault(MIXED_IDENTITY, int(label_N[rows[0]]), -1, cosine, tuple(rows.tolist()), target)
        for target, (rows, cosine) in enumerate(mixed, int(label_N.max()) + 1)
    ]
    return faults, calibration


def find_duplicate_identities(
    embedding_ND: np.ndarray, label_N: np.ndarray, same_person: float
) -> tuple[list[LabelFault], FaultThreshold]:
    """Return identities and their nearest other one that show one person, most similar first, and the calibration.

    The planted faults are identities in two halves. The arguments are as for `find_mixed_identities`.
    """
    centers = compute_centers(embedding_ND, label_N, int(label_N.max()) + 1)
    present = np.flatnonzero(centers.count_K)
    if len(present) < 2:
        return [], calibrate_threshold(np.empty(0), [], lowest=same_person)
    unit = centers.unit_KD[present]
    mate, cosine = nearest_other_center(unit, np.arange(len(present)), unit)
    halves = _half_similarities(embedding_ND, label_N)
    # Groups of people whom the model confuses have similar centers, but not as similar as halves of one person.
    least = float(np.quantile(halves, _LEAST_SIMILAR)) if len(halves) else 1.0
    calibration = calibrate_threshold(cosine, [halves], lowest=max(same_person, least))
    # Two identities that are each other's nearest one are one pair; both cosines may differ by a rounding error.
    best: dict[tuple[int, int], float] = {}
    for row in np.flatnonzero(cosine >= calibration.threshold).tolist():
        pair = int(present[min(row, mate[row])]), int(present[max(row, mate[row])])
        best[pair] = max(float(cosine[row]), best.get(pair, -1.0))
    faults = [
        LabelFault(DUPLICATE_IDENTITY, one, other, similarity, (), one)
        for (one, other), similarity in sorted(best.items(), key=lambda item: (-item[1], item[0]))
    ]
    return faults, calibration


def _half_similarities(embedding_ND: np.ndarray, label_N: np.ndarray) -> np.ndarray:
    """Return the cosine of the centers of two halves of identities."""
    cosines = []
    members = _members(label_N, 2)
    for number in _sample(len(members)).tolist():
        rows = members[number]
        shuffled = rows[permute(np.arange(len(rows)), len(rows), key_of(number))]
        one, other = (
            embedding_ND[half].sum(0) for half in (shuffled[: len(rows) // 2], shuffled[len(rows) // 2 :])
        )
        cosines.append(one @ other / max(float(np.linalg.norm(one) * np.linalg.norm(other)), 1e-12))
    return np.array(cosines)


def _members(label_N: np.ndarray, minimum: int) -> list[np.ndarray]:
    """Return the rows of each identity with at least `minimum` images."""
    order = np.argsort(label_N, kind="stable")[np.count_nonzero(label_N < 0) :]
    _, starts = np.unique(label_N[order], return_index=True)
    return [rows for rows in np.split(order, starts[1:]) if len(rows) >= minimum]


def _sample(count: int) -> np.ndarray:
    """Return at most `_PLANTED` numbers below `count`, in random order, the same in every run."""
    return permute(np.arange(min(count, _PLANTED)), count, key_of(0)) if count else np.empty(0, np.int64)


def _random_pairs(count: int) -> list[tuple[int, int]]:
    """Return random pairs of different numbers below `count`."""
    order = _sample(count)
    return list(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True)) if len(order) > 1 else []


def _split(embedding_ND: np.ndarray, rows: np.ndarray, same_person: float) -> tuple[np.ndarray, float] | None:
    """Return the smaller of two groups of images, and their cosine; None if one of them is not a person."""
    embedding = embedding_ND[rows]
    in_second, cosine = _two_means(embedding)
    for group in (in_second, ~in_second):
        if group.sum() < _MIN_GROUP:
            return None
        others = embedding[group].sum(0) - embedding[group]
        length = np.maximum(np.linalg.norm(others, axis=1), 1e-12)
        if np.mean((embedding[group] * others).sum(1) / length) < same_person:
            return None
    return rows[in_second if in_second.sum() * 2 <= len(rows) else ~in_second], cosine


def _two_means(embedding_ND: np.ndarray) -> tuple[np.ndarray, float]:
    """Split rows by spherical 2-means, seeded with the two least similar rows.

    Returns membership in the second group, bool (N,), and the cosine of the two group centers.
    """
    candidates = embedding_ND[:: -(-len(embedding_ND) // _MAX_SEED_CANDIDATES)]
    similar = candidates @ candidates.T
    seeds = np.unravel_index(similar.argmin(), similar.shape)
    center = candidates[list(seeds)]
    in_second = np.zeros(len(embedding_ND), bool)
    for _ in range(_KMEANS_ROUNDS):
        now = embedding_ND @ center[1] > embedding_ND @ center[0]
        if not now.any() or now.all():
            return np.zeros(len(now), bool), 1.0
        center = np.stack([embedding_ND[~now].sum(0), embedding_ND[now].sum(0)])
        center /= np.maximum(np.linalg.norm(center, axis=1, keepdims=True), 1e-12)
        if (now == in_second).all():
            break
        in_second = now
    return in_second, float(center[0] @ center[1])
