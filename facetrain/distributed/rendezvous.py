"""How the ranks of one life of a job find each other, and nobody from the life before.

torchrun's agents keep one store through all restarts (seen in 2.13.0). The addresses of processes
that are gone stay in it: gloo would connect to them, and be refused or wait until its time is over.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from facetrain.errors import RunError

_POLL_S = 0.02


def meet(timeout_s: float) -> tuple[Store, int, int, str]:
    """Return a store that only this life's ranks know, this rank, the number of ranks, and the life's name.

    Raises:
        RunError: some rank did not come in time.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    life = _name_life(store, world_size, timeout_s) if rank == 0 else _learn_life(store, rank)
    return PrefixStore(f"facetrain/{life}", store), rank, world_size, life


def _name_life(store: Store, world_size: int, timeout_s: float) -> str:
    """Make up a name and answer every greeting with it, until each rank has heard it.

    A greeting that a process of an earlier life has left is answered too; nobody hears that.
    """
    life, until = secrets.token_hex(8), time.monotonic() + timeout_s
    missing = list(range(1, world_size))
    while missing:
        if time.monotonic() > until:
            raise RunError(f"rank {missing[0]} did not come within {timeout_s:.0f} s (train.timeout_s)")
        for rank in missing:
            if store.check([f"greeting/{rank}"]):
                store.set(f"answer/{store.get(f'greeting/{rank}').decode()}", life)
        missing = [rank for rank in missing if not store.check([f"heard/{life}/{rank}"])]
        time.sleep(_POLL_S)
    return life


def _learn_life(store: Store, rank: int) -> str:
    greeting = secrets.token_hex(8)
    store.set(f"greeting/{rank}", greeting)
    life = str(store.get(f"answer/{greeting}").decode())  # waits for it
    store.set(f"heard/{life}/{rank}", "")
    return life
