"""Wrong labels, found by what a model sees: several people under one identity, one under several, strangers."""

# N images   K identities   D embedding

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.parallel import Progress, new_folder, silent
from facetrain.data.tools.rewrite import Written, write_some
from facetrain.data.tools.similarity import (
    Centers,
    best_other,
    center_similarity,
    check_labeled,
    find_centers,
    own_similarity,
    telling_apart,
)
from facetrain.errors import DataError

_ROUNDS = 3
_COMPARED = 4096
"""So many of an identity's images, evenly spread, are compared each with each."""


@dataclass(frozen=True)
class Finding:
    """Something that the labels say and the model does not see."""

    kind: str
    """`mixed`: an identity holds two people. `same`: two identities are one person. `moved`: an image is of
    another identity. `stranger`: an image is like no identity."""
    identity: int
    other: int
    """`same`, `moved`: the other identity; else −1."""
    image: int
    """`moved`, `stranger`: which image; `mixed`: one of the smaller group; else −1."""
    similarity: float


@dataclass(frozen=True)
class Cleaning:
    """What was found, and the labels that follow from it."""

    threshold: float
    """Similarity from which on an image belongs to an identity."""
    findings: list[Finding]
    label_N: np.ndarray
    """int64: whose each image is now; −1 where it is to be left out."""


def clean(embedding_ND: np.ndarray, label_N: np.ndarray, *, threshold: float | None = None) -> Cleaning:
    """Compare every image with the centers of all identities, and every center with every other.

    First identities that fall into two groups as different as strangers are parted; then identities
    whose centers are alike are joined; then images that are unlike their identity go to the one that
    they are like, or nowhere. Centers are taken again after each round, without what was wrong.

    Args:
        embedding_ND: unit rows, float32.
        label_N: int64, from 0.
        threshold: similarity of an image and a center from which on they are of one person. If None, the one
            that best tells images' own identities from their most similar other ones.
    """
    check_labeled(label_N)
    label = label_N.astype(np.int64)
    num_classes = int(label.max()) + 1
    centers = find_centers(embedding_ND, label, num_classes)
    if threshold is None:
        _, other = best_other(embedding_ND, label, centers.unit_KD)
        threshold = telling_apart(own_similarity(embedding_ND, label, centers), other)
    label, findings = _part(embedding_ND, label, threshold)
    label, joined = _join(embedding_ND, label, num_classes, threshold)
    label, strangers = _sort_out(embedding_ND, label, threshold)
    return Cleaning(threshold, findings + joined + strangers, label)


def write_cleaned(
    folder: Path, cleaning: Cleaning, output: Path, *, workers: int | None = None, progress: Progress = silent
) -> Written:
    """Write a dataset under the labels that were found, identities numbered anew.

    Raises:
        DataError: nothing is left, or the output cannot be written.
    """
    source = open_dataset(folder)
    numbers = np.flatnonzero(cleaning.label_N >= 0)
    if not len(numbers):
        raise DataError(f"{folder}: no image is like its identity; is this the right model?")
    with new_folder(output) as scratch:
        written = write_some(source, numbers, cleaning.label_N[numbers], scratch, workers, progress)
    return Written(str(output), *written)


def _part(embedding_ND: np.ndarray, label: np.ndarray, threshold: float) -> tuple[np.ndarray, list[Finding]]:
    """Give the smaller of two groups under one label a label of its own."""
    findings, label = [], label.copy()
    order = np.argsort(label, kind="stable")
    _, starts = np.unique(label[order], return_index=True)
    fresh = int(label.max()) + 1
    for rows in np.split(order, starts[1:]):
        if len(rows) < 4:
            continue
        second, cosine = _two_groups(embedding_ND[rows])
        if min(second.sum(), (~second).sum()) < 2 or cosine >= threshold:
            continue
        smaller = rows[second if second.sum() * 2 <= len(rows) else ~second]
        findings.append(Finding("mixed", int(label[rows[0]]), -1, int(smaller[0]), cosine))
        label[smaller] = fresh
        fresh += 1
    return label, findings


def _two_groups(embedding_ND: np.ndarray) -> tuple[np.ndarray, float]:
    """Divide rows in two by spherical 2-means from the least similar two; return (N,) bool, and how alike they are."""
    some = embedding_ND[:: -(-len(embedding_ND) // _COMPARED)]
    similar = some @ some.T
    seeds = np.unravel_index(similar.argmin(), similar.shape)
    center = some[list(seeds)]
    second = np.zeros(len(embedding_ND), bool)
    for _ in range(10):
        now = embedding_ND @ center[1] > embedding_ND @ center[0]
        if not now.any() or now.all():
            return np.zeros(len(now), bool), 1.0
        center = np.stack([embedding_ND[~now].sum(0), embedding_ND[now].sum(0)])
        center /= np.maximum(np.linalg.norm(center, axis=1, keepdims=True), 1e-12)
        if (now == second).all():
            break
        second = now
    return second, float(center[0] @ center[1])


def _join(
    embedding_ND: np.ndarray, label: np.ndarray, num_classes: int, threshold: float
) -> tuple[np.ndarray, list[Finding]]:
    """Give identities whose centers are alike one label, the smaller of both."""
    centers = find_centers(embedding_ND, label, int(label.max()) + 1)
    # A center lacks the noise of a single image: two of one person are more alike than image and center.
    alike = _alike(centers, min(threshold / max(centers.spread, 1e-6), 0.95))
    new = np.arange(len(centers.count_K))
    findings = []
    for cosine, one, other in alike:
        root, leaf = sorted((_root(new, one), _root(new, other)))
        new[leaf] = root
        if max(one, other) < num_classes:  # groups that were parted are told of as `mixed`
            findings.append(Finding("same", one, other, -1, cosine))
    for identity in range(len(new)):
        new[identity] = new[new[identity]]
    return new[label], findings


def _alike(centers: Centers, threshold: float) -> list[tuple[float, int, int]]:
    """Return (similarity, one, other) of each identity and the one most like it, if alike enough; most alike first."""
    there = np.flatnonzero(centers.count_K)
    unit = centers.unit_KD[there]
    other, cosine = (
        best_other(unit, np.arange(len(there)), unit) if len(there) > 1 else (there[:0], there[:0])
    )
    found = {
        (float(cosine[row]), int(there[min(row, mate)]), int(there[max(row, mate)]))
        for row, mate in enumerate(other.tolist())
        if cosine[row] >= threshold
    }
    return sorted(found, reverse=True)


def _root(parent: np.ndarray, identity: int) -> int:
    while parent[identity] != identity:
        identity = int(parent[identity])
    return identity


def _sort_out(
    embedding_ND: np.ndarray, label: np.ndarray, threshold: float
) -> tuple[np.ndarray, list[Finding]]:
    """Take images from identities that they are unlike."""
    own_label, count = label, int(label.max()) + 1
    wrong = np.zeros(len(label), bool)
    for _ in range(_ROUNDS):
        centers = find_centers(embedding_ND, np.where(wrong, -1, label), count)
        before = wrong
        # Of an image that is left out already, the center has no part.
        left_out = center_similarity(embedding_ND, label, centers.unit_KD)
        own = np.where(before, left_out, own_similarity(embedding_ND, label, centers))
        other, cosine = best_other(embedding_ND, label, centers.unit_KD)
        alone = np.isnan(own) | (centers.count_K[label] == 0)
        wrong = ~alone & (own < threshold)
        if (wrong == before).all():
            break
    moved = wrong & (cosine >= threshold)
    findings = [
        Finding("moved", int(own_label[row]), int(other[row]), int(row), float(cosine[row]))
        for row in np.flatnonzero(moved)
    ] + [
        Finding("stranger", int(own_label[row]), -1, int(row), float(own[row]))
        for row in np.flatnonzero(wrong & ~moved)
    ]
    return np.where(moved, other, np.where(wrong, -1, label)), findings
