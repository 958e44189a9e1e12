"""How ranks fail together: one of them says why, and nobody waits for who is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from facetrain.distributed import collectives
from facetrain.distributed.roll_call import silent_ranks
from facetrain.distributed.world import World
from facetrain.errors import FacetrainError, LostRankError, RankError, RunError

_T = TypeVar("_T")
_TIMED_OUT = ("imed out", "imeout")
_LOST = (*_TIMED_OUT, "onnection", "NCCL", "gloo", "reset by peer")
_PATIENCE_S = 3.0
"""Ranks wait for the same collective, so that their time is over within moments of each other."""


@contextmanager
def explain_failures(world: World, timeout_s: float) -> Iterator[None]:
    """Turn what goes wrong around a rank, its disk and its peers, into errors that say which it was.

    Raises:
        RankError: another rank did not answer in time; its name and place.
        LostRankError: another rank has ended.
        RunError: a file could not be read or written.
    """
    try:
        yield
    except FacetrainError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise RunError(
            f"rank {world.rank}: {where}{error.strerror or error}; what was saved before is whole"
        ) from error
    except RuntimeError as error:
        said = " ".join(str(error).split())
        if world.size == 1 or not any(word in said for word in _LOST):
            raise
        raise _lost(world, timeout_s, said) from error


def _lost(world: World, timeout_s: float, said: str) -> RankError:
    """Return what this rank says of a group that is broken: one of those that are left names who is not."""
    silent = silent_ranks(world.rendezvous_id, world.rank, world.size, _PATIENCE_S, world.store_host)
    speaker = min(set(range(world.size)) - set(silent))
    if not any(word in said for word in _TIMED_OUT) or speaker != world.rank:
        return LostRankError(said)
    names = "; ".join(f"rank {rank} ({place})" for rank, place in silent.items()) or "another rank"
    return RankError(
        f"{names} did not answer rank {world.rank} for {timeout_s:.0f} s (train.timeout_s): "
        "it hangs, or the way to it is cut; what was saved before is whole"
    )


@contextmanager
def fail_together(world: World) -> Iterator[None]:
    """Run what every rank may fail at, before any of them goes on: the first that failed says so. Collective."""
    fault: FacetrainError | None = None
    try:
        yield
    except FacetrainError as error:
        fault = error
    failed = collectives.gather_json(fault.exit_code if fault else 0)
    first = next((rank for rank, code in enumerate(failed) if code), None)
    if first is None:
        return
    if fault is not None and first == world.rank:
        raise fault
    raise _silent(f"rank {first} failed", failed[first])


def decide_on_leader(world: World, decide: Callable[[], _T]) -> _T:
    """Return on every rank what the leader finds, made of JSON; where it cannot, it says so alone. Collective.

    What each rank finds for itself may differ: machines do not see shared storage change at the same moment.
    """
    found: _T | None = None
    fault: FacetrainError | None = None
    if world.is_leader:
        try:
            found = decide()
        except FacetrainError as error:
            fault = error
    found, code = collectives.broadcast_json([found, fault.exit_code if fault else 0])
    if fault is not None:
        raise fault
    if code:
        raise _silent("rank 0 failed", code)
    return cast("_T", found)


def only_leader_reports(world: World, error: FacetrainError) -> FacetrainError:
    """Return what this rank raises for an error that all ranks have met alike: one of them is enough to say it."""
    return error if world.is_leader else _silent(str(error), error.exit_code)


def _silent(message: str, exit_code: int) -> LostRankError:
    silent = LostRankError(message)
    silent.exit_code = exit_code
    return silent
