"""Options and output that several `facetrain bench` commands share."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Annotated, Any

import typer

from facetrain.bench.workloads import Turns
from facetrain.cli.outputs import echo_line
from facetrain.errors import UsageError

DATA_OPTION = typer.Option(help="Dataset to read; by default 4,096 generated images of about 8 kB each.")
ROUNDS_OPTION = typer.Option(
    min=1, help="Number of rounds. Variants take turns; the result is the median, of `embed` the fastest."
)
TurnsOptions = Annotated[
    Turns, {"steps": typer.Option(min=1, help="Timed steps in each round."), "rounds": ROUNDS_OPTION}
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


def print_report(report: dict[str, Any], as_json: bool) -> None:
    """Print a report as JSON, or as lines of names and values; values of one part are on one line."""
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    for line in _lines(report, ""):
        echo_line(line)


def _lines(report: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in report.items():
        label = f"{indent}{_words(name):24}"
        if not isinstance(value, dict):
            lines.append(f"{label}{_formatted(value)}")
        elif any(isinstance(each, dict) for each in value.values()):
            lines += [label.rstrip(), *_lines(value, indent + "  ")]
        else:
            lines.append(
                label + "  ".join(f"{_words(key)} {_formatted(each)}" for key, each in value.items())
            )
    return lines


def _words(name: object) -> str:
    return str(name).replace("_", " ")


def _formatted(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_formatted, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
