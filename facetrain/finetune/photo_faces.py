"""Faces of the user's photos: aligned, and split into those to train on and those that judge the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

import numpy as np

from facetrain.data.beside_dataset import SKIPPED_TABLE
from facetrain.data.dataset import FaceDataset
from facetrain.data.images.copies import different_images
from facetrain.data.images.decode import decode_rgb
from facetrain.data.loading.sampler import sample_numbers
from facetrain.data.open_dataset import open_dataset
from facetrain.data.skipped_files import skipped_count, skipped_summary
from facetrain.data.tools.landmark_finder import LandmarkFinder
from facetrain.data.tools.pack import pack
from facetrain.data.tools.selection import select_all
from facetrain.data.tools.writing import write_parts
from facetrain.data.tools.yunet import YuNet
from facetrain.embeddings.photo_check import PhotoCheck
from facetrain.errors import UnreadableError, UsageError
from facetrain.finetune.held_out import (
    Part,
    count_people,
    require_enough,
    split_photos,
    write_photo_pairs,
)
from facetrain.finetune.workplace import Bar, Request, Workplace
from facetrain.text import count_text, listed

_EXAMINED = 64
"""Images whose alignment is examined, drawn at random."""


def needed_finder(
    request: Request,
    source: FaceDataset,
    finder: LandmarkFinder | None,
    image_size: int,
    say: Callable[[str], None],
) -> LandmarkFinder | None:
    """Return what finds the landmarks of the photos; None for aligned faces, and for a list that has them.

    A detector is used as soon as one examined image looks like a photo: it finds the face of an aligned one, too.

    Raises:
        UsageError: the images are photos, and there is no detector.
        DataError: the people or their images are too few.
    """
    photos, check = request.photos, PhotoCheck()
    require_enough(source.labels, photos)
    for index, image in enumerate(islice(_decoded(source), _EXAMINED)):
        check(image, index, image_size)
    finding, listed_N52 = check.finding(), source.photo_landmarks
    if listed_N52 is not None and np.isinf(listed_N52).any():
        finding = "its images are not aligned (flag 0; aligned ones have 1), and it has no landmarks of them"
    elif listed_N52 is not None and finder is None:
        return None  # by the landmarks of the list, the faces are aligned when they are packed
    if finding is not None and finder is None:
        raise UsageError(f"{photos}: {finding}; align the faces by OpenCV's face detector: --detector yunet")
    if finding is None and check.all_aligned and isinstance(finder, YuNet):
        say(f"{photos}: the images are aligned faces already, so the detector is not used")
        return None
    return finder


def write_faces(
    request: Request,
    place: Workplace,
    finder: LandmarkFinder | None,
    image_size: int,
    say: Callable[[str], None],
    bar: Bar,
) -> None:
    """Write the aligned faces as a dataset; say what is left out."""
    with bar("aligning faces") as progress:
        written = pack(
            request.photos, place.faces, image_size=image_size, skip_bad=True,
            landmarks=finder, checking=progress, progress=progress,
        )  # fmt: skip
    people = count_text(written.identities, "person", "people")
    say(f"{place.faces}: {count_text(written.images, 'face')} of {people}")
    if written.skipped:
        say(f"left out {skipped_count(written.skipped)}, see {place.faces / SKIPPED_TABLE}:")
        for line in skipped_summary(written.skipped):
            say(f"  {line}")
    if lost := written.lost_identities:
        say(f"of {count_text(len(lost), 'person', 'people')} no face is left: {listed(lost)}")
    if rivals := getattr(finder, "several_faces", None):
        say(
            f"several faces in {count_text(len(rivals), 'photo')}, of which the largest one near the center was taken: "
            f"{listed(rivals)}"
        )


def split_faces(request: Request, place: Workplace, say: Callable[[str], None], bar: Bar) -> None:
    """Write the parts of the faces: for training, held out, and set aside."""
    if place.held_out.parent.exists():
        return
    selection = select_all(place.faces)
    source = selection.source
    different, disputed = different_images(map(source.read, range(source.num_images)), source.labels)
    if len(disputed):
        names = (source.image_name(number) for number in disputed.tolist())
        say(
            f"left out {count_text(len(disputed), 'image')} with copies under another person, because it is unknown "
            f"whom they show: {listed(names)}"
        )
    if copies := source.num_images - len(different) - len(disputed):
        copied = count_text(copies, "image that is a copy of another", "images that are copies of others")
        say(f"left out {copied}: the held-out images have to be new ones")
    require_enough(source.labels[different], request.photos)
    part_N = split_photos(source.labels[different], seed=request.seed)
    parts = {
        path.name: selection.part(different[part_N == part])
        for part, path in zip(Part, (place.train, place.held_out, place.set_aside), strict=True)
    }
    with bar("holding images out") as progress:
        write_parts(parts, place.held_out.parent, progress=progress)


def write_pairs(request: Request, place: Workplace, say: Callable[[str], None]) -> None:
    """Write the verification sets of the faces that are not trained on."""
    for dataset, pairs in ((place.held_out, place.pairs), (place.set_aside, place.set_aside_pairs)):
        if not pairs.exists():
            write_photo_pairs(dataset, pairs, seed=request.seed)
    held_out, aside = open_dataset(place.held_out), open_dataset(place.set_aside)
    say(
        f"{held_out.num_images:,} images of {count_people(held_out.labels)} are held out, to show what the fine-tuned "
        f"model gains; {count_people(aside.labels)} are set aside with all images, to show what it loses on others"
    )


def _decoded(source: FaceDataset) -> Iterator[np.ndarray]:
    """Yield all images of a dataset that can be decoded, in a random order, uint8 (H, W, 3) RGB."""
    for number in sample_numbers(source.num_images, source.num_images).tolist():
        with suppress(UnreadableError):
            yield decode_rgb(source.read(number), location="")
