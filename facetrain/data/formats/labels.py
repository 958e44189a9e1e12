"""Labels from the names of identities, and names of identities from the folders of their images."""

from __future__ import annotations

from collections.abc import Iterable


def label_of_each(identities: Iterable[int | str]) -> dict[int | str, int]:
    """Return the label of each identity: the number itself if all are numbers, otherwise the rank in sorted order."""
    distinct = set(identities)
    if all(isinstance(identity, int) for identity in distinct):
        return {identity: int(identity) for identity in distinct}
    # A number before the same text: without an order of the two, each process could number them differently.
    ordered = sorted(distinct, key=lambda identity: (str(identity), isinstance(identity, str)))
    return {identity: label for label, identity in enumerate(ordered)}


def names_of_folders(labels: Iterable[int], folders: Iterable[str]) -> list[str]:
    """Return the name of each label if its images are in one folder and no other images are; otherwise an empty list.

    A label without images has its number as name.
    """
    folder_of, label_of = dict[int, str](), dict[str, int]()
    for label, folder in zip(labels, folders, strict=True):
        if (
            not folder
            or folder_of.setdefault(label, folder) != folder
            or label_of.setdefault(folder, label) != label
        ):
            return []
    return [folder_of.get(label, str(label)) for label in range(max(folder_of, default=-1) + 1)]
