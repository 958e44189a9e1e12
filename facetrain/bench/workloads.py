"""Work that the benchmarks of training steps measure; the settings are options of the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

INPUTS = ("synthetic", "records")
"""One batch that stays on the device; a dataset, through the loader."""


@dataclass(frozen=True)
class Turns:
    """Rounds in which the variants take turns: a busy machine slows all of them down by the same share."""

    steps: int = 5
    """Timed steps of each variant in each round."""
    rounds: int = 3
    """Repetitions; the report has the medians."""


@dataclass(frozen=True)
class RunWorkload:
    """Data and head of whole steps of a run."""

    data: Path | None = None
    """Dataset for the input `records`; None: generated images."""
    identities: int = 10_000
    """Classes of the head, unless the dataset has more."""
    inputs: list[str] = field(default_factory=lambda: [*INPUTS])
    """Some of INPUTS."""
    baseline: bool = False
    """Also measure the step of arcface_torch, with the same backbone, batch and precision."""


@dataclass(frozen=True)
class BackboneWorkload:
    """Network, images and device that all variants of a backbone's step have in common."""

    backbone: str = "r18"
    batch: int = 32
    image_size: int = 112
    device: str = "auto"
    threads: int | None = None
    """Threads of one process on the CPU; None: the number of usable cores."""
