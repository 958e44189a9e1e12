"""Training data and verification sets of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from facetrain.backbone.zoo import takes_landmarks
from facetrain.config.schema import Config
from facetrain.data.build import open_training_data, read_training_cards, training_data_path
from facetrain.data.dataset import FaceDataset, evenly_spread
from facetrain.data.images.decode import decode_rgb, resize_square
from facetrain.data.images.normalize import normalize
from facetrain.data.label_problems import require_trainable_labels
from facetrain.data.open_dataset import check_counts, require_aligned, require_landmarks
from facetrain.data.published_datasets import require_dataset
from facetrain.errors import PairsError
from facetrain.verify.sets.pair_set import PairSet, load_pair_sets

_SPREAD_IMAGES = 128


@dataclass(frozen=True)
class RunData:
    """Training data and verification sets of a run, opened on this rank."""

    source: FaceDataset
    sets: list[PairSet]


def open_data(config: Config) -> RunData:
    """Open the training data and the verification sets.

    Raises:
        DataError: a dataset or set cannot be read, or does not agree with the config.
    """
    source = open_training_set(config)
    try:
        return RunData(source, load_pair_sets(config.eval.targets, config.local_eval_dir))
    except PairsError as error:
        raise PairsError(f"eval.targets: {error}; with `eval.targets: []` a run verifies nothing") from error


def open_training_set(config: Config) -> FaceDataset:
    """Open the training data, and refuse data with which a run cannot learn.

    Raises:
        DataError: the dataset cannot be read, does not agree with the config, has one identity, or faces that are not
            aligned.
    """
    data, folder = config.data, training_data_path(config.data)
    require_dataset(data)
    source = open_training_data(data)
    read_training_cards(data)  # on all ranks: the leader copies the cards, and must not fail alone
    if takes_landmarks(config.model.backbone):
        require_landmarks(source, data.train, config.model.backbone)
    check_counts(source, folder, num_classes=data.num_classes, num_images=data.num_images)
    require_trainable_labels(source, data.train, may_have_gaps=data.num_classes is not None)
    require_aligned(source, data.train)
    return source


def evenly_spread_images(source: FaceDataset, image_size: int) -> Tensor:
    """Return images at equal distances in a dataset, at most `_SPREAD_IMAGES`: float32 (B, 3, H, W) in [−1, 1].

    Raises:
        ImageError: one of them cannot be decoded.
    """
    images = [
        resize_square(decode_rgb(source.read(number), location=source.location(number)), image_size)
        for number in evenly_spread(source.num_images, _SPREAD_IMAGES)
    ]
    return normalize(torch.from_numpy(np.stack(images)))
