"""Ranks of one start, here threads that share a store."""

import threading

import pytest
from torch.distributed import HashStore

from facetrain.distributed.ranks import Ranks
from facetrain.distributed.rendezvous import Rendezvous
from facetrain.errors import CheckpointError, FacetrainError, LostRankError, RankError, unprinted


def fail(ranks, error, ended, before=lambda: None):
    with pytest.raises(FacetrainError), ranks.leader_ends_first():
        before()
        raise error
    ended.append(ranks.rank)


def rank(number, store):
    return Ranks(
        number, number, 3, 3, rendezvous=Rendezvous(store, number, "id", ["a", "b", "c"], "127.0.0.1", 1)
    )


@pytest.mark.parametrize("printed_by", range(3))
def test_if_all_fail_together_the_leader_has_closed_its_files_before_another_ends(printed_by):
    store, ended = HashStore(), []
    errors = [unprinted("rank failed", CheckpointError.exit_code) for _ in range(3)]
    errors[printed_by] = CheckpointError("checksum differs")
    others = [
        threading.Thread(target=fail, args=(rank(number, store), errors[number], ended)) for number in (1, 2)
    ]
    for thread in others:
        thread.start()

    def close_files():
        for thread in others:  # time in which they would end if they did not wait
            thread.join(0.3)

    fail(rank(0, store), errors[0], ended, close_files)
    for thread in others:
        thread.join()
    assert ended[0] == 0 and sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("error", [LostRankError("connection reset"), RankError("rank 0 did not answer")])
def test_a_rank_that_has_lost_another_does_not_wait_for_the_leader(error, monkeypatch):
    monkeypatch.setattr(Ranks, "_wait", lambda *arguments: pytest.fail("it waits"))
    fail(rank(1, HashStore()), error, [])


def test_a_leader_that_does_not_end_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr("facetrain.distributed.ranks._FAREWELL_S", 0.1)
    fail(rank(1, HashStore()), CheckpointError("checksum differs"), ended := [])
    assert ended == [1]
