import time

import pytest
from torch.distributed import PrefixStore, TCPStore

from facetrain.distributed import roll_call
from facetrain.distributed.heartbeat import Pulse
from facetrain.distributed.roll_call import sign_in, silent_ranks


@pytest.fixture
def store(monkeypatch):
    """A store as the one at which ranks meet."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return [store]


def pulses(patience_s, grace_s=60.0, world_size=3):
    return [
        Pulse("life", rank, world_size, patience_s=patience_s, grace_s=grace_s) for rank in range(world_size)
    ]


def looks(group, seconds):
    """Let the threads of some ranks look for so long, or until one has a reason to end."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := [reason for pulse in group if (reason := pulse.reason_to_end())]:
            return found[0]
        time.sleep(0.01)
    return ""


def test_while_its_group_stands_no_rank_has_a_reason_to_end_whatever_it_does(store):
    assert looks(pulses(patience_s=0.3), 1.0) == ""


def test_a_rank_that_hears_of_no_other_ends_and_says_where_it_was(store):
    first, *others = pulses(patience_s=0.5)
    assert looks([first, *others], 0.2) == ""
    assert looks([first, others[1]], 0.2) == "", "not at once"
    said = looks([first, others[1]], 5)
    assert said.startswith("has heard of no other rank for 0 s, at /")


def test_when_the_ranks_have_lost_each_other_all_have_to_end(store):
    group = pulses(patience_s=60, grace_s=0.5)
    assert looks(group, 0.2) == ""
    for rank in range(3):
        sign_in(PrefixStore("facetrain/life", store[0]), rank)
    assert silent_ranks("life", 0, 3, 0.1, "").keys() == {1, 2}
    since = time.monotonic()
    said = looks([group[2]], 5)
    assert said.startswith("was still there 0 s after its group had broken, at ")
    assert 0.2 < time.monotonic() - since < 2


def test_a_store_that_has_gone_is_silence(store, monkeypatch):
    monkeypatch.setattr(roll_call, "_STORE_TIMEOUT", roll_call.timedelta(seconds=0.5))
    group = pulses(patience_s=1.0)
    assert looks(group, 0.2) == ""
    store.clear()  # the last reference
    assert looks([group[1]], 10).startswith("has heard of no other rank")


def test_a_machine_that_slept_finds_its_group_as_it_was(store):
    (first, *_) = pulses(patience_s=60)
    assert first.reason_to_end() == ""
    first._looked_at -= 3600
    assert first.reason_to_end() == ""
