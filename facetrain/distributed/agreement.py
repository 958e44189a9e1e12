"""Errors across ranks: all ranks fail together, one of them prints the reason, and none waits for a lost rank."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from facetrain.distributed import collectives
from facetrain.distributed.ranks import Ranks
from facetrain.distributed.rendezvous import connect_to_store
from facetrain.distributed.world import World
from facetrain.errors import (
    FacetrainError,
    LostRankError,
    RankError,
    RunError,
    is_out_of_memory,
    of_all_ranks,
    unprinted,
)
from facetrain.files import error_reason
from facetrain.own_parts import line_of

# torch raises a plain RuntimeError if a process group fails: only its text differs from other errors.
_TIMED_OUT = ("imed out", "imeout")
_LOST = (*_TIMED_OUT, "onnection", "NCCL", "gloo", "reset by peer")
_NCCL_ERROR = "NCCL error in"
_NCCL_CONSEQUENCES = ("ncclRemoteError", "was aborted")
"""Errors of NCCL that another rank has caused."""
_PATIENCE_S = 3.0
"""Ranks wait for the same collective, and therefore time out within moments of each other."""
_POLL_S = 0.1
_STORE_ANSWERS_WITHIN_S = 10.0


@contextmanager
def explain_failures(ranks: Ranks, timeout_s: float) -> Iterator[None]:
    """Turn failures of files, of memory and of other ranks into errors with the rank and the place.

    Raises:
        RankError: another rank did not answer in time; the message has its number, host and process.
        LostRankError: another rank has ended.
        RunError: a file could not be read or written, there is too little memory, NCCL has failed on this rank, or
            the ranks have lost each other and all are alive.
    """
    try:
        yield
    except FacetrainError:
        raise
    except OSError as error:
        places = "".join(f"{place}: " for place in (line_of(error), error.filename) if place)
        raise RunError(
            f"rank {ranks.rank}: {places}{error_reason(error)}; earlier checkpoints are intact"
        ) from error
    except (RuntimeError, MemoryError) as error:
        reason = error_reason(error)
        if is_out_of_memory(error):
            raise RunError(
                f"rank {ranks.rank}: too little memory ({reason}); `facetrain plan` lists what needs less memory; "
                "earlier checkpoints are intact"
            ) from error
        # A fault of the program keeps its traceback; only failures of the group are put into words here.
        if ranks.size == 1 or not any(word in reason for word in _LOST) or _is_of_part(error):
            raise
        # The whole text: in `reason`, a long path of a source file of torch pushes these words out.
        text = str(error)
        if _NCCL_ERROR in text and not any(word in text for word in _NCCL_CONSEQUENCES):
            # Of this rank, such as a full /dev/shm. Without its number: one line is enough if all ranks have it. What
            # NCCL has logged last tells most, and is at the end of a long text.
            last = " ".join(text.partition("Last error:")[2].split())
            reason = f"NCCL error: {last}" if last else reason
            raise RunError(f"{reason}; earlier checkpoints are intact") from error
        raise _group_error(ranks, timeout_s, reason) from error


def _is_of_part(error: BaseException) -> bool:
    """Return whether code of one's own has failed, such as a client of a server, and not a collective in it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    of_group = frame.f_globals.get("__name__", "").startswith(
        ("torch.distributed.", "facetrain.distributed.")
    )
    return bool(line_of(error)) and not of_group


def _group_error(ranks: Ranks, timeout_s: float, reason: str) -> RunError:
    """Return the error of this rank for a broken group. The first rank that still answers names the others."""
    found = silent_ranks(ranks, _PATIENCE_S)
    silent = found or []
    # One voice: every rank that still answers finds the same silent ones, and the smallest of them speaks.
    if ranks.rank != min(set(range(ranks.size)) - set(silent)):
        return LostRankError(reason)
    if not any(word in reason for word in _TIMED_OUT):
        # A rank that is lost has said why, or its watchdog does. If none is, nobody knows another reason.
        all_alive = (
            f"the ranks have lost each other, and all are alive: {reason}; earlier checkpoints are intact"
        )
        return RunError(all_alive) if found == [] else LostRankError(reason)
    names = "; ".join(f"rank {rank} ({ranks.place(rank)})" for rank in silent) or "another rank"
    return RankError(
        f"{names} did not answer rank {ranks.rank} for {timeout_s:.0f} s (train.timeout_s): "
        "it hangs, or the network to it is down; earlier checkpoints are intact"
    )


def silent_ranks(ranks: Ranks, patience_s: float) -> list[int] | None:
    """Report that this rank is alive, and return the ranks that do not report so in time.

    Every rank that has lost the others calls this, and all of them notice at about the same moment. None: the store
    does not answer, because its process is stopped or gone, which the watchdogs report.
    """
    answers: SimpleQueue[list[int]] = SimpleQueue()

    def ask() -> None:
        with suppress(RuntimeError, ValueError):
            answers.put(_wait_for_reports(ranks, patience_s))

    # In a thread: a connection to a process that is stopped waits without end for its first answer.
    threading.Thread(target=ask, daemon=True).start()
    with suppress(Empty):
        return answers.get(timeout=patience_s + _STORE_ANSWERS_WITHIN_S)
    return None


def _wait_for_reports(ranks: Ranks, patience_s: float) -> list[int]:
    assert ranks.rendezvous is not None, "a single process has no store"
    store = connect_to_store(ranks.rendezvous.id)
    # First of all: the others wait for this report, too.
    store.set(f"alive/{ranks.rank}", "")
    silent = [other for other in range(ranks.size) if other != ranks.rank]
    deadline = time.monotonic() + patience_s
    # Polled: to wait for a key would block until its timeout, and the ranks report in any order.
    while silent and time.monotonic() < deadline:
        silent = [other for other in silent if not store.check([f"alive/{other}"])]
        time.sleep(_POLL_S)
    return silent


@contextmanager
def fail_together(world: World) -> Iterator[None]:
    """Let all ranks fail at the end of the block if one of them has. The first of them prints its error. Collective.

    There must be no collective inside the block: a rank that has failed would not take part, and the others would wait
    for it until the timeout.

    Raises:
        FacetrainError: the error of this rank, if it is the first that failed.
        LostRankError: another rank failed.
    """
    failure: FacetrainError | None = None
    try:
        # A collective in here hangs only if a rank fails before it, which no test may show: this lets it fail always.
        with collectives.forbidden("fail_together"):
            yield
    except FacetrainError as error:
        failure = error
    # The exit codes, not the messages: all ranks must end with the same code, and one message is enough.
    exit_codes = collectives.gather_json(failure.exit_code if failure else 0)
    first = next((rank for rank, code in enumerate(exit_codes) if code), None)
    if first is None:
        return
    if failure is not None and first == world.rank:
        raise of_all_ranks(failure)
    raise unprinted(f"rank {first} failed", exit_codes[first])


def only_leader_reports(world: World, error: FacetrainError) -> FacetrainError:
    """Return the error to raise on this rank for one that all ranks have: printed on the leader alone."""
    return of_all_ranks(error) if world.is_leader else unprinted(str(error), error.exit_code)
