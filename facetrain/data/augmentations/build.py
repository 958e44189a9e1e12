"""The augmentations of a config."""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from facetrain.data.images.augment import Augment, Augmentation, OwnAugment
from facetrain.data.settings import AugmentSettings, OwnAugmentation
from facetrain.errors import ConfigError
from facetrain.own_parts import load_part


def build_augment(seed: int, settings: AugmentSettings) -> Augment:
    """Return the augmentation of batches with the probabilities of `data.augment`.

    Raises:
        ConfigError: a part of one's own cannot be imported, or takes other arguments.
    """
    options: dict[str, dict[str, Any]] = {"low_resolution": {"sizes": settings.low_resolution_sizes}}
    parts = [
        _augmentation(name, probability, options.get(name, {}))
        for name, probability in settings.probabilities().items()
        if probability > 0
    ]
    own = [_own_augment(f"data.augment.own[{number}]", each) for number, each in enumerate(settings.own)]
    return Augment(seed, settings.flip, parts, own)


def _own_augment(key: str, settings: OwnAugmentation) -> OwnAugment:
    function = load_part(settings.type, f"{key}.type")
    try:
        # Or the first step would find it, as it does for a builtin, which has no signature.
        with suppress(ValueError):
            inspect.signature(function).bind("images", "keys", **settings.options)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {settings.type}: {error}; it is called as f(image, key, **options)"
        ) from error
    return OwnAugment(f"{key}: {settings.type}", settings.probability, partial(function, **settings.options))


def _augmentation(name: str, probability: float, options: dict[str, Any]) -> Augmentation:
    module = import_module(f"{__package__}.{name}")
    return Augmentation(name, probability, partial(module.augment, **options), getattr(module, "move", None))
