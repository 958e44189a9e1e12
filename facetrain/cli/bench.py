"""`facetrain bench …`: measure the steps of a run, and its loader, on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from facetrain.bench.workloads import DEFAULT_CONFIG, RunWorkload, Turns
from facetrain.cli.launch_options import LaunchOptions, Processes, start
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import CONFIG_FLAGS, DeviceOfBatches, Json, Set, local_file
from facetrain.cli.outputs import echo_line
from facetrain.cpu_cores import usable_cores

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure parts of a run on this machine.")
DATA_OPTION = typer.Option(
    metavar="DATASET",
    parser=local_file,
    help="Dataset to read; by default 4,096 generated images of about 8 kB each.",
)
ROUNDS_OPTION = typer.Option(
    min=1, help="Number of rounds, each with every input or variant; the result is the median."
)
TurnsOptions = Annotated[
    Turns, {"steps": typer.Option(min=1, help="Timed steps in each round."), "rounds": ROUNDS_OPTION}
]


@app.command()
@option_groups
def train(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            *CONFIG_FLAGS,
            help="Config: a YAML file, or the name of a preset; by default an r18 with 64 images per process.",
        ),
    ] = None,
    set_: Set = None,
    workload: Annotated[
        RunWorkload,
        {
            "identities": typer.Option(
                min=2,
                help="Number of class centers of the head, at least those of the dataset; by default "
                "data.num_classes of the config, or 10,000.",
            ),
            "data": DATA_OPTION,
        },
    ],
    turns: TurnsOptions,
    nproc_per_node: Processes = "auto",
    as_json: Json = False,
) -> None:
    """Measure whole steps of a run.

    The inputs are one batch that stays on the device (synthetic), and a dataset through the loader (records).
    """
    from facetrain.config.loading import build_config, load_config
    from facetrain.config.own_code import allow_code_of

    described = (
        load_config(config, set_ or ())
        if config
        else build_config(DEFAULT_CONFIG, "the defaults", set_ or ())
    )
    allow_code_of(described)

    def measure() -> int:
        from facetrain.bench.train import measure_training

        report = measure_training(described, workload, turns)
        if report is not None:
            print_report(report, as_json)
        return 0

    arguments = ["-m", "facetrain.cli.bench_rank", *sys.argv[1:]]
    start(measure, arguments, LaunchOptions(nproc_per_node), lambda: described.train.device)


@app.command()
def loader(
    data: Annotated[Path | None, DATA_OPTION] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes of each loader; by default the number of usable cores."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=2, help="Images per batch.")] = 128,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Duration of each variant in each round, in seconds.")
    ] = 3.0,
    rounds: Annotated[int, ROUNDS_OPTION] = 3,
    device: DeviceOfBatches = "auto",
    as_json: Json = False,
) -> None:
    """Measure the loader, beside the JPEG decoder alone."""
    from facetrain.bench.loader import measure_loader
    from facetrain.distributed.devices import pick_device

    report = measure_loader(
        data,
        workers=workers or usable_cores(),
        batch_size=batch_size,
        seconds=seconds,
        rounds=rounds,
        device=pick_device(device, 0, cpu_setting="--device cpu"),
    )
    print_report(report, as_json)


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
