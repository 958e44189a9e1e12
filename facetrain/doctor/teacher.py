"""Checks of the teacher (`distill`): it opens, its cache belongs to it, and its colors are in the right order."""

# B images   H, W height and width   P pairs of images   T embedding of the teacher

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.config.schema import Config
from facetrain.data.augmentations.build import build_augment
from facetrain.data.dataset import FaceDataset
from facetrain.doctor.check_result import CheckResult, passed, warned_if
from facetrain.doctor.image_sample import read_images
from facetrain.models.model_file import EmbeddingModel, open_model
from facetrain.remote.download import local_path
from facetrain.run.parts.teacher_embeddings import open_cache

_PAIRS = 24
"""Identities of which two images are embedded; a large teacher takes some 0.2 s for an image on a CPU core."""
_LEAST_PAIRS = 8
_CLEAR_DIFFERENCE = 0.5
"""Difference of two separations, in standard deviations, from which an order of colors is likely to be wrong."""


def check_teacher(config: Config, source: FaceDataset | None) -> Iterator[CheckResult]:
    """Open the teacher, and test it on images of the training data.

    Raises:
        ModelError: the teacher cannot be opened, or its embeddings are not finite.
        DataError: the cache cannot be read, or belongs to other data or another teacher.
    """
    distill = config.distill
    assert distill is not None, "the config has no teacher"
    teacher = open_model(local_path(distill.teacher), torch.device("cpu"))
    size = _embed(teacher, np.zeros((1, teacher.image_size, teacher.image_size, 3), np.uint8)).shape[1]
    student = config.model.embedding_size
    bridge = f"a learned projection maps the network's {student:,} to them"
    if size == student:
        bridge = "as the network"
    message = f"{distill.teacher}: {teacher.description}; embeddings of {size:,} elements, {bridge}"
    yield passed("teacher", message)
    if source is None:
        return
    if distill.cache is not None:
        # Compares the digests of dataset and teacher in the cache, as training does.
        open_cache(config, source, build_augment(0, config.data.augment))
        yield passed("teacher cache", f"{distill.cache}: belongs to this teacher and this dataset")
    index_P2 = _pairs(source.labels)
    if len(index_P2) < _LEAST_PAIRS:
        message = f"not checked: fewer than {_LEAST_PAIRS} identities have two images"
        yield passed("teacher colors", message)
        return
    image_BHWC = read_images(source, index_P2.reshape(-1), teacher.image_size)
    yield _check_colors(distill.teacher, _embed(teacher, image_BHWC), _embed(teacher, image_BHWC[..., ::-1]))


def _check_colors(path: str, embedding_BT: Tensor, swapped_BT: Tensor) -> CheckResult:
    """Compare how well the teacher separates identities with the order of colors of its file, and with the other."""
    given, swapped = _separation(embedding_BT), _separation(swapped_BT)
    message = (
        f"{path}: separates two images of an identity from images of others by {given:.1f} standard deviations, with "
        f"red and blue exchanged by {swapped:.1f}"
    )
    advice = (
        "state the order of its training in the file: `preprocessing.channels` is RGB or BGR (docs/models.md)"
    )
    return warned_if(swapped > given + _CLEAR_DIFFERENCE, "teacher colors", message, advice, "likely")


def _pairs(labels: np.ndarray) -> np.ndarray:
    """Return two images of some identities each, evenly spread: int64 (P, 2)."""
    order = np.argsort(labels, kind="stable")
    first = np.flatnonzero(np.r_[True, np.diff(labels[order]) != 0])
    first = first[np.diff(np.r_[first, len(order)]) >= 2]
    # Without any pair, linspace ends before it begins: nothing is chosen.
    chosen = first[np.unique(np.linspace(0, len(first) - 1, min(_PAIRS, len(first))).astype(np.int64))]
    return np.stack([order[chosen], order[chosen + 1]], axis=1)


@torch.no_grad()
def _embed(teacher: EmbeddingModel, image_BHWC: np.ndarray) -> Tensor:
    """Return the embeddings of uint8 RGB images (B, T), float32."""
    pixels_BHWC = torch.from_numpy(np.ascontiguousarray(image_BHWC))
    # In parts: the activations of all images at once may not fit into the memory.
    return torch.cat([teacher.network(teacher.prepare(part)).float() for part in pixels_BHWC.split(16)])


def _separation(embedding_BT: Tensor) -> float:
    """Return the difference of the mean cosines of pairs and of other images, in standard deviations (d′)."""
    cos_BB = F.normalize(embedding_BT) @ F.normalize(embedding_BT).T
    # Rows 2p and 2p + 1 are the two images of an identity.
    same = cos_BB[::2, 1::2].diagonal()
    other = cos_BB[::2, 1::2][~torch.eye(len(same), dtype=torch.bool)]
    return float((same.mean() - other.mean()) / ((same.var() + other.var()) / 2).sqrt().clamp_min(1e-6))
