"""Ranks that meet at a store in which processes of an earlier life have left their words."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from facetrain.distributed.rendezvous import _learn_life, _name_life
from facetrain.errors import RunError


def meet_at(store, world_size):
    with ThreadPoolExecutor(world_size) as threads:
        others = [threads.submit(_learn_life, store, rank) for rank in range(1, world_size)]
        return [_name_life(store, world_size, 10), *(other.result() for other in others)]


def test_each_life_has_one_name_that_is_not_the_name_of_the_one_before():
    store = dist.HashStore()
    first, second = meet_at(store, 3), meet_at(store, 3)
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]


def test_a_rank_that_left_only_its_greeting_is_not_taken_for_one_that_is_there():
    store = dist.HashStore()
    store.set("greeting/1", "of a process that is gone")
    with pytest.raises(RunError, match="rank 1 did not come within 0 s"):
        _name_life(store, 2, 0.2)
    assert len(set(meet_at(store, 2))) == 1
