"""Digests of the training data, by which a resumed run notices other data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import numpy as np

from facetrain.backbone.zoo import takes_landmarks
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset, image_landmarks
from facetrain.data.mixture import MixtureDataset
from facetrain.errors import ConfigError
from facetrain.run.folder.compatibility import is_within

_CHUNK_IMAGES = 1 << 20
_CHANGING_KEYS = ("data.train", "data.min_images_per_identity", "data.synthetic")
"""Config keys and sections that decide which images a run trains on."""
_DIFFERENCES = {
    "dataset": "on a dataset with digest {before}, but this one has {now}: other images, or another order of them; "
    "restore the dataset",
    "landmarks": "with landmarks with digest {before}, but those beside the dataset now have {now}; restore the "
    "landmark file",
    "mixture": "with the values before the arrows: {difference}; restore them in the mixture",
}


def digest_data(config: Config, source: FaceDataset) -> dict[str, Any]:
    """Return the digests of a run's training data, as a checkpoint stores them.

    `dataset` and `landmarks` (empty for a backbone that takes none) are texts. `mixture` has the path, the weight and
    the checksums of the lists of each dataset of a mixture; it is empty for another dataset.
    """
    return {
        "dataset": digest_labels(source),
        "landmarks": digest_landmarks(source) if takes_landmarks(config.model.backbone) else "",
        "mixture": source.entries if isinstance(source, MixtureDataset) else [],
    }


def digest_labels(source: FaceDataset) -> str:
    """Return a digest of a dataset: number and order of its images, their identities, and its separate heads.

    The images themselves are not read: that would take hours.
    """
    digest = hashlib.sha256(f"{source.num_images} {source.num_classes}".encode())
    for start in range(0, source.num_images, _CHUNK_IMAGES):
        digest.update(source.labels[start : start + _CHUNK_IMAGES].astype(np.int64).tobytes())
    if isinstance(source, MixtureDataset) and source.heads is not None:
        digest.update(
            json.dumps([asdict(head) for head in source.heads], sort_keys=True, default=str).encode()
        )
    return digest.hexdigest()[:32]


def digest_landmarks(source: FaceDataset) -> str:
    """Return a digest of the landmarks of a dataset's images; empty if it has none."""
    landmarks_N52 = image_landmarks(source)
    if landmarks_N52 is None:
        return ""
    digest = hashlib.sha256()
    for start in range(0, len(landmarks_N52), _CHUNK_IMAGES):
        digest.update(np.ascontiguousarray(landmarks_N52[start : start + _CHUNK_IMAGES], "<f4").tobytes())
    return digest.hexdigest()[:32]


def check_data(checkpoint: Checkpoint, digests: dict[str, Any], num_classes: int, set_keys: Set[str]) -> None:
    """Check that the training data are the same as in the checkpoint.

    Args:
        checkpoint: the checkpoint that the run continues from.
        digests: digests of the training data.
        num_classes: number of identities of the training data.
        set_keys: config keys and sections that the command line sets: they change on purpose.

    Raises:
        ConfigError: the dataset, its landmarks or its mixture are others, and not by `--set`.
    """
    # Another number of identities has another message, when the centers are loaded.
    if num_classes != checkpoint.manifest.num_classes or any(
        is_within(key, changing) or is_within(changing, key)
        for key in set_keys
        for changing in _CHANGING_KEYS
    ):
        return
    for name, now in digests.items():
        before = checkpoint.meta.get(name)
        if before not in (None, now):
            difference = _mixture_difference(before, now) if name == "mixture" else ""
            words = _DIFFERENCES[name].format(before=before, now=now or "none", difference=difference)
            raise ConfigError(
                f"data.train: {checkpoint.folder} was trained {words}, or change it on purpose with --set "
                "data.train=PATH"
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
