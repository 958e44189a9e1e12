"""`facetrain doctor`: check the machine, the dataset and the config before a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.options import Json, OptionalConfig, Set

if TYPE_CHECKING:
    from facetrain.config.schema import Config
    from facetrain.doctor.check_result import CheckResult

_COLORS = {"ok": "green", "warning": "yellow", "failure": "red"}


def doctor(
    run_dir: Annotated[
        Path | None,
        typer.Argument(help="Folder of a run: verify its checkpoints, and check its config if there is one."),
    ] = None,
    config: OptionalConfig = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of GPUs of the run that the config is meant for: batch, learning rate and sizes are checked "
            "for so many. The default is the number of processes of `facetrain train` on this machine, or of this "
            "command under torchrun.",
        ),
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Find faults of the machine, the dataset and the config.

    Under torchrun it also measures the network between the ranks. The exit code is 1 if a check fails.
    """
    from facetrain.config.own_code import load_trusted
    from facetrain.distributed import collectives
    from facetrain.distributed.process_lifetime import launched_by_torchrun
    from facetrain.distributed.topology import topology
    from facetrain.distributed.world import join
    from facetrain.doctor.examine import examine
    from facetrain.errors import UsageError

    if run_dir and not run_dir.is_dir():
        raise UsageError(f"{run_dir}: no such folder; name the folder of a run")
    if run_dir and not any((run_dir / name).exists() for name in ("config.yaml", "checkpoints")):
        raise UsageError(
            f"{run_dir}: not the folder of a run: it has neither config.yaml nor checkpoints; to check a dataset, name "
            "it with --config FILE --set data.train=DATASET"
        )
    # --config wins: it may be the config with which the run is to continue.
    of_run = run_dir / "config.yaml" if run_dir and not config else None
    if (gpus or set_) and not config and not (of_run and of_run.is_file()):
        option = "--gpus" if gpus else "--set"
        raise UsageError(f"{option} needs a config to check; give one with --config")
    described = load_trusted(config, set_ or ()) if config else None
    faults: list[CheckResult] = []
    if of_run and of_run.is_file():
        described, faults = _config_of_run(of_run, set_ or ())
    if described and gpus is None and not launched_by_torchrun():
        gpus = topology("auto", "1", None, 0, described.train.device).nproc_per_node
    device = described.train.device if described else "auto"
    with join(device, cpu_setting="train.device: cpu") as world:
        # As dicts, because the ranks exchange JSON.
        local_results = [vars(result) for result in (*faults, *examine(world, described, run_dir, gpus=gpus))]
        results = _merge(collectives.gather_json(local_results))
    failures = sum(result["status"] == "failure" for result in results)
    if world.is_leader:
        _print(results, failures, as_json=as_json)
    sys.exit(1 if failures else 0)


def _config_of_run(path: Path, overrides: Sequence[str]) -> tuple[Config | None, list[CheckResult]]:
    """Return the config of a run, or its faults: the checkpoints can be verified without it.

    Raises:
        ConfigError: the config has faults, and the command line changes it.
    """
    from facetrain.config.loading import load_config
    from facetrain.doctor.check_result import failed
    from facetrain.errors import ConfigError

    try:
        return load_config(path, overrides), []
    except ConfigError as error:
        if overrides:
            raise
        return None, [failed("config", str(error), "correct the file; the run cannot continue with it")]


def _merge(results_of_ranks: list[list[dict[str, str]]]) -> list[dict[str, Any]]:
    """Return all results of the leader, and the results of other ranks that are not ok."""
    return [
        {"rank": rank} | result
        for rank, results in enumerate(results_of_ranks)
        for result in results
        if rank == 0 or result["status"] != "ok"
    ]


def _print(results: list[dict[str, Any]], failures: int, *, as_json: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from facetrain.doctor.check_result import count_text
    from facetrain.files import printable

    if as_json:
        typer.echo(json.dumps({"failures": failures, "results": results}, indent=1))
        return
    terminal = Console(highlight=False)  # respects NO_COLOR, and prints no colors into files
    for result in results:
        status = f"{result['status']:8}", _COLORS[result["status"]]
        rank = f" (rank {result['rank']})" if result["rank"] else ""
        certainty = f" ({result['certainty']})" if result["certainty"] else ""
        line = printable(f" {result['check']}{rank}: {result['message']}{certainty}")
        terminal.print(Text.assemble(status, line), soft_wrap=True)
        if result["advice"]:
            typer.echo(f"{'':8} → {printable(result['advice'])}")
    warnings = sum(result["status"] == "warning" for result in results)
    typer.echo(f"{count_text(failures, 'failure')}, {count_text(warnings, 'warning')}")
