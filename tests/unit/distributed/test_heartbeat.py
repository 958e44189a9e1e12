import time

import pytest
from torch.distributed import PrefixStore, TCPStore

from facetrain.distributed import rendezvous
from facetrain.distributed.heartbeat import Heartbeat, silent_ranks
from facetrain.distributed.rendezvous import register_rank


@pytest.fixture
def store(monkeypatch):
    """A store like that of a rendezvous, in a list that holds the only reference."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return [store]


def heartbeats(patience_s, grace_s=60.0, world_size=3):
    return [
        Heartbeat("id", rank, world_size, patience_s=patience_s, grace_s=grace_s)
        for rank in range(world_size)
    ]


def first_reason(group, seconds):
    """Let some ranks exchange heartbeats for so long, or until one has a reason to end; return the reason."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if reasons := [reason for heartbeat in group if (reason := heartbeat.reason_to_end())]:
            return reasons[0]
        time.sleep(0.01)
    return ""


def test_no_rank_has_a_reason_to_end_while_all_ranks_send_heartbeats(store):
    assert first_reason(heartbeats(patience_s=0.3), 1.0) == ""


def test_a_rank_that_receives_no_heartbeat_ends_and_reports_its_position(store):
    first, *others = heartbeats(patience_s=0.5)
    assert first_reason([first, *others], 0.2) == ""
    assert first_reason([first, others[1]], 0.2) == "", "not at once"
    reason = first_reason([first, others[1]], 5)
    assert reason.startswith("received no heartbeat of another rank for 0 s, at /")


def test_all_ranks_end_some_time_after_the_group_was_reported_as_broken(store):
    group = heartbeats(patience_s=60, grace_s=0.5)
    assert first_reason(group, 0.2) == ""
    for rank in range(3):
        register_rank(PrefixStore("facetrain/id", store[0]), rank)
    assert silent_ranks("id", 0, 3, 0.1, "").keys() == {1, 2}
    since = time.monotonic()
    reason = first_reason([group[2]], 5)
    assert reason.startswith("still ran 0 s after its process group broke, at ")
    assert 0.2 < time.monotonic() - since < 2


def test_a_store_that_does_not_answer_counts_as_silence(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "_STORE_TIMEOUT", rendezvous.timedelta(seconds=0.5))
    group = heartbeats(patience_s=1.0)
    assert first_reason(group, 0.2) == ""
    store.clear()  # ends the store
    assert first_reason([group[1]], 10).startswith("received no heartbeat of another rank")


def test_a_suspend_of_an_hour_does_not_count_as_an_hour_of_silence(store):
    (first, *_) = heartbeats(patience_s=60)
    assert first.reason_to_end() == ""
    first._checked_at -= 3600
    assert first.reason_to_end() == ""
