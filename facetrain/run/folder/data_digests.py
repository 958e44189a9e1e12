"""Digests of what a run reads, by which a resumed run notices other data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.backbone.zoo import takes_landmarks
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import is_set
from facetrain.config.own_code import code_digests
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset, evenly_spread
from facetrain.data.mixture import MixtureDataset, parts_of
from facetrain.data.remote_dataset import object_versions
from facetrain.errors import ConfigError, ModelError, UnreadableError
from facetrain.models.model_digest import digest_model_files
from facetrain.remote.download import local_path
from facetrain.training.teacher_cache import cache_digest
from facetrain.verify.sets.pair_set import PairSet

_CHUNK_IMAGES = 1 << 20
_SAMPLED_IMAGES, _PLACED_IMAGES = 256, 1 << 17

_DATA_KEYS = ("data.train", "data.min_images_per_identity")
_INPUTS = {
    "dataset": (_DATA_KEYS, "images, another order of them, or other heads"),
    "records": (_DATA_KEYS, "images: some have another size or place in their files"),
    "samples": (_DATA_KEYS, "images: some have other bytes"),
    "object_versions": (_DATA_KEYS, "objects in the store"),
    "landmarks": (_DATA_KEYS, "landmarks beside the dataset"),
    "mixture": (_DATA_KEYS, "datasets, weights or lists in the mixture"),
    "set": (("eval.targets", "eval.dir"), "verification sets"),
    "teacher_cache": (("distill.cache", "distill.teacher"), "embeddings of the teacher"),
    "code": (
        ("head.margin.type", "model.backbone", "data.augment.own", "log.sinks"),
        "source files of your own code",
    ),
}
"""What a run reads, by the first word in the name of its digest: the config keys and sections that choose it (`--set`
changes it on purpose), and what differs, in words."""


def digest_inputs(config: Config, source: FaceDataset, sets: Sequence[PairSet]) -> dict[str, Any]:
    """Return the digests of what a run reads, as a checkpoint stores them.

    `dataset`, `records`, `samples`, `object_versions` (empty for data on a disk), `landmarks` (empty for a backbone
    that takes none) and `teacher_cache` (empty without one) are texts. `mixture` has the path, the weight and the
    checksums of the lists of each dataset of a mixture; it is empty for another dataset. `set NAME` is a text for each
    verification set, and `code KEY` one for each part of the user's own.

    Raises:
        DataError: the cache of the teacher cannot be read.
    """
    cache = config.distill.cache if config.distill else None
    return {
        "dataset": digest_labels(source),
        "records": digest_records(source),
        "samples": digest_samples(source),
        # Older checkpoints have "objects", for Google with the etags in place of the generations.
        "object_versions": digest_objects(source),
        "landmarks": digest_landmarks(source) if takes_landmarks(config.model.backbone) else "",
        "mixture": source.entries if isinstance(source, MixtureDataset) else [],
        **{f"set {pairs.name}": digest_set(pairs) for pairs in sets},
        "teacher_cache": cache_digest(local_path(cache)) if cache else "",
        **{f"code {key}": digest for key, digest in code_digests(config).items()},
    }


def digest_labels(source: FaceDataset) -> str:
    """Return a digest of a dataset: number and order of its images, their identities, and its separate heads."""
    # Piece by piece: the labels of 100 million images are 800 MB as int64. The type is fixed, so that the digest does
    # not depend on the format that stores them.
    labels = (
        source.labels[start : start + _CHUNK_IMAGES].astype(np.int64).tobytes()
        for start in range(0, source.num_images, _CHUNK_IMAGES)
    )
    heads = source.heads if isinstance(source, MixtureDataset) else None
    described = (
        [] if heads is None else [json.dumps([*map(asdict, heads)], sort_keys=True, default=str).encode()]
    )
    return _digest([f"{source.num_images} {source.num_classes}".encode()], labels, described)


def digest_records(source: FaceDataset) -> str:
    """Return a digest of the places and sizes of images in a dataset's files; empty if they are unknown.

    Of images at equal distances: each size of a folder of images is a request to the file system, and millions of them
    would take minutes at each start. In files of many images, another size moves all images behind it.
    """
    place_N2 = source.places(np.array(evenly_spread(source.num_images, _PLACED_IMAGES), np.int64))
    return "" if place_N2 is None else _digest([np.ascontiguousarray(place_N2, "<i8").tobytes()])


def digest_samples(source: FaceDataset) -> str:
    """Return a digest of a few images at equal distances; empty for objects in a store, which have versions.

    Of a mixture with such objects, these are images of the datasets that are on a disk.
    """
    local = [part for _, part in parts_of(source, "") if not object_versions(part)]
    parts = local if object_versions(source) else [source]

    def read(part: FaceDataset, number: int) -> bytes:
        try:
            return part.read(number)
        except UnreadableError:  # training replaces it, or ends by data.max_skipped
            return b""

    most = max(1, _SAMPLED_IMAGES // max(1, len(parts)))
    images = (read(part, number) for part in parts for number in evenly_spread(part.num_images, most))
    return _digest(images) if parts else ""


def model_paths(config: Config, *, is_new: bool) -> dict[str, Path]:
    """Return the paths of the models that a run reads, by config key.

    Raises:
        ModelError: one is missing.
    """
    init_from, teacher = config.model.init_from, config.distill.teacher if config.distill else None
    names = {"model.init_from": init_from if is_new else None, "distill.teacher": teacher}
    paths = {key: local_path(name) for key, name in names.items() if name}
    for key, path in paths.items():
        if not path.exists():
            raise ModelError(f"{key}: {path}: no such file or folder")
    return paths


def digest_weights(config: Config) -> dict[str, str]:
    """Return digests of the model files with which a new run begins, by config key.

    Raises:
        ModelError: one is missing.
        CheckpointError: one is a run folder without a sound checkpoint.
    """
    return {key: digest_model_files(path) for key, path in model_paths(config, is_new=True).items()}


def digest_objects(source: FaceDataset) -> str:
    """Return a digest of the addresses and versions of a dataset's objects in a store; empty if it has none."""
    versions = object_versions(source)
    return _digest([json.dumps(versions).encode()]) if versions else ""


def digest_landmarks(source: FaceDataset) -> str:
    """Return a digest of the landmarks of a dataset's images; empty if it has none."""
    read = source.landmark_reader()
    if read is None:
        return ""
    return _digest(
        read(np.arange(start, min(start + _CHUNK_IMAGES, source.num_images))).astype("<f4").tobytes()
        for start in range(0, source.num_images, _CHUNK_IMAGES)
    )


def digest_set(pairs: PairSet) -> str:
    """Return a digest of the images and the labels of a verification set."""
    images = (part for image in pairs.images for part in (f"{len(image)} ".encode(), image))
    return _digest([np.packbits(pairs.same).tobytes()], images)


def _digest(*parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in chain(*parts):
        digest.update(part)
    return digest.hexdigest()[:32]


def describe_difference(names: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Return the first of the inputs that differ and others of its kind, their config keys, and the kind in words."""
    kind = names[0].partition(" ")[0]
    alike = [name for name in names if name.partition(" ")[0] == kind]
    return alike, [*dict.fromkeys(_keys_of(name)[0] for name in alike)], _INPUTS[kind][1]


def _keys_of(name: str) -> tuple[str, ...]:
    """Return the config keys and sections that choose an input, first the one for `--set`."""
    kind, _, part = name.partition(" ")
    keys = _INPUTS[kind][0]
    # Each of them chooses one part of the user's own, or a list of them.
    return tuple(key for key in keys if part.startswith(key)) if kind == "code" else keys


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
        ConfigError: something differs, and not by `--set`; or the data has another number of identities.
    """
    # Also if the command sets the data: the centers are those of other identities.
    if num_classes != checkpoint.manifest.num_classes:
        raise ConfigError(
            f"{', '.join(_DATA_KEYS)}: {checkpoint.folder} has {checkpoint.manifest.num_classes:,} identities, and the "
            f"dataset has {num_classes:,}; continue with the data of the run, or start a new run with model.init_from"
        )
    changed = {
        name: _differing_parts(before, now)
        for name, before, now in _changed(checkpoint, digests)
        if not is_set(set_keys, *_keys_of(name))
    }
    if changed:
        names, keys, words = describe_difference([*changed])
        texts = [f"{name.partition(' ')[2]} {' → '.join(map(json.dumps, changed[name]))}" for name in names]
        differences = ", ".join(map(str.lstrip, texts))
        options = " ".join(f"--set {key}=VALUE" for key in keys)
        raise ConfigError(
            f"{', '.join(keys)}: {checkpoint.folder} was trained with other {words}: {differences}; restore them, or "
            f"change them on purpose with {options}"
        )


def changed_inputs(checkpoint: Checkpoint, digests: dict[str, Any]) -> dict[str, str]:
    """Return what differs from before the checkpoint, in words, by config key; of several inputs of a key the first."""
    changed = dict[str, str]()
    for name, _, _ in _changed(checkpoint, digests):
        _, (key,), words = describe_difference([name])
        changed.setdefault(key, words)
    return changed


def _changed(checkpoint: Checkpoint, digests: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each input that differs from before the checkpoint, and its digests before and now."""
    saved = dict(checkpoint.meta)
    for kind, old in (("set", "sets"), ("code", "code")):
        if isinstance(parts := saved.get(old), dict):  # as older checkpoints have them
            saved |= {f"{kind} {part}": digest for part, digest in parts.items()}
    for name, now in digests.items():
        before = saved.get(name)
        # A changed config may name other sets, or other code.
        if isinstance(before, type(now)) and before != now:
            yield name, before, now


def _differing_parts(before: Any, now: Any) -> tuple[Any, Any]:
    """Return two unequal digests; of lists only what the other does not have."""
    if isinstance(now, list):
        removed, added = (
            [each for each in before if each not in now],
            [each for each in now if each not in before],
        )
        if removed or added:  # else in another order
            return removed, added
    return before, now
