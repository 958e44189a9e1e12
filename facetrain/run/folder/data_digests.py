"""Digests of what a run reads, by which a resumed run notices other data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence, Set
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from facetrain.backbone.zoo import takes_landmarks
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset, image_landmarks, image_places
from facetrain.data.mixture import MixtureDataset
from facetrain.data.remote_dataset import object_versions
from facetrain.errors import ConfigError
from facetrain.run.folder.compatibility import is_within
from facetrain.training.teacher_cache import cache_digest
from facetrain.verify.sets.pair_set import PairSet

_CHUNK_IMAGES = 1 << 20


class _Input(NamedTuple):
    """Something that a run reads, by the name of its digest."""

    keys: tuple[str, ...]
    """Config keys and sections that choose it: --set changes it on purpose. The first one begins the message."""
    difference: str
    """How a run continues with another one, as the end of a sentence."""


_DATA_KEYS = ("data.train", "data.min_images_per_identity")
_INPUTS = {
    "dataset": _Input(
        _DATA_KEYS,
        "on a dataset with digest {before}, but this one has {now}: other images, or another order of them; restore "
        "the dataset",
    ),
    "records": _Input(
        _DATA_KEYS,
        "on images with digest {before}, but they have {now} now: some have another size or place in their files; "
        "restore the dataset",
    ),
    "objects": _Input(
        _DATA_KEYS,
        "on objects with digest {before}, but they have {now} now: the store has others; restore them",
    ),
    "landmarks": _Input(
        _DATA_KEYS,
        "with landmarks with digest {before}, but those beside the dataset now have {now}; restore the landmark file",
    ),
    "mixture": _Input(
        _DATA_KEYS, "with the values before the arrows: {difference}; restore them in the mixture"
    ),
    "sets": _Input(
        ("eval.targets", "eval.dir"),
        "with other verification sets: {difference}, so that its metrics cannot be compared; restore the files",
    ),
    "teacher_cache": _Input(
        ("distill.cache", "distill.teacher"),
        "with a cache with digest {before}, but this one has {now}; restore the file",
    ),
}


def digest_inputs(config: Config, source: FaceDataset, sets: Sequence[PairSet]) -> dict[str, Any]:
    """Return the digests of what a run reads, as a checkpoint stores them.

    `dataset`, `records`, `objects` (empty for data on a disk), `landmarks` (empty for a backbone that takes none) and
    `teacher_cache` (empty without one) are texts. `mixture` has the path, the weight and the checksums of the lists of
    each dataset of a mixture; it is empty for another dataset. `sets` has a text for each verification set.

    Raises:
        DataError: the cache of the teacher cannot be read.
    """
    cache = config.distill.cache if config.distill else None
    return {
        "dataset": digest_labels(source),
        "records": digest_records(source),
        "objects": digest_objects(source),
        "landmarks": digest_landmarks(source) if takes_landmarks(config.model.backbone) else "",
        "mixture": source.entries if isinstance(source, MixtureDataset) else [],
        "sets": {pairs.name: digest_set(pairs) for pairs in sets},
        "teacher_cache": cache_digest(Path(cache)) if cache else "",
    }


def digest_labels(source: FaceDataset) -> str:
    """Return a digest of a dataset: number and order of its images, their identities, and its separate heads."""
    digest = hashlib.sha256(f"{source.num_images} {source.num_classes}".encode())
    for start in range(0, source.num_images, _CHUNK_IMAGES):
        # Piece by piece: the labels of 100 million images are 800 MB as int64. The type is fixed, so that the digest
        # does not depend on the format that stores them.
        digest.update(source.labels[start : start + _CHUNK_IMAGES].astype(np.int64).tobytes())
    if isinstance(source, MixtureDataset) and source.heads is not None:
        digest.update(
            json.dumps([asdict(head) for head in source.heads], sort_keys=True, default=str).encode()
        )
    return digest.hexdigest()[:32]


def digest_records(source: FaceDataset) -> str:
    """Return a digest of the places and sizes of a dataset's images in its files; empty if they are unknown.

    The images themselves are not read: that would take hours.
    """
    digest = hashlib.sha256()
    for start in range(0, source.num_images, _CHUNK_IMAGES):
        index = np.arange(start, min(start + _CHUNK_IMAGES, source.num_images))
        place_N2 = image_places(source, index)
        if place_N2 is None:
            return ""
        digest.update(np.ascontiguousarray(place_N2, "<i8").tobytes())
    return digest.hexdigest()[:32]


def digest_objects(source: FaceDataset) -> str:
    """Return a digest of the addresses and versions of a dataset's objects in a store; empty if it has none."""
    versions = object_versions(source)
    return hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:32] if versions else ""


def digest_landmarks(source: FaceDataset) -> str:
    """Return a digest of the landmarks of a dataset's images; empty if it has none."""
    landmarks_N52 = image_landmarks(source)
    if landmarks_N52 is None:
        return ""
    digest = hashlib.sha256()
    for start in range(0, len(landmarks_N52), _CHUNK_IMAGES):
        digest.update(np.ascontiguousarray(landmarks_N52[start : start + _CHUNK_IMAGES], "<f4").tobytes())
    return digest.hexdigest()[:32]


def digest_set(pairs: PairSet) -> str:
    """Return a digest of the images and the labels of a verification set."""
    digest = hashlib.sha256(np.packbits(pairs.same).tobytes())
    for image in pairs.images:
        digest.update(f"{len(image)} ".encode())
        digest.update(image)
    return digest.hexdigest()[:32]


def check_inputs(
    checkpoint: Checkpoint, digests: dict[str, Any], num_classes: int, set_keys: Set[str]
) -> None:
    """Check that a run reads the same as before the checkpoint.

    Args:
        checkpoint: the checkpoint that the run continues from.
        digests: digests of what the run reads now.
        num_classes: number of identities of the training data.
        set_keys: config keys and sections that the command line sets: they change on purpose.

    Raises:
        ConfigError: something differs, and not by `--set`.
    """
    for name, now in digests.items():
        keys, words = _INPUTS[name]
        # Another number of identities has another message, when the centers are loaded.
        is_other_dataset = keys is _DATA_KEYS and num_classes != checkpoint.manifest.num_classes
        is_set = any(is_within(key, one) or is_within(one, key) for key in set_keys for one in keys)
        before = checkpoint.meta.get(name)
        if is_other_dataset or is_set or before in (None, now):
            continue
        difference = ""
        if name == "mixture":
            difference = _mixture_difference(before, now)
        if name == "sets":
            before = before if isinstance(before, dict) else {}
            changed = [target for target in now if before.get(target, now[target]) != now[target]]
            difference = ", ".join(changed)
            if not changed:  # other targets, which a changed config names
                continue
        words = words.format(before=before or "none", now=now or "none", difference=difference)
        raise ConfigError(
            f"{keys[0]}: {checkpoint.folder} was trained {words}, or change it on purpose with --set {keys[0]}=VALUE"
        )


def _mixture_difference(before: Any, now: list[dict[str, Any]]) -> str:
    """Return how the entries of a mixture differ in path, weight, list or mask."""
    # The metadata of a checkpoint may have any shape.
    saved = [entry if isinstance(entry, dict) else {} for entry in before] if isinstance(before, list) else []
    absent: dict[str, Any] = {}
    return "; ".join(
        f"{key} of dataset {number}: {json.dumps(old.get(key))} → {json.dumps(new.get(key))}"
        for number, (old, new) in enumerate(zip_longest(saved, now, fillvalue=absent), start=1)
        for key in dict.fromkeys([*new, *old])
        if old.get(key) != new.get(key)
    )
