"""Accuracy of published trainings over their steps, beside the accuracy of a run of the same preset."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.config.loading import CONFIG_FILE, load_config, preset_configs
from facetrain.config.presets import PRESET_FOLDER
from facetrain.config.schema import Config
from facetrain.errors import ConfigError
from facetrain.run.folder.environment import IDENTITIES, IMAGES, recorded_environment

_FILE = "published_curves.csv"
"""Table beside the presets: preset, fraction of the training, and the accuracy in percent on each set."""
_DEVIATIONS = 3.0
"""Standard deviations of the difference of two accuracies by which a run must be below the published one.

On published logs, two trainings with one recipe and different batch sizes are never below each other by this rule, and
MobileFaceNet is below r50 on WebFace4M at every verification but the first.
"""


@dataclass(frozen=True)
class PublishedCurve:
    """Accuracies of a published training, at steps of a run with the same recipe."""

    preset: str
    steps: np.ndarray
    """Steps of the run at which the same part of the training is done, (N,), float, increasing."""
    accuracies: dict[str, np.ndarray]
    """Accuracy from 0 to 1 at these steps, (N,), by verification set."""

    def below_since(self, records: Iterable[dict[str, Any]]) -> dict[str, int]:
        """Return the step since which a run is below this training, by verification set.

        A set is listed if at least the last two verifications were lower than the published accuracy, interpolated
        between its verifications, by three standard deviations of the difference of two rates over the pairs of the
        set. Verifications before the first published one are not compared.

        Args:
            records: records of the metrics.jsonl of the run.
        """
        below: dict[str, tuple[int, int]] = {}
        for record in records:
            step = record["step"]
            for name, published in self.accuracies.items():
                accuracy, pairs = record.get(f"{name}/accuracy"), record.get(f"{name}/pairs")
                if step < self.steps[0] or not isinstance(accuracy, float) or not pairs:
                    continue
                expected = np.interp(step, self.steps, published)
                deviation = np.sqrt(2 * expected * (1 - expected) / pairs)
                is_below = accuracy < expected - _DEVIATIONS * deviation
                since, times = below.pop(name, (step, 0))
                if is_below:
                    below[name] = since, times + 1
        return {name: since for name, (since, times) in below.items() if times > 1}

    def describe(self, records: Iterable[dict[str, Any]]) -> list[str]:
        """Return a line for each verification set on which a run is below this training."""
        return [
            f"{name}: below the published training of {self.preset} since step {step:,}"
            for name, step in self.below_since(records).items()
        ]


def published_curve_of(folder: Path, total_steps: int | None) -> PublishedCurve | None:
    """Return the published training with the recipe of a run folder, or None.

    The recipe is the size of the dataset, the network, the margin, the sample rate, the optimizer, the epochs and the
    warm-up. Stages and `train.max_steps` change the learning rate over the run: a run that has them is not compared.

    Args:
        folder: run folder, whose config.yaml and environment.json are read; without the latter, the numbers of the
            data are those of the config.
        total_steps: steps of the whole run; None if they are not known yet.
    """
    try:
        config = load_config(folder / CONFIG_FILE)
    except ConfigError:  # of another version, or damaged; the commands that need it say so
        return None
    if total_steps is None or config.train.stages or config.train.max_steps is not None:
        return None
    # Of the data that the run has opened: a config need not have the numbers, and `--data` removes them.
    environment = recorded_environment(folder)
    identities = environment.get(IDENTITIES, config.data.num_classes)
    data = identities, environment.get(IMAGES, config.data.num_images)
    for preset, (published_data, recipe, fractions, accuracies) in _published_runs().items():
        if (published_data, recipe) == (data, _recipe(config)):
            return PublishedCurve(preset, fractions * total_steps, accuracies)
    return None


def _recipe(config: Config) -> tuple[Any, ...]:
    head, train = config.head, config.train
    margin = (head.margin.type, head.margin.m2, head.margin.m3, head.sample_rate)
    schedule = (train.epochs, config.optim.name, config.optim.warmup_epochs)
    return config.model.backbone, margin, schedule


@cache
def _published_runs() -> dict[
    str, tuple[tuple[Any, ...], tuple[Any, ...], np.ndarray, dict[str, np.ndarray]]
]:
    """Return the published trainings by preset: numbers of the data, recipe, fractions of the training, accuracies."""
    rows: dict[str, list[dict[str, str]]] = {}
    with (PRESET_FOLDER / _FILE).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            rows.setdefault(row.pop("preset"), []).append(row)
    runs = {}
    for preset, config in preset_configs().items():
        if points := rows.get(preset):
            columns = {name: np.array([float(point[name]) for point in points]) for name in points[0]}
            fractions = columns.pop("fraction")
            accuracies = {name: percent / 100 for name, percent in columns.items()}
            data = config.data.num_classes, config.data.num_images
            runs[preset] = (data, _recipe(config), fractions, accuracies)
    return runs
