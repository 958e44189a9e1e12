"""Fuzz one target: `python -m tests.fuzz.run recordio --seconds 300`.

The outcomes guide the mutations: an input with a new outcome is mutated further, and saved in `--corpus`, where the
next run starts. Memory is limited to 1 GiB above the memory of the process at the start, so that a huge allocation
fails the run. So does an input that takes more than `MOST_SECONDS` of CPU time.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.fuzz import corpus as corpora
from tests.fuzz.mutation import mutate
from tests.fuzz.target import own_cache_folder
from tests.fuzz.targets import TARGETS
from tests.support.faults import memory_limited_to

MOST_SECONDS = 60
_MOST_KEPT = 500


class TooSlow(BaseException):
    """The time for an input is over. No `Exception`, because readers make their own errors of those."""


@own_cache_folder()
def fuzz(
    target: Callable[[bytes], str],
    corpus: list[bytes],
    *,
    seed: int,
    executions: int | None = None,
    seconds: float | None = None,
) -> int:
    """Run mutations of a growing corpus and return their number; an input that breaks the target is saved.

    Raises:
        TooSlow: an input takes more than `MOST_SECONDS` of CPU time.
    """
    rng, since, seen, count = random.Random(seed), time.monotonic(), {target(data) for data in corpus}, 0
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", DeprecationWarning)  # Python does not show them
    warnings.filterwarnings("ignore", "Reading `.npy`")  # a file of Python 2
    with _limited_time():
        while count != executions and (seconds is None or time.monotonic() - since < seconds):
            data = mutate(corpus[int(rng.random() * len(corpus))], rng)
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
            try:
                outcome = target(data)
            except BaseException:
                Path("fuzz-crash").write_bytes(data)
                print("kept the input as fuzz-crash", file=sys.stderr)
                raise
            count += 1
            if outcome not in seen and len(seen) < _MOST_KEPT:
                seen.add(outcome)
                corpus.append(data)
    return count


@contextmanager
def _limited_time() -> Iterator[None]:
    """End the block by `TooSlow` when the timer ITIMER_PROF expires, which the block starts."""
    previous = signal.signal(signal.SIGPROF, _stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"the input takes more than {MOST_SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="a name in tests/fuzz/targets.py")
    parser.add_argument("--executions", type=int)
    parser.add_argument("--seconds", type=float, help="60 if neither this nor --executions is given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--corpus", type=Path, default=Path("build/fuzz"), help="a folder per target below it"
    )
    options = parser.parse_args()
    seconds = options.seconds or (None if options.executions else 60.0)
    if options.target not in TARGETS:
        parser.error(f"no target {options.target}; there are {', '.join(sorted(TARGETS))}")
    target, kept = TARGETS[options.target], corpora.load(options.target, options.corpus)
    corpus = [*target.seeds(), *corpora.load(options.target), *kept]
    known, since = len(corpus), time.monotonic()
    with memory_limited_to(1 << 30):
        count = fuzz(target, corpus, executions=options.executions, seconds=seconds, seed=options.seed)
    if len(corpus) > known:
        corpora.save(options.target, kept + corpus[known:], options.corpus)
    taken = time.monotonic() - since
    print(f"{options.target}: {count:,} executions in {taken:.0f} s, no crash; {len(corpus):,} inputs kept")


if __name__ == "__main__":
    main()
