"""The augmentations of a config."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from facetrain.data.images.augment import Augment, Augmentation, OwnAugment
from facetrain.data.settings import AugmentSettings
from facetrain.own_parts import load_part


def build_augment(seed: int, settings: AugmentSettings) -> Augment:
    """Return the augmentation of batches with the probabilities of `data.augment`.

    Raises:
        ConfigError: a part of one's own cannot be imported.
    """
    options: dict[str, dict[str, Any]] = {"low_resolution": {"sizes": settings.low_resolution_sizes}}
    parts = [
        _augmentation(name, probability, options.get(name, {}))
        for name, probability in settings.probabilities().items()
        if probability > 0
    ]
    own = [
        OwnAugment(each.probability, partial(load_part(each.type, "data.augment.own"), **each.options))
        for each in settings.own
    ]
    return Augment(seed, settings.flip, parts, own)


def _augmentation(name: str, probability: float, options: dict[str, Any]) -> Augmentation:
    module = import_module(f"{__package__}.{name}")
    return Augmentation(name, probability, partial(module.augment, **options), getattr(module, "move", None))
