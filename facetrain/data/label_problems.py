"""Faults in the labels of a training set, with which a run would end well and learn nothing."""

# N images

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from facetrain.data.dataset import FaceDataset
from facetrain.data.identity_counts import count_images
from facetrain.data.mixture import parts_of
from facetrain.errors import DataError
from facetrain.text import count_text

FEWEST_PEOPLE = 1_000
"""People from which a new network learns to tell others apart, at least; one that has learned it needs fewer."""
_RENUMBERED = (
    "the center of a class without images only repels; `facetrain data convert DATASET --to recordio --output NEW` "
    "writes a copy whose labels begin at 0 and have no gaps"
)


class LabelProblem(NamedTuple):
    """Fault in the labels of a dataset that training does not report."""

    message: str
    advice: str
    certainty: str = ""
    """How certain it is that the labels are wrong, for doctor; empty: they may be meant."""
    is_empty: bool = False
    """Whether most identities have no image."""


def require_trainable_labels(source: FaceDataset, name: str, *, may_have_gaps: bool) -> None:
    """Check that class centers for all labels make sense, before their memory is allocated.

    Args:
        source: the training set.
        name: its path, for messages.
        may_have_gaps: whether most labels below the highest may have no image: the config states their number.

    Raises:
        DataError: all images are of one identity, or most labels have no image.
    """
    if source.labels.min() == source.labels.max():
        raise DataError(
            f"{name}: all {source.num_images:,} images are of one identity, and a head learns from the differences of "
            "many; give a folder with a folder of images per person, or a list file of images and people"
        )
    for place, part in parts_of(source, name) if not may_have_gaps else ():
        problem = find_label_problem(part)
        # A dataset with chosen images (`mask:`) may have many empty classes: the number shows that it is meant.
        if problem is not None and problem.is_empty:
            raise DataError(
                f"{place}: {part.num_images:,} images of {part.num_classes:,} identities: {problem.message}; "
                f"{problem.advice}, or set data.num_classes to {source.num_classes} if that is meant"
            )


def label_remarks(source: FaceDataset, name: str) -> Iterator[str]:
    """Yield the problems of the labels of each dataset."""
    for place, part in parts_of(source, name):
        if (problem := find_label_problem(part)) is not None:
            yield f"{place}: {problem.message}; {problem.advice}"


def find_label_problem(source: FaceDataset) -> LabelProblem | None:
    """Return what is wrong with the labels of a dataset, or None if every identity has enough images."""
    classes = source.num_classes
    present, counts = count_images(source)
    first, missing, single = int(present[0]), classes - len(present), int((counts == 1).sum())
    is_empty = missing > classes / 2
    if missing and first > 0:
        is_shifted = first == missing
        remark = f", but every label from {first:,} to {classes - 1:,} has an image" if is_shifted else ""
        # Labels from 1 on are a known convention of other tools; from a higher number on, a part may be missing.
        certainty = "possible" if not is_shifted else "certain" if first == 1 else "likely"
        message = f"no image has the label 0{remark}: the labels begin at {first:,}"
        return LabelProblem(message, _RENUMBERED, certainty, is_empty)
    if missing:
        below = count_text(missing, "label below the highest has", "labels below the highest have")
        return LabelProblem(f"{below} no image", _RENUMBERED, is_empty=is_empty)
    if single > classes / 2:
        return LabelProblem(
            f"{single:,} of {classes:,} identities have one image", "consider data.min_images_per_identity: 2"
        )
    return None
