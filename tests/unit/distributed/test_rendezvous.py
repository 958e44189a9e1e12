"""Rendezvous at a store that still holds the keys of an earlier start."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from facetrain.distributed.rendezvous import _create_id, _receive_id
from facetrain.errors import RunError


def ids_of(store, world_size):
    """Return the rendezvous id that each rank gets."""
    with ThreadPoolExecutor(world_size) as threads:
        others = [threads.submit(_receive_id, store, rank) for rank in range(1, world_size)]
        return [_create_id(store, world_size, 10), *(other.result() for other in others)]


def test_all_ranks_of_a_start_get_the_same_id_and_the_next_start_gets_another():
    store = dist.HashStore()
    first, second = ids_of(store, 3), ids_of(store, 3)
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]


def test_the_request_of_an_ended_process_does_not_count_as_a_rank():
    store = dist.HashStore()
    store.set("request/1", "of an ended process")
    with pytest.raises(RunError, match="rank 1 .* 0 s"):
        _create_id(store, 2, 0.2)
    assert len(set(ids_of(store, 2))) == 1
