"""Options and output that several `facetrain bench` commands share."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from facetrain.bench.workloads import Turns
from facetrain.cli.outputs import echo_line
from facetrain.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
DATA_OPTION = typer.Option(help="Dataset to read; by default 4,096 generated images of about 8 kB each.")
Data = Annotated[Path | None, DATA_OPTION]
_ROUNDS = typer.Option(min=1, help="Number of rounds. Variants take turns; the result is the median.")
Rounds = Annotated[int, _ROUNDS]
TurnsOptions = Annotated[
    Turns, {"steps": typer.Option(min=1, help="Timed steps in each round."), "rounds": _ROUNDS}
]
Variants = Annotated[
    list[str] | None,
    typer.Option("--variant", metavar="NAME", help="Measure this variant; may be repeated."),
]


def require_known(option: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check the names given with an option.

    Raises:
        UsageError: a name is unknown.
    """
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name}: unknown; use one of {', '.join(known)}")


def print_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Print a report as JSON, or as lines of names and values, nested ones indented."""
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    for line in _lines(report, ""):
        echo_line(line)


def _lines(report: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in report.items():
        label = f"{indent}{str(name).replace('_', ' ')}"
        if isinstance(value, dict):
            lines += [label, *_lines(value, indent + "  ")]
        else:
            lines.append(f"{label:44}{_formatted(value)}")
    return lines


def _formatted(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
