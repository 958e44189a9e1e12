"""Pairs drawn from a dataset, laid out as LFW's: ten folds that have nobody in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin import write_bin
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.parallel import Progress, counted, in_order, silent
from facetrain.errors import DataError

FOLDS = 10
_TRIES = 100

Pair = tuple[int, int]


def sample_pairs(
    folder: Path,
    output: Path,
    *,
    pairs: int,
    seed: int = 0,
    workers: int | None = None,
    progress: Progress = silent,
) -> tuple[int, int]:
    """Write pairs of a dataset's images, half of them of one person; return (pairs, of one person).

    No pair stands twice. Who has many images is drawn no more often than who has two.

    Raises:
        DataError: `pairs` is no multiple of 20, or the dataset has too few people or images.
    """
    if pairs <= 0 or pairs % (2 * FOLDS):
        raise DataError(
            f"pairs: {pairs} is not a multiple of {2 * FOLDS}: {FOLDS} folds, half of each of one person"
        )
    source = open_dataset(folder)
    order = np.argsort(source.labels, kind="stable")
    _, starts = np.unique(source.labels[order], return_index=True)
    rng = np.random.default_rng([seed, 7])
    people = np.split(order, starts[1:])
    several = [number for number, images in enumerate(people) if len(images) > 1]
    if len(several) < 2 * FOLDS:
        raise DataError(
            f"{folder}: {len(several):,} identities have two images or more; {FOLDS} folds need {2 * FOLDS}"
        )
    chosen: list[Pair] = []
    for fold in np.array_split(rng.permutation(several), FOLDS):
        members = [people[number] for number in fold]
        half = pairs // FOLDS // 2
        chosen += _distinct(partial(_of_one, members, rng), half, folder)
        chosen += _distinct(partial(_of_two, members, rng), half, folder)
    same = [number % (pairs // FOLDS) < pairs // FOLDS // 2 for number in range(pairs)]
    numbers = [number for pair in chosen for number in pair]
    pictures = counted(in_order(source.read, numbers, workers), len(numbers), progress)
    write_bin(output, pictures, same)
    return pairs, sum(same)


def _of_one(people: list[np.ndarray], rng: np.random.Generator) -> Pair:
    first, second = sorted(rng.choice(people[rng.integers(len(people))], 2, replace=False).tolist())
    return first, second


def _of_two(people: list[np.ndarray], rng: np.random.Generator) -> Pair:
    one, other = rng.choice(len(people), 2, replace=False)
    first, second = sorted((int(rng.choice(people[one])), int(rng.choice(people[other]))))
    return first, second


def _distinct(draw: Callable[[], Pair], count: int, folder: Path) -> list[Pair]:
    found: dict[Pair, None] = {}
    for _ in range(_TRIES * count):
        found[draw()] = None
        if len(found) == count:
            return list(found)
    raise DataError(
        f"{folder}: a fold has {len(found):,} different pairs, not {count:,}; ask for fewer pairs"
    )
