"""`facetrain train`, `resume`, `runs` and `report`: start, continue, list and describe training runs."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.launch_options import LaunchOptions, start
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import CONFIG_FLAGS, Json, RunDir, Set, find_run
from facetrain.cli.outputs import echo_line, require_writable
from facetrain.cli.usual_settings import UsualSettings
from facetrain.errors import FacetrainError, UsageError

if TYPE_CHECKING:
    from facetrain.run.request import TrainRequest

Profile = Annotated[
    bool,
    typer.Option(
        "--profile", help="Profile five steps from the sixth on; write the trace to RUN_DIR/profile."
    ),
]


@option_groups
def train(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            *CONFIG_FLAGS,
            help="Config of the run: a YAML file, or the name of a preset. Default, with --data: the default of each "
            "key, with a network, a number format and a learning rate for the dataset and the machine.",
        ),
    ] = None,
    settings: UsualSettings,
    set_: Set = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            "--output",
            help="Folder of the run. Default: run.dir/run.name of the config, with a number behind it if that exists.",
        ),
    ] = None,
    resume_existing: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run if its folder has a checkpoint; otherwise start it. "
            "For jobs that a scheduler starts again with the same command.",
        ),
    ] = False,
    launch_options: LaunchOptions,
    profile: Profile = False,
) -> None:
    """Train a backbone and its head as a config describes."""
    from facetrain.run.request import TrainRequest

    if config is None and settings.data is None:
        raise UsageError(
            "facetrain train: give --config FILE, --preset NAME or --data DATASET; `facetrain config list` lists the "
            "presets"
        )
    request = TrainRequest(
        config=str(config) if config else None,
        overrides=(*settings.overrides(), *(set_ or ())),
        run_dir=str(run_dir) if run_dir else None,
        allow_code="--allow-code" in sys.argv,
        resume_existing=resume_existing,
        own_data=settings.data is not None,
        choose=settings.choose(),
        profile=profile,
        command_line=tuple(sys.argv[1:]),
    )
    _launch(request, launch_options)


@option_groups
def resume(
    *,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN_DIR|ADDRESS",
            help="Folder of a run, or its address in checkpoint.mirror: it then continues in runs/NAME. Default: the "
            "newest run in the folder runs.",
        ),
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", min=0, help="Step of the checkpoint. Default: the newest.")
    ] = None,
    set_: Set = None,
    launch_options: LaunchOptions,
    profile: Profile = False,
) -> None:
    """Continue a run from a checkpoint, on any number of processes."""
    from facetrain.run.request import TrainRequest

    request = TrainRequest(
        command="resume",
        overrides=tuple(set_ or ()),
        run_dir=run,
        checkpoint=checkpoint,
        allow_code="--allow-code" in sys.argv,
        profile=profile,
        command_line=tuple(sys.argv[1:]),
    )
    _launch(request, launch_options)


def _launch(request: TrainRequest, options: LaunchOptions) -> None:
    """Train in this process, or in the ranks that are started for it; end with the exit code of the run."""
    from facetrain.cli.rank import rank_arguments, train_on_this_rank

    device = partial(_device, request, alone=options.nnodes == "1")
    start(partial(train_on_this_rank, request), rank_arguments(request), options, device)


def _device(request: TrainRequest, *, alone: bool) -> str:
    """Return the device that the config asks for; refuse what can be refused before torch is imported, for seconds.

    With several hosts, the ranks refuse it: those of the other hosts wait for them.
    """
    from facetrain.data.published_datasets import require_dataset
    from facetrain.run.asked_config import asked_config, recorded_config

    try:
        asked = asked_config(request) if request.command == "train" else recorded_config(request)[1]
        # Of a run that continues, the ranks: its data may come back if it has trained, and the exit code says so.
        if request.command == "train" and not request.resume_existing:
            require_dataset(asked.config.data)
    except FacetrainError:
        if alone:
            raise
        return "auto"
    return asked.config.train.device


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that holds the run folders.")] = Path(
        "runs"
    ),
    page: Annotated[
        Path | None,
        typer.Option(metavar="HTML", help="Write a page with the curves of all runs, one color each."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the runs of a folder: state, step, loss, best accuracy."""
    from facetrain.run.report.list_runs import format_runs, list_runs, write_runs_page

    require_writable(page)
    listed = list_runs(folder)
    if page is not None:
        write_runs_page(listed, str(folder), page)
    if as_json:
        typer.echo(json.dumps([run.model_dump() for run in listed], indent=1))
    elif listed:
        typer.echo(format_runs(listed))
    else:
        echo_line(f"{folder}: no runs")


def report(
    run_dir: RunDir = None,
    output: Annotated[
        Path | None, typer.Option(help="HTML file to write; the default is report.html in the run folder.")
    ] = None,
) -> None:
    """Write a report of a run, as one HTML page that needs no network."""
    require_writable(output)
    run_dir = find_run(run_dir)
    if not run_dir.exists():  # before torch is imported, which takes seconds
        raise UsageError(f"{run_dir}: no such folder; `facetrain runs` lists the runs")
    from facetrain.run.folder.run_files import REPORT_FILE
    from facetrain.run.report.page import write_run_report

    page = output or run_dir / REPORT_FILE
    write_run_report(run_dir, page)
    echo_line(str(page))
