"""Process group of the ranks of a run, as its config asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from facetrain.config.schema import Config
from facetrain.distributed.process_setup import fix_cublas_workspace
from facetrain.distributed.ranks import Ranks
from facetrain.distributed.world import World, join
from facetrain.training.compile import compiler_settings_kept
from facetrain.training.deterministic import deterministic_algorithms


@contextmanager
def joined(config: Config, ranks: Ranks | None = None) -> Iterator[World]:
    """Form the process group, with the settings of torch that a run needs; see `join`."""
    train = config.train
    if train.deterministic:
        fix_cublas_workspace()  # cuBLAS reads the variable when CUDA starts, which joining does
    joining = join(
        train.device,
        train.timeout_s,
        keep_freed=train.keep_freed_memory,
        cpu_setting="train.device: cpu",
        ranks=ranks,
    )
    with (
        joining as world,
        deterministic_algorithms(train.deterministic),
        compiler_settings_kept(train.compile),
    ):
        yield world
