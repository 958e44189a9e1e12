"""How ranks fail together: one of them says why, and nobody waits for who is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from facetrain.distributed import collectives
from facetrain.distributed.world import World
from facetrain.errors import FacetrainError, LostRankError, RankError, RunError


@contextmanager
def naming_failures(world: World, timeout_s: float) -> Iterator[None]:
    """Turn what goes wrong around a rank, its disk and its peers, into errors that say which it was.

    Raises:
        RankError: another rank did not answer in time.
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
        if "imed out" in said or "imeout" in said:
            raise RankError(f"rank {world.rank} waited {timeout_s:.0f} s for another: {said}") from error
        if world.size > 1 and any(word in said for word in ("onnection", "NCCL", "gloo", "reset by peer")):
            raise LostRankError(said) from error
        raise


@contextmanager
def one_voice(world: World) -> Iterator[None]:
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
    silent = LostRankError(f"rank {first} failed")
    silent.exit_code = failed[first]
    raise silent
