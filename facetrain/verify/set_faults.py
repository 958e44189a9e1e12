"""Faults of an evaluation set that make its results doubtful, although they can be computed."""

# P pairs   N images, two per pair

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from facetrain.data.images.decode import decode_rgb
from facetrain.data.pair_folds import FOLDS, fold_order, has_mixed_folds
from facetrain.distinct import dense_ids
from facetrain.embeddings.photo_check import EXAMINED, PhotoCheck
from facetrain.errors import UnreadableError
from facetrain.face_landmarks import TEMPLATE_SIZE
from facetrain.telemetry.log import warn
from facetrain.text import count_text
from facetrain.verify.sets.ijb import IjbSet
from facetrain.verify.sets.pair_set import PairSet
from facetrain.verify.sets.search_sets import SearchSet
from facetrain.verify.sets.subjects import connected_subjects


def warn_of_faults(name: str, same_P: np.ndarray, image_N: np.ndarray | None = None) -> None:
    """Warn of each fault of the pairs of a set.

    Args:
        name: name of the set.
        same_P: True for a genuine pair, bool (P,).
        image_N: number of each image, int (N,); equal images have equal numbers. None: no two images are known to be
            equal, and only the labels are checked.
    """
    for fault in _faults(same_P, image_N):
        warn(f"{name}: {fault}")


def warn_of_faulty_set(pairs: PairSet) -> None:
    """Warn of the faults of a set of pairs, as `warn_of_faults`."""
    warn_of_faults(pairs.name, pairs.same, dense_ids(pairs.images))


def warn_of_doubts(target: PairSet | SearchSet | IjbSet, image_size: int) -> None:
    """Warn of everything that makes the results of a set doubtful; `image_size` is that of the network's input."""
    match target:
        case PairSet():
            warn_of_faulty_set(target)
            warn_of_photos(target, image_size)
        case SearchSet():
            _warn_of_missing_galleries(target)
            warn_of_photos(target, image_size)
        case IjbSet():  # whose faces are aligned during the evaluation
            _warn_of_faulty_templates(target)
            _warn_of_missing_galleries(target)


def _warn_of_missing_galleries(target: SearchSet | IjbSet) -> None:
    """Warn of a set without a part of its published gallery: the search in a smaller one is easier."""
    if isinstance(target, SearchSet) and (target.gallery_subject >= 0).all():
        missing = "the gallery has no distractors (Gallery_Distractor/)"
    elif isinstance(target, IjbSet) and target.probes is not None and len(target.galleries) == 1:
        missing = f"the 1:N protocol has two galleries, and {', '.join(target.galleries)} is the only one"
    else:
        return
    warn(f"{target.name}: {missing}; do not compare the results with published ones")


def _warn_of_faulty_templates(ijb: IjbSet) -> None:
    """Warn of templates that are compared with themselves, and of images that the detector's score leaves out."""
    if equal := int((ijb.first == ijb.second).sum()):
        warn(f"{ijb.name}: {count_text(equal, 'pair')} with the same template on both sides: to be removed")
    if unweighted := int((ijb.detection <= 0).sum()):
        warn(
            f"{ijb.name}: {count_text(unweighted, 'image')} with a detector score of 0 or less, which is the weight of "
            "an image in its template: correct the scores"
        )


def warn_of_photos(target: PairSet | SearchSet, image_size: int) -> None:
    """Warn if the first images of a set look like whole photos, or have no face at the place of an aligned face.

    `image_size` is the side of the network's input, pixels. Published sets have aligned faces of `TEMPLATE_SIZE`, which
    are no photos for a network with a smaller input either.
    """
    image_size = max(image_size, TEMPLATE_SIZE)
    parts = (
        {target.name: target.images}
        if isinstance(target, PairSet)
        else {f"{target.name} probes": target.probes, f"{target.name} gallery": target.gallery}
    )
    for name, images in parts.items():
        check = PhotoCheck(getattr(images, "location", None))
        for index in range(min(len(images), EXAMINED)):
            with suppress(UnreadableError):  # the embedding reports it
                check(decode_rgb(images[index], location=name), index, image_size)
        check.warn(
            name,
            advice="align them before they become a set, as `facetrain data pairs LIST --images FOLDER --detector "
            "yunet` does",
        )


def _faults(same_P: np.ndarray, image_N: np.ndarray | None) -> Iterator[str]:
    if same_P.all() or not same_P.any():
        yield "all pairs are of one kind; accuracy and error rates need genuine and impostor pairs"
        return
    if image_N is not None:
        yield from _faults_of_images(same_P, image_N)
    if np.any(np.diff(fold_order(same_P)) < 0):
        yield (
            "the pairs are sorted by kind, and a fold of consecutive pairs would have one kind only; each of the "
            f"{FOLDS} folds gets its share of both kinds instead"
        )
    elif len(same_P) >= 2 * FOLDS and not has_mixed_folds(same_P):
        yield "a fold of consecutive pairs has one kind only, and its accuracy rests on the order of the pairs"


def _faults_of_images(same_P: np.ndarray, image_N: np.ndarray) -> Iterator[str]:
    # Sorted: (a, b) and (b, a) are one pair.
    side_P2 = np.sort(image_N.reshape(-1, 2), axis=1)
    if equal := int((side_P2[:, 0] == side_P2[:, 1]).sum()):
        yield f"{count_text(equal, 'pair')} with the same image on both sides: to be removed"
    distinct = len(np.unique(side_P2, axis=0))
    labeled = len(np.unique(np.column_stack([side_P2, same_P]), axis=0))
    if labeled > distinct:
        number = count_text(labeled - distinct, "pair")
        yield f"{number} listed both as genuine and as impostor: the labels must be corrected"
    subject_N = connected_subjects(image_N[0::2], image_N[1::2], same_P, int(side_P2.max()) + 1)
    is_one_person = (subject_N[side_P2[:, 0]] == subject_N[side_P2[:, 1]]) & (side_P2[:, 0] < side_P2[:, 1])
    one_person = len(np.unique(side_P2[is_one_person & ~same_P], axis=0))
    # Those that are listed as both are reported above.
    if one_person > labeled - distinct:
        number = count_text(one_person - (labeled - distinct), "impostor pair")
        yield f"{number} of images that a chain of genuine pairs connects: the labels must be corrected"
    if labeled < len(same_P):
        number = count_text(len(same_P) - labeled, "pair")
        yield f"{number} listed again, which would count as often: remove the repetitions"
