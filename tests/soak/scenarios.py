"""Scenarios of the soak: short runs that together use every part of training that has a state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from facetrain.data.formats.bin import write_bin
from tests.support.datasets import encoded_image, write_records

_SIZE = 32


@dataclass(frozen=True)
class Scenario:
    """Config of a run, and the numbers of ranks that it is trained on."""

    name: str
    ranks: tuple[int, ...]
    """Each start draws one of these. The uninterrupted run uses the first."""
    steps: int
    save_every: int
    changes: dict[str, object]
    """Config values that differ from the other scenarios."""

    @property
    def is_exact(self) -> bool:
        """Whether the result must be equal to the uninterrupted run bit for bit: if the number of ranks is fixed."""
        return len(self.ranks) == 1


SCENARIOS = [
    Scenario("sampled, accumulated", (1,), 400, 8, {"head.sample_rate": 0.3, "optim.accumulate": 2}),
    Scenario("fp16, two ranks", (2,), 100, 4, {"train.precision": "fp16"}),
    Scenario("saved in the foreground", (1,), 400, 8, {"checkpoint.async": False, "model.dropout": 0.2}),
    # Few steps and a low learning rate: differences of rounding grow from step to step.
    Scenario("1, 2 or 3 ranks", (1, 2, 3), 60, 4, {"head.sample_rate": 0.3, "optim.lr": 0.002}),
]


def write_dataset(folder: Path) -> None:
    """Write a dataset of 20 identities of noise, with verification pairs."""
    write_records(folder, [number // 6 for number in range(120)], size=_SIZE)
    images = [encoded_image(n if n % 4 < 2 or n % 2 else n + 1000, _SIZE) for n in range(80)]
    write_bin(folder / "val.bin", images, [number % 2 == 0 for number in range(40)])


def write_config(scenario: Scenario, dataset: Path, path: Path) -> Path:
    """Write the config of a scenario."""
    config: dict[str, dict[str, object]] = {
        "data": {"train": str(dataset), "image_size": _SIZE, "workers": 1},
        "model": {
            "backbone": "iresnet", "layers": [1, 1, 1, 1], "widths": [8, 8, 16, 16], "embedding_size": 16,
        },
        "head": {"margin": {"type": "arcface", "m2": 0.3, "scale": 16}},
        "optim": {"lr": 0.02, "warmup_epochs": 0.5},
        "train": {
            "global_batch_size": 24, "epochs": 10_000, "max_steps": scenario.steps, "precision": "fp32",
            "device": "cpu",
        },
        "eval": {"targets": ["val"], "every_steps": scenario.steps // 6},
        "checkpoint": {"every_steps": scenario.save_every, "keep": 2},
        "log": {"every_steps": 1, "tensorboard": False},
    }  # fmt: skip
    for key, value in scenario.changes.items():
        section, _, name = key.partition(".")
        config[section][name] = value
    path.write_text(yaml.safe_dump(config))
    return path
