"""Label faults: mixed identities, duplicate identities, mislabeled images and outliers, and the labels without them."""

# N images   L different labels

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MIXED_IDENTITY = "mixed_identity"
DUPLICATE_IDENTITY = "duplicate_identity"
MISLABELED_IMAGE = "mislabeled_image"
OUTLIER_IMAGE = "outlier_image"
FAULT_KINDS = {
    MIXED_IDENTITY: "identities with images of two people",
    DUPLICATE_IDENTITY: "pairs of identities that show one person",
    MISLABELED_IMAGE: "images of another identity",
    OUTLIER_IMAGE: "images that do not show their identity, and not clearly another one",
}


@dataclass(frozen=True)
class LabelFault:
    """Disagreement of a label and the embeddings, and the decision on it."""

    kind: str
    """A key of `FAULT_KINDS`."""
    identity: int
    """Identity in the dataset."""
    other: int
    """The other identity of a duplicate identity or a mislabeled image; else −1."""
    similarity: float
    """Cosine of two identities or groups, of a mislabeled image and `other`, or of an outlier and its identity."""
    images: tuple[int, ...] = ()
    """Images of the smaller group of a mixed identity, or the mislabeled or outlier image."""
    target: int = -1
    """Label that `images` get, −1 to leave them out; for a duplicate identity, the identity that both become."""

    @property
    def image(self) -> int:
        """The first of `images`; −1 for a duplicate identity."""
        return self.images[0] if self.images else -1


def certain_faults(faults: list[LabelFault]) -> list[LabelFault]:
    """Return the faults to apply without a review: all but duplicate identities."""
    return [fault for fault in faults if fault.kind != DUPLICATE_IDENTITY]


def apply_faults(label_N: np.ndarray, faults: list[LabelFault]) -> np.ndarray:
    """Return the labels after the decisions on faults: first groups, then single images, last merged identities."""
    label = label_N.astype(np.int64)
    for kinds in ((MIXED_IDENTITY,), (MISLABELED_IMAGE, OUTLIER_IMAGE)):
        for fault in faults:
            if fault.kind in kinds:
                label[list(fault.images)] = fault.target
    # Not an array of all labels: a damaged label can be so large that it would fill the memory.
    roots: dict[int, int] = {}
    for fault in faults:
        if fault.kind == DUPLICATE_IDENTITY:
            merged = (fault.identity, fault.other, fault.target)
            root, *leaves = sorted({_root(roots, identity) for identity in merged})
            roots |= dict.fromkeys(leaves, root)
    present, row_N = np.unique(label, return_inverse=True)
    root_L = np.array([_root(roots, identity) for identity in present.tolist()])
    return root_L[row_N]


def count_changes(label_N: np.ndarray, corrected_N: np.ndarray) -> tuple[int, int]:
    """Return the numbers of images whose label changes, and of identities that keep none of their images."""
    kept_N = (corrected_N >= 0) & (label_N == corrected_N)
    disappearing = len(np.unique(label_N)) - len(np.unique(label_N[kept_N]))
    return int((label_N != corrected_N).sum()), disappearing


def _root(roots: Mapping[int, int], identity: int) -> int:
    """Return the identity that an identity is merged into, or the identity itself."""
    while identity in roots:
        identity = roots[identity]
    return identity
