"""Datasets of drawn people, in the formats that real ones come in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import cv2
import numpy as np

from facetrain.cpu_cores import usable_cores
from facetrain.data.decode import encode_jpeg
from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.record_writer import write_identities
from facetrain.data.synthetic.capture_conditions import draw_conditions
from facetrain.data.synthetic.draw import draw_face
from facetrain.data.synthetic.identity import draw_identity
from facetrain.errors import DataError

NAME = "synth"
FOLDS = 10
_EVAL_IMAGES = 10
# Far behind any number of training identities, so that the two never meet.
_FIRST_EVAL_IDENTITY = 1 << 40

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Drawn:
    """What was written."""

    folder: Path
    identities: int
    images: int
    pairs: int


def write_dataset(
    folder: Path,
    *,
    identities: int,
    images_per_identity: int,
    eval_identities: int,
    eval_pairs: int,
    image_size: int = 112,
    seed: int = 0,
    workers: int | None = None,
    progress: Progress = lambda done, total: None,
    drawn: Callable[[int], bytes] | None = None,
) -> Drawn:
    """Draw a training set and `synth.bin`, whose people are others; the folder appears whole or not at all.

    The same arguments draw the same bytes, whatever the number of workers. `drawn` returns a training image
    by its number, where somebody has them already.

    Raises:
        DataError: the folder is there already, or its place cannot be written.
    """
    if folder.exists():
        raise DataError(f"{folder}: is there already; remove it, or draw into another folder")
    _check_pairs(eval_pairs)
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        scratch.mkdir(parents=True)
        trained = [(number, images_per_identity) for number in range(identities)]
        strangers = [(_FIRST_EVAL_IDENTITY + number, _EVAL_IMAGES) for number in range(eval_identities)]
        count = workers or usable_cores()
        if drawn is None:
            people = _draw_all(seed, trained + strangers, image_size, count)
        else:
            people = chain(_lend(drawn, trained), _draw_all(seed, strangers, image_size, count))
        people = _counted(people, identities + eval_identities, progress)
        labeled = ((label, image) for label in range(identities) for image in next(people))
        write_identities(scratch, [images_per_identity] * identities, labeled, image_size)
        images, same = _pairs(list(people), eval_pairs, np.random.default_rng([seed, 3]))
        write_bin(scratch / f"{NAME}.bin", images, same)
        os.replace(scratch, folder)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Drawn(folder, identities, identities * images_per_identity, eval_pairs)


def draw_pairs(
    *, eval_identities: int, eval_pairs: int, image_size: int, seed: int, workers: int
) -> tuple[list[bytes], np.ndarray]:
    """Return what `read_bin` reads from such a dataset's `synth.bin`."""
    _check_pairs(eval_pairs)
    strangers = [(_FIRST_EVAL_IDENTITY + number, _EVAL_IMAGES) for number in range(eval_identities)]
    people = _draw_all(seed, strangers, image_size, workers)
    images, same = _pairs(list(people), eval_pairs, np.random.default_rng([seed, 3]))
    return images, np.array(same)


def draw_image(seed: int, identity: int, number: int, size: int) -> bytes:
    """Draw and encode one image of one person."""
    conditions = draw_conditions(seed, identity, number)
    return encode_jpeg(draw_face(draw_identity(seed, identity), conditions, size), conditions.quality)


def _draw_person(seed: int, identity: int, count: int, size: int) -> list[bytes]:
    cv2.setNumThreads(1)
    return [draw_image(seed, identity, number, size) for number in range(count)]


def _draw_all(seed: int, people: list[tuple[int, int]], size: int, workers: int) -> Iterator[list[bytes]]:
    """Yield the images of each of some people, given as (identity, how many images)."""
    numbers, counts = [number for number, _ in people], [count for _, count in people]
    arguments = ([seed] * len(people), numbers, counts, [size] * len(people))
    if workers == 1:
        yield from map(_draw_person, *arguments)
        return
    # Not forked: the process that asks may have threads.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_draw_person, *arguments, chunksize=4)


def _lend(drawn: Callable[[int], bytes], people: list[tuple[int, int]]) -> Iterator[list[bytes]]:
    for identity, count in people:
        yield [drawn(identity * count + number) for number in range(count)]


def _check_pairs(eval_pairs: int) -> None:
    if eval_pairs % (2 * FOLDS):
        raise DataError(
            f"eval pairs: {eval_pairs} are not a multiple of {2 * FOLDS}: {FOLDS} folds, half of each of one person"
        )


def _counted(drawn: Iterator[list[bytes]], total: int, progress: Progress) -> Iterator[list[bytes]]:
    for done, pictures in enumerate(drawn, start=1):
        yield pictures
        progress(done, total)


def _pairs(people: list[list[bytes]], pairs: int, rng: np.random.Generator) -> tuple[list[bytes], list[bool]]:
    """Choose pairs fold by fold, first those of one person, as LFW's list is laid out."""
    images: list[bytes] = []
    same = [number % (pairs // FOLDS) < pairs // FOLDS // 2 for number in range(pairs)]
    for of_one_person in same:
        first, second = rng.choice(len(people), 2, replace=False)
        if of_one_person:
            one, other = rng.choice(_EVAL_IMAGES, 2, replace=False)
            images += [people[first][one], people[first][other]]
        else:
            one, other = rng.integers(_EVAL_IMAGES, size=2)
            images += [people[first][one], people[second][other]]
    return images, same
