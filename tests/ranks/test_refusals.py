"""Refusals of one rank, which all ranks must leave together and at once."""

import time

from facetrain.distributed import collectives
from facetrain.distributed.agreement import fail_together
from facetrain.distributed.world import World
from facetrain.errors import ConfigError, DataError, LostRankError
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
    return [*found, time.monotonic() - start < 20]


def test_a_refusal_by_the_leader_ends_all_ranks_and_a_collective_among_the_checks_is_an_error():
    leader, other = run_ranks(2, outcomes)
    message = "a collective inside fail_together: a rank that failed takes no part in it"
    assert leader == ["ConfigError: seed: another one", message, True, True]
    assert other == ["LostRankError: rank 0 failed", message, True, True]


def without_nvjpeg_on_the_second_host():
    import socket

    import torch

    from facetrain.config.loading import build_config
    from facetrain.run.build import parts

    def build_decoder(device):
        if rank == 1:
            raise DataError("data.decode: gpu: torchvision cannot decode JPEG on cuda; set it to cpu")

    rank = collectives.rank()
    parts.build_decoder, socket.gethostname = build_decoder, lambda: f"node{rank}"
    world = World(rank=rank, local_rank=0, size=2, local_size=1, device=torch.device("cuda"))
    config = build_config({"data": {"train": "x", "decode": "gpu"}}, "x")
    try:
        with fail_together(world):
            parts.check_decoder(config, world)
    except (DataError, LostRankError) as error:
        return f"{type(error).__name__}: {error}"


def test_a_host_that_lacks_nvjpeg_is_named_and_ends_all_ranks():
    first, second = run_ranks(2, without_nvjpeg_on_the_second_host)
    assert first == "LostRankError: rank 1 failed"
    assert second.startswith("DataError: data.decode: gpu: torchvision") and second.endswith(" (on node1)")
