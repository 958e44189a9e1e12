"""Settings that a new run chooses before it is built: batch size and learning rate (`--batch auto`, `--lr find`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import build_config, override_values, plain_config
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.distributed.world import World
from facetrain.run.folder.compatibility import saved_value

BatchChoice = Callable[[Config, World, FaceDataset], tuple[Config, str]]
"""Returns the config with the chosen batch, and a line that says what was chosen and why. Collective."""

_BATCH_KEYS = ("train.batch_size", "train.global_batch_size")
_RATE_KEYS = ("optim.lr", "optim.muon.lr")


@dataclass(frozen=True)
class Choices:
    """Settings that a new run chooses itself. A run that continues has the values of its checkpoint."""

    batch: BatchChoice | None = None
    lr: bool = False
    """Whether a range test finds the learning rate."""

    def with_recorded(self, config: Config, checkpoint: Checkpoint, set_keys: Set[str]) -> Config:
        """Return the config with the values that the run chose when it began, except for `set_keys`."""
        keys = (_BATCH_KEYS if self.batch else ()) + (_RATE_KEYS if self.batch or self.lr else ())
        saved = {key: saved_value(checkpoint, key) for key in keys if key not in set_keys}
        if config.optim.muon is None:
            saved.pop("optim.muon.lr", None)
        return with_values(config, saved) if saved else config


NO_CHOICES = Choices()
"""All settings are in the config."""


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the config with the values of some dotted keys."""
    return build_config(override_values(plain_config(config), values), "facetrain train")


def with_rate(config: Config, lr: float) -> Config:
    """Return the config with a learning rate; the rate of Muon keeps its ratio to it."""
    values = {"optim.lr": lr}
    if config.optim.muon:
        values["optim.muon.lr"] = config.optim.muon.lr * lr / config.optim.lr
    return with_values(config, values)
