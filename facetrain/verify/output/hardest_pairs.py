"""Hardest pairs of a verification with their images: as HTML, and as a file that outlives the set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict

from facetrain.data.images.decode import decode_rgb, encode_jpeg, resize_square
from facetrain.errors import DataError
from facetrain.files import read_regular_text, write_atomically
from facetrain.pages.render import jpeg_image
from facetrain.text import printable
from facetrain.verify.metrics.result import HardPair, Result
from facetrain.verify.sets.ijb import IjbSet
from facetrain.verify.sets.pair_set import PairSet

TITLES = "Genuine pairs with the lowest scores", "Impostor pairs with the highest scores"
SHOWN_PAIRS = 12
"""Hardest pairs of each kind that a page shows."""
_IMAGE_SIZE, _JPEG_QUALITY = 112, 92


class ShownPair(BaseModel, frozen=True):
    """Pair with its images."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    pair: int
    """Index of the pair in the set."""
    score: float
    images: tuple[bytes, bytes]
    """JPEG files."""


class HardestPairs(BaseModel, frozen=True):
    """Hardest pairs of a set, hardest first."""

    genuine: tuple[ShownPair, ...] = ()
    impostors: tuple[ShownPair, ...] = ()


class VerifiedPairs(BaseModel, frozen=True):
    """Hardest pairs of all sets of a verification during training."""

    step: int
    sets: dict[str, HardestPairs]


def hardest_pairs_of(result: Result, target: Any) -> HardestPairs:
    """Read the images of the hardest pairs from their set; a pair whose images cannot be shown is left out."""
    read = _reader(target)
    if read is None:
        return HardestPairs()
    return HardestPairs(
        genuine=tuple(_with_images(result.hardest_genuine, read)),
        impostors=tuple(_with_images(result.hardest_impostors, read)),
    )


def write_hardest_pairs(path: Path, step: int, results: dict[str, Result], sets: Iterable[PairSet]) -> None:
    """Write the hardest pairs of a verification as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    shown = {printable(target.name): hardest_pairs_of(results[target.name], target) for target in sets}
    write_atomically(path, VerifiedPairs(step=step, sets=shown).model_dump_json())


def read_verified_pairs(path: Path) -> VerifiedPairs | None:
    """Return what `write_hardest_pairs` has written; None if it is absent, damaged, or of another version."""
    try:
        return VerifiedPairs.model_validate_json(read_regular_text(path))
    except (OSError, ValueError):
        return None


def pair_groups(hardest: HardestPairs) -> list[tuple[str, list[tuple[list[Markup], str]]]]:
    """Return title, images and captions of the hardest pairs of a set, for the templates of pages."""
    return [
        (
            title,
            [(list(map(jpeg_image, pair.images)), f"pair {pair.pair}: {pair.score:.4g}") for pair in pairs],
        )
        for title, pairs in zip(TITLES, (hardest.genuine, hardest.impostors), strict=True)
        if pairs
    ]


def _with_images(pairs: list[HardPair], read: Callable[[int], np.ndarray]) -> Iterator[ShownPair]:
    for pair in pairs[:SHOWN_PAIRS]:
        try:
            pixels = read(pair.first), read(pair.second)
        except DataError:
            continue
        # Encoded again, never copied from the set: the browser gets pixels, not bytes from a file of unknown origin.
        first, second = (encode_jpeg(image, _JPEG_QUALITY) for image in pixels)
        yield ShownPair(pair=pair.pair, score=pair.score, images=(first, second))


def _reader(target: Any) -> Callable[[int], np.ndarray] | None:
    """Return the function that reads an image, or the first image of a template, by its index in a set's pairs.

    It returns pixels, uint8 (112, 112, 3), and raises DataError for an image that cannot be read. None: the set is
    scores without images.
    """
    if isinstance(target, PairSet):
        return lambda index: resize_square(
            decode_rgb(target.images[index], location=target.name), _IMAGE_SIZE
        )
    if not isinstance(target, IjbSet):
        return None
    # Once for all pairs: IJB-C has 469,375 images.
    encoded, (_, first_T) = target.encoded, np.unique(target.template, return_index=True)

    def read(index: int) -> np.ndarray:
        first = first_T.item(index)
        return target.crop(decode_rgb(encoded[first], location=target.name), first, _IMAGE_SIZE)

    return read
