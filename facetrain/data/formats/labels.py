"""Labels from numbers and from names of identities, and names of identities from the folders of their images."""

# N images

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np

from facetrain.errors import DataError
from facetrain.text import printable

MAX_LABEL = 2**31
"""Labels are int32, below this number."""
_NEGATIVE_NUMBER = re.compile(r"-\d+(\.0*)?", re.ASCII)


def are_labels(number_N: np.ndarray) -> np.ndarray:
    """Return which floating-point numbers are labels, whole and from 0 to 2^31: bool (N,)."""
    return (number_N >= 0) & (number_N < MAX_LABEL) & (number_N == np.floor(number_N))


def require_labels(number_N: np.ndarray, place: object) -> np.ndarray:
    """Return numbers of any type as labels, int32 (N,).

    Raises:
        DataError: a number is not whole, negative or too large; the message begins with `place`.
    """
    # As float64: the limit is beyond the largest number of 16 bits.
    wrong_N = ~are_labels(number_N.astype(np.float64))
    if wrong_N.any():
        number = number_N[np.argmax(wrong_N)]
        wrong = int(number) if number.is_integer() else number
        if wrong < 0:
            raise _negative(wrong, place)
        raise DataError(
            f"{place}: the label {wrong} is not a whole number from 0 to 2^31; number the identities from 0"
        )
    return number_N.astype(np.int32)


def _negative(label: object, place: object) -> DataError:
    return DataError(
        f"{place}: the label {label} is negative, as those of unknown people are; leave out their images, and number "
        "the identities from 0"
    )


def require_names(names: Iterable[str], place: object) -> None:
    """Check that different names are different people.

    Raises:
        DataError: a name is empty or a negative number, as those of all unknown people are, or two have different
            characters for the same letters: é is one character (Unicode's NFC) or, in files of macOS, two (NFD). The
            message begins with `place`.
    """
    composed: dict[str, str] = {}
    for name in names:
        if not name.strip():
            raise DataError(
                f"{place}: a label is empty, as those of unknown people are; leave out their images"
            )
        if _NEGATIVE_NUMBER.fullmatch(name):
            raise _negative(name, place)
        if not name.isascii() and composed.setdefault(unicodedata.normalize("NFC", name), name) != name:
            raise DataError(
                f"{place}: the identity {printable(name)} is written in two ways that look alike (Unicode's NFC and "
                "NFD); write it in one way"
            )


def number_identities(identities: Sequence[int | str], place: object) -> tuple[np.ndarray, list[str]]:
    """Return the label of each image, int32 (N,), and the names of the identities by label.

    Numbers are labels without names. If one identity is a text, the labels are the ranks in sorted order.

    Raises:
        DataError: a number is negative or too large, or a name is refused by `require_names`; the message begins with
            `place`.
    """
    distinct = set(identities)
    if all(isinstance(identity, int) for identity in distinct):
        return require_labels(np.array(identities, np.float64), place), []
    # A number before the same text: without an order of the two, each process could number them differently.
    ordered = sorted(distinct, key=lambda identity: (str(identity), isinstance(identity, str)))
    require_names((identity for identity in ordered if isinstance(identity, str)), place)
    label_of = {identity: label for label, identity in enumerate(ordered)}
    labels = np.fromiter((label_of[identity] for identity in identities), np.int32, len(identities))
    return labels, [str(identity) for identity in ordered]


def names_of_folders(labels: Iterable[int], folders: Iterable[str]) -> list[str]:
    """Return the name of each label if its images are in one folder and no other images are; otherwise an empty list.

    A label without images has its number as name.
    """
    pairs = set(zip(labels, folders, strict=True))
    folder_of = dict(pairs)
    one_to_one = len(pairs) == len(folder_of) == len(set(folder_of.values()))
    if not one_to_one or "" in folder_of.values():
        return []
    return [folder_of.get(label, str(label)) for label in range(max(folder_of, default=-1) + 1)]
