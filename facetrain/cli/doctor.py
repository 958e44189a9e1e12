"""`facetrain doctor`: check the machine and the dataset before a run."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from facetrain.cli.options import Json, OptionalConfig, Set
from facetrain.cli.usual_settings import UsualSettings
from facetrain.text import count_text

_COLORS = {"ok": "green", "warning": "yellow", "failure": "red"}
Data = Annotated[
    str | None,
    typer.Option(
        metavar="DATASET",
        help="Dataset to check, and to state the settings with which `facetrain train --data DATASET` would train.",
    ),
]


def doctor(config: OptionalConfig = None, data: Data = None, set_: Set = None, as_json: Json = False) -> None:
    """Find faults of the machine and the dataset, and errors of its images that stop no run.

    Under torchrun it also measures the network between the ranks. The exit code is 1 if a check fails.
    """
    from facetrain.distributed import collectives
    from facetrain.distributed.world import join
    from facetrain.doctor.examine import examine
    from facetrain.errors import UsageError
    from facetrain.run.asked_config import asked_config
    from facetrain.run.request import TrainRequest

    if set_ and not (config or data):
        raise UsageError("--set needs a config to check; give one with --config, or a dataset with --data")
    request = TrainRequest(
        config=str(config) if config else None,
        overrides=(*UsualSettings(data=data).overrides(), *(set_ or ())),
        own_data=data is not None,
    )
    asked = asked_config(request) if config or data else None
    described = asked.config if asked else None
    chosen_without = asked.set_keys if asked and request.has_data_alone else None
    with join(described.train.device if described else "auto", cpu_setting="train.device: cpu") as world:
        # As dicts, because the ranks exchange JSON.
        found = [vars(result) for result in examine(world, described, chosen_without)]
        results = _merge(collectives.gather_json(found))
    failures = sum(result["status"] == "failure" for result in results)
    if world.is_leader:
        _print(results, failures, as_json=as_json)
    sys.exit(1 if failures else 0)


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

    from facetrain.text import printable

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
