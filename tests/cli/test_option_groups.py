"""Options that are declared once, as a dataclass, and shared by several commands."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from facetrain.cli.option_groups import option_groups


@dataclass(frozen=True)
class Output:
    """Group of the command line: its fields have their options."""

    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")]
    rows: Annotated[list[int] | None, typer.Option("--row", min=1, help="Rows to write.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@dataclass(frozen=True)
class Inference:
    """Settings of another part, which knows nothing of typer."""

    device: str = "auto"
    batch_size: int = 256
    workers: int = 2


Network = Annotated[Inference, {"device": typer.Option(help="Device."), "batch_size": typer.Option(min=1)}]
Model = Annotated[Path, typer.Argument(help="Model to run.")]


@option_groups
def grouped(context: typer.Context, model: Model, output: Output, network: Network, seed: int = 0) -> None:
    """Print what the command gets."""
    source = context.get_parameter_source("batch_size")
    typer.echo(f"{model} {output} {network} {seed} {source and source.name}")


def spelled_out(
    context: typer.Context,
    model: Model,
    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")],
    rows: Annotated[list[int] | None, typer.Option("--row", min=1, help="Rows to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str, typer.Option(help="Device.")] = "auto",
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    seed: int = 0,
) -> None:
    """Print what the command gets."""
    source = context.get_parameter_source("batch_size")
    values = Output(output, rows, as_json), Inference(device, batch_size)
    typer.echo(f"{model} {values[0]} {values[1]} {seed} {source and source.name}")


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "m --output a.npz",
        "m --output a.npz --row 1 --row 2 --json --device cpu --batch-size 256 --seed 3",
        "m",
        "m --output a.npz --row 0",
        "m --output a.npz --batch-size many",
        "m --output a.npz --workers 3",
        "m --output a.npz --devices cpu",
    ],
)
def test_a_group_gives_the_same_command_as_its_options_spelled_out(arguments):
    results = []
    for command in (grouped, spelled_out):
        app = typer.Typer(rich_markup_mode=None)
        app.command("program")(command)
        result = CliRunner().invoke(app, arguments.split(), prog_name="program")
        results.append((result.exit_code, result.output))
    assert results[0] == results[1]


def test_two_groups_with_one_option_are_refused():
    def command(first: Output, second: Output) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'output'"):
        option_groups(command)
