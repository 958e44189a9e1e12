"""Workloads of the benchmarks of training steps, and the turns that the variants of a benchmark take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facetrain.errors import FacetrainError, RunError
from facetrain.files import error_reason

DEFAULT_CONFIG = {"data": {"train": "generated"}, "model": {"backbone": "r18"}, "train": {"batch_size": 64}}
"""Config of `facetrain bench train`."""


@dataclass(frozen=True)
class Turns:
    """Rounds in which the variants take turns."""

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


@dataclass(frozen=True)
class BackboneWorkload:
    """Network, images and device that all variants of a backbone's step have in common."""

    backbone: str = "r18"
    batch: int = 32
    """Images per step."""
    image_size: int = 112
    """Width and height of an image in pixels."""
    device: str = "auto"


@dataclass(frozen=True)
class HeadWorkload:
    """Sizes that all variants of a head's step have in common."""

    identities: int = 1_000_000
    """Class centers."""
    batch_size: int = 256
    """Embeddings per step."""
    embedding_size: int = 512
    """Numbers per embedding."""
    steps: int = 5
    """Timed steps of each variant; one more allocates, and is not counted."""
    device: str = "auto"
    disk: Path | None = None
    """Folder for centers on disk; None: the folder for temporary files."""


def in_turn(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return what the function of each variant returns in each round.

    The variants take turns, so that a busy machine slows all of them down by the same share.
    """
    results: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measure in variants.items():
            results[name].append(measure())
    return results


def result_of(process: ProcessPoolExecutor, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function in the process of a variant.

    Raises:
        RunError: the function failed, or the process ended early.
    """
    try:
        return process.submit(function, *arguments).result()
    except FacetrainError:
        raise
    except Exception as error:  # among them BrokenProcessPool, if the kernel has ended the process
        raise RunError(
            f"{what} failed: {type(error).__name__}: {error_reason(error)}; if memory is short, measure a smaller "
            "size, or fewer variants at a time (--variant)"
        ) from error
