"""Training data and verification sets of a run, written first if they are synthetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from facetrain.backbone.zoo import takes_landmarks
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.dataset_card import read_cards
from facetrain.data.images.augment import normalize
from facetrain.data.images.decode import decode_rgb, resize_square
from facetrain.data.open_dataset import check_counts, open_dataset, require_landmarks
from facetrain.data.published_datasets import require_dataset
from facetrain.data.synthetic.dataset_writer import write_synthetic
from facetrain.distributed.agreement import decide_on_leader, fail_together
from facetrain.distributed.world import World
from facetrain.verify.sets.pair_set import PairSet, load_pair_sets

_SPREAD_IMAGES = 128


def write_missing_dataset(config: Config, world: World) -> None:
    """Write the synthetic dataset of a config on the leader, if it has one that does not exist yet. Collective.

    Raises:
        DataError: the folder cannot be written.
    """
    synthetic, folder = config.data.synthetic, Path(config.data.train)
    if synthetic is None or not decide_on_leader(world, lambda: not folder.exists()):
        return
    # The other ranks wait as long as for any collective. `facetrain data synth` writes larger datasets before a run.
    with fail_together(world):
        if world.is_leader:
            print(f"rendering {synthetic.identities:,} synthetic identities to {folder}", flush=True)
            write_synthetic(folder, synthetic, image_size=config.data.image_size)


def open_data(config: Config) -> tuple[FaceDataset, list[PairSet]]:
    """Open the training data and the verification sets.

    Raises:
        DataError: a dataset or set cannot be read, or does not agree with the config.
    """
    data, folder = config.data, Path(config.data.train)
    require_dataset(folder, num_classes=data.num_classes, num_images=data.num_images)
    source = open_dataset(folder, min_images_per_identity=data.min_images_per_identity)
    read_cards(folder)  # on all ranks: the leader copies the cards, and must not fail alone
    if takes_landmarks(config.model.backbone):
        require_landmarks(source, folder, config.model.backbone)
    check_counts(source, folder, num_classes=data.num_classes, num_images=data.num_images)
    return source, load_pair_sets(config.eval.targets, Path(config.eval_dir))


def evenly_spread_images(source: FaceDataset, image_size: int) -> Tensor:
    """Return images at equal distances in a dataset, at most `_SPREAD_IMAGES`: float32 (B, 3, H, W) in [−1, 1].

    Raises:
        ImageError: one of them cannot be decoded.
    """
    step = max(source.num_images // _SPREAD_IMAGES, 1)
    images = [
        resize_square(decode_rgb(source.read(number), location=source.location(number)), image_size)
        for number in range(0, source.num_images, step)[:_SPREAD_IMAGES]
    ]
    return normalize(torch.from_numpy(np.stack(images)))
