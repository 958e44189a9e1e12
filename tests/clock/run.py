"""Survivors' clock: how soon, and with which line, a run ends after a fault in one rank (`python -m tests.clock.run`).

Two ranks train on a CPU with gloo. Rank 1 dies, stops, hangs, or loses its network or its disk, at each place of a run.
Needs a C compiler, and the permission to create network namespaces.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.clock.cells import TIMEOUT_S, Cell, all_cells, compile_lost_disk, measure
from tests.soak.scenarios import write_dataset
from tests.support.processes import adopt_orphans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", help="only this place, such as loading")
    parser.add_argument("--fault", help="only this fault, such as dies")
    parser.add_argument("--parallel", type=int, default=3, help="runs at the same time; default: 3")
    options = parser.parse_args()
    adopt_orphans()
    cells = [
        cell
        for cell in all_cells()
        if options.place in (None, cell.place) and options.fault in (None, cell.fault)
    ]
    with tempfile.TemporaryDirectory(prefix="facetrain-clock-") as name:
        folder = Path(name)
        write_dataset(folder / "data")
        library = compile_lost_disk(folder)

        def run(numbered: tuple[int, Cell]) -> None:
            number, cell = numbered
            measure(cell, folder / str(number), folder / "data", library)
            print(_row(cell), file=sys.stderr, flush=True)

        with ThreadPoolExecutor(options.parallel) as pool:
            list(pool.map(run, enumerate(cells)))
    print(table(cells))
    sys.exit(any(cell.rank_0_s > cell.limit_s for cell in cells))


def table(cells: list[Cell]) -> str:
    """Format the cells as a table in Markdown."""
    names = [
        "rank 1 …",
        "during",
        "rank 0 ended after",
        "rank 1 ended after",
        "command after",
        "exit",
        "printed",
    ]
    head = f"| {' | '.join(names)} |\n{'|---' * len(names)}|"
    limit = f"`train.timeout_s` is {TIMEOUT_S} where rank 1 hangs, and 600 elsewhere."
    return "\n".join([head, *map(_row, cells), "", limit])


def _row(cell: Cell) -> str:
    codes = " and ".join(map(str, cell.exit_codes))
    seconds = " | ".join(f"{each:.1f} s" for each in (cell.rank_0_s, cell.rank_1_s, cell.command_s))
    lines = "<br>".join(line.replace("|", "\\|") for line in cell.lines)
    return f"| {cell.fault} | {cell.place} | {seconds} | {codes} | {lines} |"


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
