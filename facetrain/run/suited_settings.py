"""Settings that suit a dataset and a machine: a run takes those that are not given, and `doctor` compares with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from facetrain.config.loading import is_set, preset_configs, with_values
from facetrain.config.presets import presets
from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.device.capability import cpu_multiplies_bfloat16, multiplies_bfloat16
from facetrain.run.parts.step_schedule import global_batch_size
from facetrain.text import count_text

_DECIDED_BY = {
    # What is given of a network belongs to one that the command knows.
    "model.backbone": (
        "model.backbone",
        "model.init_from",
        "model.layers",
        "model.widths",
        "model.stem_stride",
    ),
    "optim.lr": ("optim.lr",),
}
"""Config keys that `train --data` chooses: each if the command sets none of the keys after it."""
_FEWEST_IMAGES_OF_R50 = 490_000
"""Images of the smallest dataset with which r50 is published, CASIA-WebFace."""
_SGD_BATCHES, _SGD_RATES = (128, 1024, 4096), (0.02, 0.1, 0.4)
"""arcface_torch's rates: one GPU, eight GPUs, and eight GPUs with 512 images each."""
_ADAMW_RATE = 0.001
"""arcface_torch's rate of its ViTs."""
HIGHEST_LR = {"sgd": 10.0, "adamw": 0.1}
"""Rates that cannot be meant, far above the published ones."""
_MOST_FACTOR = 3.0
"""Factor between a rate and the one that is published for its batch. Most presets are within a factor of 2; the others
are known by `_is_published`."""


@dataclass(frozen=True)
class RunFacts:
    """Facts that the settings rest on."""

    people: int
    images: int
    batch: int
    """Images per step, over all ranks and micro-batches."""
    optimizer: str
    has_gpu: bool
    has_bfloat16: bool
    """Whether the GPU, or the CPU, multiplies bfloat16 numbers itself."""


class Suited(NamedTuple):
    """Value of a config key, and the reason for it."""

    key: str
    value: str | float
    reason: str

    def __str__(self) -> str:
        """Return what is chosen and why, in one line."""
        return f"{self.key}: {self.value}, {self.reason}"


def gather_facts(config: Config, source: FaceDataset, world_size: int) -> RunFacts:
    """Return the facts about a training set, a batch and this machine.

    Raises:
        ConfigError: the batch cannot be divided among the ranks.
    """
    has_gpu, has_bfloat16 = _machine(config.train.device)
    return RunFacts(
        people=source.num_classes,
        images=source.num_images,
        batch=global_batch_size(config, world_size),
        optimizer=config.optim.name,
        has_gpu=has_gpu,
        has_bfloat16=has_bfloat16,
    )


def _machine(device: str) -> tuple[bool, bool]:
    """Return whether a run with this `train.device` is on a GPU, and whether that, or the CPU, has bfloat16."""
    if device != "cpu" and torch.cuda.is_available():
        return True, multiplies_bfloat16(torch.device("cuda"))
    return False, cpu_multiplies_bfloat16()


def suited_settings(facts: RunFacts) -> list[Suited]:
    """Return network, number format and learning rate for a training from random weights."""
    return [_network(facts), _precision(facts.has_gpu, facts.has_bfloat16), suited_rate(facts)]


def _network(facts: RunFacts) -> Suited:
    data = f"{count_text(facts.images, 'image')} of {count_text(facts.people, 'person', 'people')}"
    if not facts.has_gpu:
        reason = f"the fastest of the published networks, for {data} without a GPU"
        return Suited("model.backbone", "mbf", reason)
    if facts.images < _FEWEST_IMAGES_OF_R50:
        reason = (
            f"smaller than r50, which is published with {_FEWEST_IMAGES_OF_R50:,} images or more, for {data}"
        )
        return Suited("model.backbone", "r18", reason)
    return Suited("model.backbone", "r50", f"with which most results are published, for {data}")


def _precision(has_gpu: bool, has_bfloat16: bool) -> Suited:
    where = "GPU" if has_gpu else "CPU"
    if has_bfloat16:
        return Suited("train.precision", "bf16", f"the {where} multiplies it faster than float32")
    # A CPU emulates both kinds of 16 bits, many times slower than float32.
    value = "fp16" if has_gpu else "fp32"
    return Suited("train.precision", value, f"the {where} does not multiply bfloat16")


def suited_rate(facts: RunFacts) -> Suited:
    """Return the learning rate for the optimizer and the batch, by those that are published."""
    if facts.optimizer == "adamw":
        return Suited("optim.lr", _ADAMW_RATE, "as published with AdamW")
    batches, rates = np.array(_SGD_BATCHES), np.array(_SGD_RATES)
    nearest = float(np.clip(facts.batch, batches[0], batches[-1]))
    rate = np.exp(np.interp(np.log(nearest), np.log(batches), np.log(rates))) * facts.batch / nearest
    by = "by the published rates of SGD"
    if facts.batch != nearest:
        by = f"in proportion to the published rate for {nearest:,.0f}"
    return Suited("optim.lr", float(f"{rate:.2g}"), f"for {facts.batch:,} images per step, {by}")


def with_suited_precision(config: Config) -> Config:
    """Return a config whose `train.precision` is a format: instead of auto, the one that suits this machine."""
    if config.train.precision != "auto":
        return config
    suited = _precision(*_machine(config.train.device))
    return with_values(config, {suited.key: suited.value}, "the chosen format")


def keys_to_choose(config: Config, chosen_without: frozenset[str] | None) -> list[str]:
    """Return the config keys that a run chooses when it begins.

    `chosen_without`: for `train --data` without a config, the keys that the command sets; otherwise None.
    """
    keys = ["train.precision"] if config.train.precision == "auto" else []
    if chosen_without is None:
        return keys
    # No rates are published for Muon.
    left = ["optim.lr"] if config.optim.muon else []
    return keys + [
        key
        for key, deciding in _DECIDED_BY.items()
        if key not in left and not is_set(chosen_without, *deciding)
    ]


def unsuited_settings(config: Config, facts: RunFacts) -> Iterator[tuple[Suited, str]]:
    """Yield what costs a run much of its speed or its accuracy: what suits it instead, and what is wrong."""
    for suited in suited_settings(facts):
        if suited.key == "train.precision":
            precision = config.train.precision
            if precision != "fp32" and not facts.has_gpu and (precision == "fp16" or not facts.has_bfloat16):
                yield suited, f"this CPU computes {precision} many times slower than {suited.value}"
        # Trained weights and Muon take other rates than those that are published for SGD and random weights.
        elif suited.key == "optim.lr" and not (config.model.init_from or config.optim.muon):
            rate, better = config.optim.lr, float(suited.value)
            is_far = max(rate / better, better / rate) > _MOST_FACTOR
            if is_far and not _is_published(config, facts.batch):
                side = "above" if rate > better else "below"
                yield suited, f"a rate of {rate:g} is far {side} {better:g}"


def _is_published(config: Config, batch: int) -> bool:
    """Return whether a preset on its number of GPUs has this rate for a batch, with the network and the epochs."""
    return any(
        preset.gpus
        and _rate_key(published) == _rate_key(config)
        and global_batch_size(published, preset.gpus) == batch
        for preset, published in zip(presets(), preset_configs().values(), strict=True)
    )


def _rate_key(config: Config) -> tuple[str, float, str, int]:
    return config.optim.name, config.optim.lr, config.model.backbone, config.train.epochs
