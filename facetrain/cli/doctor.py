"""`facetrain doctor`: whether this machine is fit to train."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

_COLORS = {"ok": "green", "warning": "yellow", "failure": "red"}


def doctor(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Folder of a run: verify its checkpoints, too.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Run description: check its dataset and numbers.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the config.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
) -> None:
    """Find what would stop or spoil a training run, before it costs anything.

    Started under torchrun it also measures the network between the ranks. Exit code 1: a line says failure.
    """
    from facetrain.config.loading import load_config
    from facetrain.distributed import collectives
    from facetrain.distributed.world import join
    from facetrain.doctor.examine import examine
    from facetrain.errors import UsageError

    if run_dir and not run_dir.is_dir():
        raise UsageError(f"{run_dir}: no such folder")
    if run_dir and not config and (run_dir / "config.yaml").is_file():
        config = run_dir / "config.yaml"
    described = load_config(config, set_ or ()) if config else None
    with join(described.train.device if described else "auto") as world:
        own = [vars(finding) for finding in examine(world, described, run_dir)]
        findings = _merged(collectives.gather_json(own))
    failures = sum(finding["status"] == "failure" for finding in findings)
    if world.is_leader:
        _print(findings, failures, as_json=as_json)
    sys.exit(1 if failures else 0)


def _merged(reports: list[list[dict[str, str]]]) -> list[dict[str, Any]]:
    """Return the leader's findings, and of the other ranks what is not ok."""
    return [
        {"rank": rank} | finding
        for rank, report in enumerate(reports)
        for finding in report
        if rank == 0 or finding["status"] != "ok"
    ]


def _print(findings: list[dict[str, Any]], failures: int, *, as_json: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from facetrain.doctor.check_result import count

    if as_json:
        typer.echo(json.dumps({"failures": failures, "findings": findings}, indent=1))
        return
    terminal = Console(highlight=False)  # knows NO_COLOR, and what is no terminal
    for finding in findings:
        status = f"{finding['status']:8}", _COLORS[finding["status"]]
        where = f" (rank {finding['rank']})" if finding["rank"] else ""
        said = f" {finding['what']}{where}: {finding['found']}"
        terminal.print(Text.assemble(status, said), soft_wrap=True)
        if finding["do"]:
            typer.echo(f"{'':8} → {finding['do']}")
    warnings = sum(finding["status"] == "warning" for finding in findings)
    typer.echo(f"{count(failures, 'failure')}, {count(warnings, 'warning')}")
