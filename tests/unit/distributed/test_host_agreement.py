"""Which hosts take part in a start of the ranks, as the state changes from host to host."""

import itertools
import json
import pickle

import pytest

from facetrain.distributed import host_agreement
from facetrain.distributed.host_agreement import GroupStart, Member, SignsOfLife
from tests.support.waiting import set_time


def alive(host):
    return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets; a list of one number."""
    now = [0.0]
    set_time(monkeypatch, host_agreement.__name__, monotonic=lambda: now[0])
    return now


def test_a_start_is_complete_with_the_largest_number_of_nodes():
    start, hosts = GroupStart(2, 3), [Member(name) for name in "abc"]
    for host in hosts:
        assert not start.is_complete
        start = host.advance(start, alive)
    assert start == GroupStart(2, 3, 1, ("a", "b", "c"), is_complete=True)


def test_with_fewer_nodes_a_start_waits_for_the_last_call_after_the_last_node_has_joined(clock):
    first, second = Member("a"), Member("b")
    start = first.advance(GroupStart(2, 3), alive)
    clock[0] = 100
    start = first.advance(start, alive)
    assert not start.is_complete, "one host is too few at any time"
    start = second.advance(start, alive)
    for seconds, is_complete in ((29, False), (30, True)):
        clock[0] = 100 + seconds
        start = second.advance(start, alive)
        assert start == GroupStart(2, 3, 1, ("a", "b"), is_complete)
    alone = Member("a")
    for start in (GroupStart(1, 3, 2), GroupStart(1, 3, 3)):
        assert not alone.advance(start, alive).is_complete, "every start has a last call"
        clock[0] += 30
        assert alone.advance(start, alive).is_complete


def test_a_node_whose_ranks_have_failed_opens_the_next_start_and_others_join_it():
    start = GroupStart(1, 2, 4, ("a", "b"), is_complete=True, waiting=("c",))
    start = Member("b").advance(start, alive)
    assert start == GroupStart(1, 2, 5, ("b",))
    assert Member("a").advance(start, alive) == GroupStart(1, 2, 5, ("b", "a"), is_complete=True)


def test_a_node_that_comes_late_waits_and_takes_the_place_of_a_node_that_is_gone():
    late = Member("c")
    complete = GroupStart(1, 2, 4, ("a", "b"), is_complete=True)
    waits = late.advance(complete, alive)
    assert (
        waits
        == GroupStart(1, 2, 4, ("a", "b"), is_complete=True, waiting=("c",))
        == late.advance(waits, alive)
    )
    assert late.advance(GroupStart(1, 2, 5, ("a",)), alive) == GroupStart(
        1, 2, 5, ("a", "c"), is_complete=True
    )
    full = GroupStart(1, 2, 5, ("a", "b"))
    assert late.advance(full, alive) == full
    assert late.advance(full, lambda host: host == "a") == GroupStart(1, 2, 5, ("a", "c"), is_complete=True)


def test_a_node_is_alive_while_its_counter_changes(clock):
    signs, counter = SignsOfLife(), itertools.count()
    for clock[0] in (0, 10, 20, 30):
        assert signs.is_alive("a", next(counter))
    clock[0] = 44
    assert signs.is_alive("a", 3)
    clock[0] = 45
    assert not signs.is_alive("a", 3)
    assert signs.is_alive("a", 4) and signs.is_alive("b", 9)


def test_a_state_is_the_same_after_the_store():
    start = GroupStart(1, 2, 3, ("a:1:ff", "b:2:00"), is_complete=True, waiting=("c",), is_closed=True)
    assert GroupStart.decode(start.encode()) == start


VALID = json.loads(GroupStart(1, 2, 3, ("a",)).encode())


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "7", "{}", "[" * 100_000, pickle.dumps(GroupStart(1, 2), protocol=0).decode(),
        json.dumps(VALID | {"number": "3"}), json.dumps(VALID | {"number": True}),
        json.dumps(VALID | {"most": "3"}),
        json.dumps(VALID | {"hosts": None}), json.dumps(VALID | {"hosts": [["a"]]}),
        json.dumps(VALID | {"waiting": [1]}),
    ],
    ids=str.__len__,
)  # fmt: skip
def test_any_other_text_in_the_store_is_refused(text):
    with pytest.raises(ValueError, match="holds something else than the hosts of a run"):
        GroupStart.decode(text)
