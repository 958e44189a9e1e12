"""Verification pairs sampled from a dataset: ten folds without common identities, in the order of LFW's list."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.open_dataset import open_aligned
from facetrain.data.pair_folds import FOLDS
from facetrain.data.tools.pair_writer import PairsToWrite, pairs_of_dataset
from facetrain.errors import DataError
from facetrain.text import count_text

_MAX_TRIES_PER_PAIR = 100

ImagePair = tuple[int, int]
"""Numbers of two images, ascending."""


def sample_pairs(folder: Path, pairs: int, *, seed: int = 0) -> PairsToWrite:
    """Return pairs of a dataset's images, half of them of one identity, with their subjects.

    All pairs are different, and none is of an image and its copy. Every identity with at least two images has the same
    probability, whatever the number of its images.

    Args:
        folder: the dataset.
        pairs: number of pairs, a multiple of 20.
        seed: seed of the selection.

    Raises:
        DataError: `pairs` is not a multiple of 20, or the dataset has too few identities or images.
    """
    same = genuine_flags(pairs, "--count")
    source = open_aligned(folder)
    order = np.argsort(source.labels, kind="stable")
    _, starts = np.unique(source.labels[order], return_index=True)
    rng = np.random.default_rng([seed, 7])
    images_of = np.split(order, starts[1:])
    eligible = [identity for identity, images in enumerate(images_of) if len(images) > 1]
    if len(eligible) < 2 * FOLDS:
        found = count_text(len(eligible), "identity has", "identities have")
        raise DataError(
            f"{folder}: {found} at least two images; {FOLDS} folds need {2 * FOLDS}: set more identities aside "
            "(facetrain data split --validation SHARE)"
        )
    sampled: list[ImagePair] = []
    for fold in np.array_split(rng.permutation(eligible), FOLDS):
        members = [images_of[identity] for identity in fold]
        half = pairs // FOLDS // 2
        sampled += _sample_distinct(source, partial(_genuine_pair, members, rng), half, folder)
        sampled += _sample_distinct(source, partial(_impostor_pair, members, rng), half, folder)
    return pairs_of_dataset(source, same, sampled)


def needed_share(identities: int, eligible: int, total: int) -> str:
    """Return the fraction of `data split` that sets enough identities with at least two images aside for pairs.

    Args:
        identities: identities that were set aside.
        eligible: identities with at least two images among them, at least one.
        total: identities of the whole dataset.
    """
    share = 2 * FOLDS * identities / eligible / total
    return f"{math.ceil(100 * share) / 100:g}" if share < 1 else "SHARE, after adding people"


def genuine_flags(pairs: int, option: str) -> list[bool]:
    """Return whether each pair shows one identity: in each fold first the genuine pairs, then as many impostor pairs.

    Args:
        pairs: number of pairs.
        option: name of the option that gives it, for the message.

    Raises:
        DataError: the folds cannot have the same number of both kinds.
    """
    if pairs <= 0 or pairs % (2 * FOLDS):
        raise DataError(
            f"{option} {pairs}: give a positive multiple of {2 * FOLDS}; the set has {FOLDS} folds, and half of the "
            "pairs of each fold show one identity"
        )
    fold = pairs // FOLDS
    return [number % fold < fold // 2 for number in range(pairs)]


def _genuine_pair(images_of: list[np.ndarray], rng: np.random.Generator) -> ImagePair:
    first, second = sorted(rng.choice(images_of[rng.integers(len(images_of))], 2, replace=False).tolist())
    return first, second


def _impostor_pair(images_of: list[np.ndarray], rng: np.random.Generator) -> ImagePair:
    one, other = rng.choice(len(images_of), 2, replace=False)
    first, second = sorted((int(rng.choice(images_of[one])), int(rng.choice(images_of[other]))))
    return first, second


def _sample_distinct(
    source: FaceDataset, sample: Callable[[], ImagePair], count: int, folder: Path
) -> list[ImagePair]:
    pairs: dict[ImagePair, None] = {}
    for _ in range(_MAX_TRIES_PER_PAIR * count):
        first, second = sample()
        if source.read(first) != source.read(second):
            pairs[first, second] = None
        if len(pairs) == count:
            return list(pairs)
    raise DataError(
        f"{folder}: a fold has only {len(pairs):,} different pairs of the {count:,} that are needed; "
        f"ask for at most {2 * FOLDS * len(pairs):,} (--count)"
    )
