"""Training data and verification sets of a run, opened or generated from its config.

A synthetic dataset that does not exist yet is available at once: the reading processes generate its images on demand,
and the run writes the dataset to the disk while it trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
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
from facetrain.data.loading.loader import Batch
from facetrain.data.open_dataset import (
    check_counts,
    drop_small_identities,
    open_dataset,
    require_landmarks,
)
from facetrain.data.published_datasets import require_dataset
from facetrain.verify.sets.pair_set import PairSet, load_pair_sets

_SPREAD_IMAGES = 128


def must_generate(config: Config) -> bool:
    """Return whether the config asks for a synthetic dataset that does not exist yet."""
    return config.data.synthetic is not None and not Path(config.data.train).exists()


def open_data(config: Config, *, workers: int) -> tuple[FaceDataset, list[PairSet]]:
    """Open the training data and the verification sets.

    `workers` processes generate the verification pairs of a synthetic dataset that does not exist yet.

    Raises:
        DataError: a dataset or set cannot be read, or does not agree with the config.
    """
    folder, min_images = Path(config.data.train), config.data.min_images_per_identity
    generated: list[PairSet] = []
    if must_generate(config):
        source = drop_small_identities(_synthetic_source(config), folder, min_images)
        generated = _synthetic_pairs(config, workers)
    else:
        data = config.data
        require_dataset(folder, num_classes=data.num_classes, num_images=data.num_images)
        source = open_dataset(folder, min_images_per_identity=min_images)
        read_cards(folder)  # on all ranks: the leader copies the cards, and must not fail alone
    if takes_landmarks(config.model.backbone):
        require_landmarks(source, folder, config.model.backbone)
    check_counts(source, folder, num_classes=config.data.num_classes, num_images=config.data.num_images)
    return source, load_pair_sets(config.eval.targets, Path(config.eval_dir), generated)


def write_while_training(
    config: Config, source: FaceDataset, batches: Iterable[tuple[Batch, ...]]
) -> Iterator[tuple[Batch, ...]]:
    """Yield the batches, and write the synthetic dataset in other processes from the second one to the last."""
    from facetrain.data.synthetic.lazy_dataset import LazyDataset, write_in_background

    synthetic = config.data.synthetic
    assert synthetic is not None and isinstance(source, LazyDataset), "the dataset is not generated"
    folder, image_size = Path(config.data.train), config.data.image_size
    batches = iter(batches)
    yield from islice(batches, 1)  # the first step has all cores to itself: it shows soon that training works
    with write_in_background(source, folder, image_size=image_size, **synthetic.model_dump()) as wait:
        yield from batches
        wait()


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


def _synthetic_source(config: Config) -> FaceDataset:
    from facetrain.data.synthetic.lazy_dataset import LazyDataset

    synthetic = config.data.synthetic
    assert synthetic is not None, "the dataset is not generated"
    return LazyDataset(
        Path(config.data.train),
        identities=synthetic.identities,
        images_per_identity=synthetic.images_per_identity,
        image_size=config.data.image_size,
        seed=synthetic.seed,
    )


def _synthetic_pairs(config: Config, workers: int) -> list[PairSet]:
    from facetrain.data.synthetic.dataset_writer import EVAL_SET_NAME, render_eval_pairs

    synthetic = config.data.synthetic
    assert synthetic is not None, "the dataset is not generated"
    if EVAL_SET_NAME not in config.eval.targets or Path(config.eval_dir) != Path(config.data.train):
        return []
    images, same = render_eval_pairs(
        eval_identities=synthetic.eval_identities,
        eval_pairs=synthetic.eval_pairs,
        image_size=config.data.image_size,
        seed=synthetic.seed,
        workers=max(workers, 1),
    )
    return [PairSet(EVAL_SET_NAME, images, same)]
