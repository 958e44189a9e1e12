"""Fuzz one target: `python -m tests.fuzz.run recordio --executions 100000`.

With atheris installed (`--atheris`), coverage guides the mutations; without, they are blind. Memory is
limited to a gigabyte above what the process has at the start, so that an absurd allocation fails the run.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.targets import TARGETS, seeds

_WORDS = [b"\0" * 4, b"\xff" * 4, b"\x0a\x23\xd7\xce", b"\xff\xff\xff\x1f", b"\t", b"\n", b"9" * 25, b"-1"]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change a few places: flip bits, overwrite, cut, repeat, insert what parsers trip over."""
    content = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        place, kind = rng.randrange(len(content) + 1), rng.randrange(6)
        if kind == 0 and content:
            content[place % len(content)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[place : place + 4] = rng.choice(_WORDS)
        elif kind == 2:
            content[place:place] = rng.choice(_WORDS)
        elif kind == 3:
            del content[place : place + rng.randrange(1, 64)]
        elif kind == 4:
            content[place:place] = content[place : place + rng.randrange(1, 64)]
        else:
            content[place : place + 1] = rng.randbytes(1)
    return bytes(content)


def fuzz(target: Callable[[bytes], None], corpus: list[bytes], executions: int, seed: int) -> None:
    """Run mutations of the corpus; the input that breaks the target is kept."""
    rng = random.Random(seed)
    warnings.simplefilter("error")
    for _ in range(executions):
        data = mutate(rng.choice(corpus), rng)
        try:
            target(data)
        except BaseException:
            Path("fuzz-crash").write_bytes(data)
            print("kept the input as fuzz-crash", file=sys.stderr)
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    options = parser.parse_args()
    corpus = seeds()[options.target]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    if options.atheris:
        import atheris

        atheris.Setup([sys.argv[0], f"-runs={options.executions}"], TARGETS[options.target])
        atheris.Fuzz()
        return
    since = time.perf_counter()
    fuzz(TARGETS[options.target], corpus, options.executions, options.seed)
    print(
        f"{options.target}: {options.executions:,} executions, {time.perf_counter() - since:.0f} s, no crash"
    )


if __name__ == "__main__":
    main()
