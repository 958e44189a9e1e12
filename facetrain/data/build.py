"""Opening of the training data from the settings of the section `data`."""

from __future__ import annotations

from pathlib import Path

from facetrain.data.dataset import FaceDataset
from facetrain.data.dataset_card import DatasetCard, read_cards
from facetrain.data.open_dataset import open_dataset
from facetrain.data.remote_dataset import ObjectCache, dataset_path
from facetrain.data.settings import DataSettings


def training_data_path(data: DataSettings) -> Path:
    """Return the local path of `data.train`; errors as `dataset_path`."""
    return dataset_path(data.train, _object_cache(data))


def open_training_data(data: DataSettings) -> FaceDataset:
    """Open the dataset of `data.train`; errors as `dataset_path` and `open_dataset`."""
    return open_dataset(
        training_data_path(data),
        min_images_per_identity=data.min_images_per_identity,
        cache=_object_cache(data),
    )


def read_training_cards(data: DataSettings) -> list[DatasetCard]:
    """Return the cards of the training data; errors as `read_cards`."""
    return read_cards(training_data_path(data), _object_cache(data))


def _object_cache(data: DataSettings) -> ObjectCache:
    return ObjectCache(Path(data.cache) if data.cache else None, data.cache_bytes)
