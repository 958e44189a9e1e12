"""People whom another run knows: the names of its identities, and the class center of each identity of a new run.

A checkpoint has the names beside the centers, where the dataset has names. Only one rank reads and compares them, by
their digests: in a list, 29 million names take gigabytes.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from facetrain.errors import ModelError
from facetrain.text import listed

IDENTITIES = "identities."
"""Prefix of the tensors of a checkpoint that have the names."""
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Names:
    """Names of identities 0, 1, …, as UTF-8 with a line break after each."""

    text: bytes

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """Take names without line breaks, as `printable` returns them."""
        text = BytesIO()
        text.writelines(f"{name}\n".encode() for name in names)  # `join` would make a list of them first
        return cls(text.getvalue())

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Names | None:
        """Return the names of `tensors`; None if a checkpoint has none."""
        return cls(tensors["names"].numpy().tobytes()) if "names" in tensors else None

    def tensors(self) -> dict[str, Tensor]:
        """Return the names as a tensor: there may be more than a manifest can hold."""
        return {"names": torch.frombuffer(bytearray(self.text), dtype=torch.uint8)}

    def digests(self) -> np.ndarray:
        """Return a digest of each name, S16 (N,); Unicode's NFC and NFD of a name have one."""
        digest_N = np.empty(self.text.count(b"\n"), f"S{_DIGEST_BYTES}")
        for number, line in enumerate(BytesIO(self.text)):
            name = line[:-1]
            if not name.isascii():
                composed = unicodedata.normalize("NFC", name.decode("utf-8", "surrogateescape"))
                name = composed.encode("utf-8", "surrogateescape")
            digest_N[number] = hashlib.blake2b(name, digest_size=_DIGEST_BYTES).digest()
        return digest_N

    def name(self, number: int) -> str:
        """Return the name of an identity."""
        line = next(islice(BytesIO(self.text), number, None))  # a list of all would take gigabytes
        return line[:-1].decode("utf-8", "replace")


@dataclass(frozen=True)
class CenterChoice:
    """Center that each identity of a new run begins with."""

    number: np.ndarray
    """Number of the center in the other run, int64 (num_classes,); -1: the identity is new."""
    remark: str
    """What was chosen, and by what, as a line for the user."""


def choose_centers(
    path: Path, known: Names | None, num_known: int, names: Names | None, num_classes: int, *, may_grow: bool
) -> CenterChoice:
    """Choose the center of another run for each identity: by name if both have names, else by number.

    Args:
        path: the other run, for messages.
        known: names of its identities; None if they are unknown.
        num_known: number of its identities.
        names: names of the identities of the new run; None if they have none.
        num_classes: number of these.
        may_grow: whether identities may be new, and others removed; only new ones, at the end, without names.

    Raises:
        ModelError: the identities differ, and may not; or the names do not say who is who.
    """
    if known is None or names is None:
        missing = path if known is None else "the dataset"
        _check_count(path, num_known, num_classes, may_grow=may_grow)
        remark = f"{missing} has no names of identities: class n is assumed to be the same person in both"
        return CenterChoice(_in_order(num_known, num_classes), f"class centers by number; {remark}")
    known_N, name_C = known.digests(), names.digests()
    if len(known_N) != num_known:
        raise ModelError(f"{path}: has {num_known:,} centers, but {len(known_N):,} names; it is damaged")
    if _has_repeated(known_N) or _has_repeated(name_C):
        return _choose_in_same_order(path, known_N, name_C, known, names, may_grow=may_grow)
    number_C = np.full(len(name_C), -1)
    _, known_at, wanted_at = np.intersect1d(known_N, name_C, assume_unique=True, return_indices=True)
    number_C[wanted_at] = known_at
    new, removed = int((number_C < 0).sum()), len(known_N) - int((number_C >= 0).sum())
    if new == num_classes:
        raise ModelError(
            f"{path}: none of its identities ({listed([known.name(0)])}, …) has a name that the dataset has "
            f"({listed([names.name(0)])}, …); rename the identities, or use head.init_from: reinit"
        )
    counts = f"{new:,} new, {removed:,} removed"
    if (new or removed) and not may_grow:
        added, gone = np.flatnonzero(number_C < 0), np.flatnonzero(~np.isin(known_N, name_C))
        examples = [*map(names.name, added[:1].tolist()), *map(known.name, gone[:1].tolist())]
        raise ModelError(
            f"{path}: has centers of other identities than the dataset: {counts}, such as {listed(examples)}; "
            "head.init_from: extend takes the centers of all known names"
        )
    taken = len(known_N) - removed
    return CenterChoice(
        number_C, f"class centers by name: of {taken:,} of {len(known_N):,} identities; {counts}"
    )


def _check_count(path: Path, num_known: int, num_classes: int, *, may_grow: bool) -> None:
    """Check that a dataset without names, or with repeated ones, can be that of the centers."""
    if num_known > num_classes or (num_known < num_classes and not may_grow):
        advice = (
            "head.init_from: extend keeps them and adds the new identities"
            if num_known < num_classes
            else "use head.init_from: reinit"
        )
        raise ModelError(
            f"{path}: has centers of {num_known:,} identities, the dataset has {num_classes:,}; {advice}"
        )


def _choose_in_same_order(
    path: Path, known_N: np.ndarray, name_C: np.ndarray, known: Names, names: Names, *, may_grow: bool
) -> CenterChoice:
    """Choose centers by number, for names that several identities have: the datasets of a mixture may share names."""
    _check_count(path, len(known_N), len(name_C), may_grow=may_grow)
    differs_N = known_N != name_C[: len(known_N)]
    if differs_N.any():
        number = int(np.argmax(differs_N))
        before, now = listed([known.name(number)]), listed([names.name(number)])
        raise ModelError(
            f"{path}: identity {number:,} is {before} there and {now} in the dataset, and some names occur twice, so "
            "they do not say who is who; keep the order of the known identities, or use head.init_from: reinit"
        )
    return CenterChoice(
        _in_order(len(known_N), len(name_C)),
        f"class centers by number: names are there twice; those of all {len(known_N):,} known identities agree",
    )


def _in_order(num_known: int, num_classes: int) -> np.ndarray:
    number_C = np.arange(num_classes)
    number_C[num_known:] = -1
    return number_C


def _has_repeated(digest_N: np.ndarray) -> bool:
    ordered_N = np.sort(digest_N)
    return bool((ordered_N[1:] == ordered_N[:-1]).any())
