"""Photos that a fine-tuning does not train on, and the pairs of them that judge the result.

Of most people some photos are held out: they show what the fine-tuned model gains. Some people are set aside with all
their photos: they show what it loses on people whom it was not trained on.
"""

# N images   P pairs

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.loading.sampler import permute
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.pair_writer import pairs_of_dataset, write_pairs
from facetrain.distinct import distinct
from facetrain.errors import DataError
from facetrain.text import count_text

_LEAST_IMAGES = 4
"""Images of a person from which some are held out; a person with fewer is trained on with all of them."""
_SHARE, _LEAST, _MOST = 0.3, 2, 10
"""Share of a person's images that is held out, and the bounds of their number: a genuine pair needs two."""
_ASIDE, _LEAST_ASIDE, _MOST_ASIDE = 0.15, 2, 50
"""Share of the people who are set aside, and the bounds of their number: an impostor pair needs two."""
_LEAST_PEOPLE = 10
"""People whose images are held out, each with at least one genuine pair. With 2 people, chance kept the new one of two
equally good models in 57 % of the trials."""
_MOST_PAIRS = 3000


class Part(IntEnum):
    """Use of a photo in a fine-tuning."""

    TRAIN = 0
    HELD_OUT = 1
    SET_ASIDE = 2


def held_out_counts(images: np.ndarray) -> np.ndarray:
    """Return the number of held-out images of each person, int, from the number of their images."""
    counts = np.clip(np.round(_SHARE * images), _LEAST, _MOST).astype(np.int64)
    return np.where(images >= _LEAST_IMAGES, counts, 0)


def split_photos(labels_N: np.ndarray, *, seed: int = 0) -> np.ndarray:
    """Return the `Part` of each image, int (N,), drawn at random.

    People are set aside among those from whom images could be held out: their photos give genuine pairs.
    """
    order_N = permute(np.arange(len(labels_N)), len(labels_N), key_of(seed))
    by_label_N = np.lexsort((order_N, labels_N))
    _, first, person_N, images = np.unique(
        labels_N[by_label_N], return_index=True, return_inverse=True, return_counts=True
    )
    rank_N = np.arange(len(labels_N)) - first[person_N]
    part_N = np.empty(len(labels_N), np.int64)
    part_N[by_label_N] = np.where(rank_N < held_out_counts(images)[person_N], Part.HELD_OUT, Part.TRAIN)
    able = np.flatnonzero(images >= _LEAST_IMAGES)
    count = int(np.clip(round(_ASIDE * len(able)), _LEAST_ASIDE, _MOST_ASIDE))
    aside = np.random.default_rng([seed, 12]).permutation(able)[:count]
    part_N[by_label_N[np.isin(person_N, aside)]] = Part.SET_ASIDE
    return part_N


def count_people(labels_N: np.ndarray) -> str:
    """Return the number of people in labels, as text."""
    return count_text(len(distinct(labels_N)), "person", "people")


def require_enough(labels_N: np.ndarray, where: Path) -> None:
    """Check that the images can train and judge a model.

    Raises:
        DataError: they cannot; the message says what would help.
    """
    able = int((np.unique(labels_N, return_counts=True)[1] >= _LEAST_IMAGES).sum())
    if able < _LEAST_PEOPLE + _LEAST_ASIDE:
        raise DataError(
            f"{where}: photos of {count_people(labels_N)}, {able:,} of them with {_LEAST_IMAGES} or more: too few to "
            "hold images and people out, so nothing would show whether a fine-tuned model is better. "
            f"{_LEAST_PEOPLE + _LEAST_ASIDE} people with {_LEAST_IMAGES} images each are enough; ten images "
            "each of 20 people help more. Until then use the model as it is: it compares people that it has not been "
            "trained on"
        )


def _pair_of(images: list[int], rank: int) -> tuple[int, int]:
    """Return the pair of this rank among all pairs of images in the order of `itertools.combinations`."""
    first, with_first = 0, len(images) - 1
    while rank >= with_first:
        rank, with_first, first = rank - with_first, with_first - 1, first + 1
    return images[first], images[first + 1 + rank]


def write_photo_pairs(folder: Path, output: Path, *, seed: int = 0) -> None:
    """Write pairs of a dataset's images as a verification set.

    There are genuine and as many impostor pairs, at most 3,000 of each, drawn at random. They alternate, so that each
    of the ten folds of the protocol has both kinds.

    Raises:
        DataError: the dataset cannot be read, or the file cannot be written.
    """
    source = open_dataset(folder)
    rng = np.random.default_rng([seed, 11])
    by_label = np.argsort(source.labels, kind="stable")
    _, starts = np.unique(source.labels[by_label], return_index=True)
    images_of = [images.tolist() for images in np.split(by_label, starts[1:])]
    # Of each person, and until each: the pairs are numbered and not listed, which are millions for a thousand images.
    pairs_of = np.array([len(images) * (len(images) - 1) // 2 for images in images_of])
    past = np.cumsum(pairs_of)
    possible = (source.num_images**2 - sum(len(images) ** 2 for images in images_of)) // 2  # impostor pairs
    count = min(int(past[-1]), possible, _MOST_PAIRS)
    drawn = rng.choice(int(past[-1]), count, replace=False)
    person_P = np.searchsorted(past, drawn, side="right")
    rank_P = drawn - (past - pairs_of)[person_P]
    genuine = [
        _pair_of(images_of[person], rank)
        for person, rank in zip(person_P.tolist(), rank_P.tolist(), strict=True)
    ]
    impostors: dict[tuple[int, int], None] = {}
    while len(impostors) < count:
        one, other = sorted(rng.choice(len(images_of), 2, replace=False).tolist())
        impostors[int(rng.choice(images_of[one])), int(rng.choice(images_of[other]))] = None
    number_P2 = [pair for both in zip(genuine, impostors, strict=True) for pair in both]
    write_pairs(pairs_of_dataset(source, [True, False] * count, number_P2), output)
