"""Refusals of one rank, which all ranks must leave together and at once."""

import time

from facetrain.distributed import collectives
from facetrain.distributed.agreement import fail_together
from facetrain.distributed.world import World
from facetrain.errors import ConfigError, LostRankError
from tests.support.ranks import run_ranks


def outcomes():
    import torch

    rank = collectives.rank()
    world = World(rank=rank, local_rank=rank, size=2, local_size=2, device=torch.device("cpu"))
    found = []
    start = time.monotonic()
    try:
        with fail_together(world):
            if world.is_leader:
                raise ConfigError("seed: another one")
    except (ConfigError, LostRankError) as error:
        found.append(f"{type(error).__name__}: {error}")
    try:
        with fail_together(world):
            collectives.any_rank(False)
    except AssertionError as error:
        found.append(str(error))
    found.append(collectives.any_rank(rank == 1))
    return [*found, time.monotonic() - start < 300]


def test_a_refusal_by_the_leader_ends_all_ranks_and_a_collective_among_the_checks_is_an_error():
    leader, other = run_ranks(2, outcomes)
    message = "a collective inside fail_together: a rank that failed takes no part in it"
    assert leader == ["ConfigError: seed: another one", message, True, True]
    assert other == ["LostRankError: rank 0 failed", message, True, True]
