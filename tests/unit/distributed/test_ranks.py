"""Ranks of one start, here threads that share a store."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from facetrain.distributed.ranks import Ranks
from facetrain.distributed.rendezvous import Rendezvous
from facetrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FacetrainError,
    LostRankError,
    RunError,
    UsageError,
    of_all_ranks,
    unprinted,
)
from tests.support.waiting import set_time, wait_until


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Wait for others as long as it takes."""
    monkeypatch.setattr("facetrain.distributed.ranks._FAREWELL_S", 600)


def rank(number, store):
    return Ranks(
        number, number, 3, 3, rendezvous=Rendezvous(store, number, "id", ["a", "b", "c"], "127.0.0.1", 1, 1)
    )


def leave(ranks, error, events):
    try:
        with ranks.leaving_together():
            events.append("closes its files")
            if error:
                raise error
    except FacetrainError as raised:
        assert raised is error
    events.append("ends")


@pytest.mark.parametrize("printed_by", [None, 0, 1, 2])
def test_no_rank_ends_before_all_have_closed_their_files(printed_by):
    errors = [
        printed_by is not None and unprinted("rank failed", CheckpointError.exit_code) for _ in range(3)
    ]
    if printed_by is not None:
        errors[printed_by] = of_all_ranks(CheckpointError("checksum differs"))
    store, events = HashStore(), []
    others = [
        threading.Thread(target=leave, args=(rank(number, store), errors[number], events))
        for number in (1, 2)
    ]
    for thread in others:
        thread.start()
    for thread in others:  # time in which they would end if they did not wait
        thread.join(0.2)
    leave(rank(0, store), errors[0], events)
    for thread in others:
        thread.join()
    assert events == ["closes its files"] * 3 + ["ends"] * 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


@pytest.mark.parametrize("error", [LostRankError("connection reset"), RunError("the disk is full")])
def test_a_rank_that_fails_alone_does_not_wait_and_is_not_waited_for(error):
    store, events = HashStore(), []
    leave(rank(0, store), error, events)
    leave(rank(1, store), of_all_ranks(CheckpointError("checksum differs")), events)
    leave(rank(2, HashStore()), error, events)
    assert events == ["closes its files", "ends"] * 3


@pytest.mark.parametrize(("number", "key"), [(0, "leaving/all"), (1, "leaving/1")])
def test_a_rank_that_a_signal_ends_is_not_waited_for(number, key):
    store = HashStore()
    with pytest.raises(SystemExit), rank(number, store).leaving_together():
        raise SystemExit(143)
    assert store.check([key])


@pytest.mark.parametrize(("kind", "code"), [(UsageError, 2), (RuntimeError, 1)])
def test_of_ranks_that_fail_alone_with_the_same_error_the_first_prints_it(kind, code):
    store, raised = HashStore(), []
    for number, message in enumerate(["of own code", "of own code", "the disk is full"]):
        with pytest.raises(Exception, match=message) as ended, rank(number, store).leaving_together():
            raise kind(message)
        raised.append(ended.value)
    assert [type(error) for error in raised] == [kind, LostRankError, kind]
    assert raised[1].exit_code == code


def test_a_rank_that_does_not_leave_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr("facetrain.distributed.ranks._FAREWELL_S", 0.1)
    events = []
    for number in range(2):
        leave(rank(number, HashStore()), of_all_ranks(CheckpointError("checksum differs")), events)
    assert events == ["closes its files", "ends"] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_hangs_while_the_run_starts_is_named(late, monkeypatch, capfd):
    now, printed = 0.0, ""
    set_time(monkeypatch, "facetrain.distributed.ranks", monotonic=lambda: now)
    store, places = HashStore(), ["a, process 5", "b, process 6", "c, process 7"]

    def is_named():
        nonlocal now, printed
        now += 61.0  # only the wait for this rank takes so long
        printed += capfd.readouterr().err
        return printed

    def start(number):
        ranks = Ranks(number, 0, 3, 1, rendezvous=Rendezvous(store, number, "id", places, "127.0.0.1", 1, 1))
        if number == late:
            wait_until(is_named, every_s=0.1)
        return ranks.decide(lambda: "the plan"), ranks.gather(number)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(start, range(3))) == [("the plan", [0, 1, 2])] * 3
    printed += capfd.readouterr().err
    line = f"waiting for rank {late} ({places[late]}), which has not opened its data and files yet\n"
    assert printed == line, "once, by one rank"


@pytest.mark.parametrize(
    ("error", "goes_on", "elsewhere", "mark"),
    [
        (ConfigError("another lr"), False, ConfigError, []),
        (ConfigError("another lr"), True, RunError, ["leaves"]),
        (DataError("no such file"), True, DataError, []),
        (UsageError("no GPU"), True, UsageError, []),
    ],
    ids=["at the first start", "when it joins", "not for a file that may come back", "not for a GPU"],
)
def test_a_host_that_joins_a_run_and_cannot_take_part_leaves_it_alone(
    error, goes_on, elsewhere, mark, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("FACETRAIN_LAUNCHER", "1")
    store = HashStore()

    def outcome(number):
        # The host that joins has one rank more than the first one.
        known = Rendezvous(store, number, "id", ["a", "b", "b"], "127.0.0.1", 1, 1)
        ranks = Ranks(number, max(number - 1, 0), 3, 2 if number else 1, rendezvous=known, goes_on=goes_on)
        ranks.has_trained = type(error) is UsageError
        with pytest.raises(FacetrainError) as ended, ranks.failing_together(), ranks.outages(UsageError):
            if number == 1:
                raise error
        return ended.value

    with ThreadPoolExecutor(3) as threads:
        first, second, third = threads.map(outcome, range(3))
    assert second is error and type(first) is elsewhere and str(first) == str(error)
    assert type(third) is LostRankError
    assert [path.name for path in tmp_path.iterdir()] == mark
