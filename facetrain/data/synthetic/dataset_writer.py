"""Writer of synthetic datasets: a training set as RecordIO, and a verification set as .bin."""

from __future__ import annotations

import math
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from facetrain.cpu_cores import usable_cores
from facetrain.data.dataset_card import DatasetCard, ImageDigest, write_cards
from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.recordio import write_identities
from facetrain.data.synthetic.drawing import draw_jpeg
from facetrain.data.synthetic.options import SyntheticFaces
from facetrain.data.tools.parallel import report_progress
from facetrain.data.tools.sample_pairs import genuine_flags
from facetrain.data.tools.writing import WrittenDataset
from facetrain.distributed.process_lifetime import end_with_parent
from facetrain.distributed.spawn import HelperContext
from facetrain.errors import DataError
from facetrain.files import new_folder
from facetrain.progress import ProgressCallback, ignore_progress

SYNTHETIC_CARD = DatasetCard(
    name="facetrain synthetic faces",
    origin="drawn by facetrain data synth",
    license="Apache-2.0",
    consent="drawings of no person",
    kind="synthetic",
)
_IMAGES_PER_EVAL_IDENTITY = 10
# Larger than any number of training identities: the verification set has no identity in common with the training set.
_FIRST_EVAL_IDENTITY = 1 << 40


def write_synthetic(
    folder: Path,
    faces: SyntheticFaces,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write a training set, and `synth.bin` with pairs of other identities.

    The same arguments give the same bytes, for any number of workers. The folder appears complete or not at all.

    Args:
        folder: the output folder; it must not exist.
        faces: numbers of identities, images and pairs, the size and the seed.
        workers: drawing processes; one per usable core if None.
        progress: called after every identity, with the number of identities.

    Raises:
        DataError: the folder exists or cannot be written, or the number of pairs is not a multiple of 20, or larger
            than that of the different pairs.
    """
    same = genuine_flags(faces.eval_pairs, "--eval-pairs")
    _require_enough(faces)
    identities = [(number, faces.images_per_identity) for number in range(faces.identities)]
    identities += [
        (_FIRST_EVAL_IDENTITY + number, _IMAGES_PER_EVAL_IDENTITY) for number in range(faces.eval_identities)
    ]
    counts = [faces.images_per_identity] * faces.identities
    drawing = _draw_identities(faces.seed, identities, faces.image_size, workers or usable_cores())
    # Closed, or the pool of an interrupted generator would stay, and multiprocessing report its semaphores as leaked.
    with new_folder(folder) as scratch, closing(drawing) as drawn:
        images_of = report_progress(drawn, len(identities), progress)
        labeled = ((label, image) for label in range(faces.identities) for image in next(images_of))
        digest = ImageDigest()
        write_identities(scratch, counts, digest.of(labeled), faces.image_size)
        card = SYNTHETIC_CARD.model_copy(
            update={"people": len(counts), "images": sum(counts), "digest": digest.text}
        )
        write_cards(scratch, [card])
        write_bin(scratch / "synth.bin", _sample_pairs(list(images_of), same, faces.seed), same)
    return WrittenDataset(folder=str(folder), images=sum(counts), identities=len(counts))


def _draw_identity(seed: int, size: int, identity: tuple[int, int]) -> list[bytes]:
    cv2.setNumThreads(1)  # there is one process per core
    number, count = identity
    return [draw_jpeg(seed, number, image, size) for image in range(count)]


def _draw_identities(
    seed: int, identities: list[tuple[int, int]], size: int, workers: int
) -> Generator[list[bytes], None, None]:
    """Yield the images of each identity, given as (identity, number of images)."""
    draw = partial(_draw_identity, seed, size)
    if workers == 1:
        yield from map(draw, identities)
        return
    # Without `end_with_parent`, the processes of a pool whose parent was killed would draw on, and then wait forever.
    with ProcessPoolExecutor(workers, HelperContext(), end_with_parent) as pool:
        yield from pool.map(draw, identities, chunksize=4)


def _sample_pairs(images_of: list[list[bytes]], same: list[bool], seed: int) -> list[bytes]:
    """Return the two images of each pair; no two pairs have the same images."""
    rng = np.random.default_rng([seed, 3])
    images: list[bytes] = []
    taken = set[frozenset[tuple[int, int]]]()
    for of_one_identity in same:
        while True:
            first, second = rng.choice(len(images_of), 2, replace=False).tolist()
            if of_one_identity:
                second = first
                one, other = rng.choice(_IMAGES_PER_EVAL_IDENTITY, 2, replace=False).tolist()
            else:
                one, other = rng.integers(_IMAGES_PER_EVAL_IDENTITY, size=2).tolist()
            pair = frozenset([(first, one), (second, other)])
            if pair not in taken:
                break
        taken.add(pair)
        images += [images_of[first][one], images_of[second][other]]
    return images


def _require_enough(faces: SyntheticFaces) -> None:
    """Check that so many different pairs exist."""
    count, images = faces.eval_identities, _IMAGES_PER_EVAL_IDENTITY
    possible = min(count * math.comb(images, 2), math.comb(count, 2) * images * images)
    if faces.eval_pairs > 2 * possible:
        raise DataError(
            f"--eval-pairs {faces.eval_pairs:,}: {count:,} identities have {2 * possible:,} different pairs, half of "
            "them of one identity; give more with --eval-identities"
        )
