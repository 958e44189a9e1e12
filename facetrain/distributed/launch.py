"""Start of training: in this process, or in several processes under torch's elastic agent."""

from __future__ import annotations

import os
from collections.abc import Callable

from facetrain.cpu_cores import usable_cores
from facetrain.distributed.grace_period import export_grace_period
from facetrain.distributed.process_lifetime import mark_own_ranks
from facetrain.distributed.process_setup import set_gpu_defaults, silence_torch_logs
from facetrain.distributed.topology import Topology


def launch(train: Callable[[], int], where: Topology, rank_arguments: list[str]) -> int:
    """Train and return the exit code of the command: 0, the code of the first rank that failed, or 128 + a signal.

    A single process calls `train` itself. Otherwise torch's elastic agent starts Python with `rank_arguments` for each
    rank.

    Raises:
        LaunchError: the ranks could not be started, or one of them was killed.
        UsageError: the grace period in the environment is not a whole number.
    """
    silence_torch_logs()
    set_gpu_defaults()
    if where.is_single_process:
        return train()
    from facetrain.distributed.elastic_agent import launch_ranks  # needs torch, which takes seconds to import

    mark_own_ranks()
    export_grace_period()
    # Each rank gets its share of the cores. By torch's default, every rank would start a thread for each core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(usable_cores() // where.nproc_per_node, 1)))
    return launch_ranks(rank_arguments, where)
