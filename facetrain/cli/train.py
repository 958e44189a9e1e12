"""`facetrain train` and `facetrain resume`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the config; may be repeated."),
]
Processes = Annotated[str, typer.Option(help="Processes on this machine; auto: one per GPU, or one on CPU.")]
Nodes = Annotated[
    str, typer.Option(metavar="N|MIN:MAX", help="Machines; a range lets some be lost and come back.")
]
Endpoint = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where the machines meet; the same on each.")
]
Restarts = Annotated[
    int, typer.Option(min=0, help="How often to go on from the newest checkpoint after a failure.")
]
Profile = Annotated[
    bool,
    typer.Option("--profile", help="Record five steps, from the sixth on, in profile/ of the run's folder."),
]


def train(
    config: Annotated[Path, typer.Option(help="Run description, YAML.")],
    set_: Set = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default run.dir/run.name.")
    ] = None,
    nproc_per_node: Processes = "auto",
    nnodes: Nodes = "1",
    rdzv_endpoint: Endpoint = None,
    max_restarts: Restarts = 0,
    profile: Profile = False,
) -> None:
    """Train a network and its head from a run description."""
    from facetrain.config.loading import load_config
    from facetrain.distributed.process_lifetime import is_worker

    described = load_config(config, set_ or ())
    if is_worker():
        from facetrain.run import training

        sys.exit(training.train(described, run_dir, profile=profile))
    arguments = ["train", "--config", str(config), *_sets(set_), *_flag("--profile", profile)]
    if run_dir:
        arguments += ["--run-dir", str(run_dir)]
    _launch(
        arguments,
        nproc_per_node,
        nnodes,
        rdzv_endpoint,
        max_restarts,
        described.train.device,
        described.run.name,
    )


def resume(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", help="Go on from this step, not the newest.")
    ] = None,
    set_: Set = None,
    nproc_per_node: Processes = "auto",
    nnodes: Nodes = "1",
    rdzv_endpoint: Endpoint = None,
    max_restarts: Restarts = 0,
    profile: Profile = False,
) -> None:
    """Go on with a run from its newest checkpoint, on any number of processes."""
    from facetrain.config.loading import load_config
    from facetrain.distributed.process_lifetime import is_worker
    from facetrain.errors import UsageError

    if not (run_dir / "config.yaml").is_file():
        raise UsageError(f"{run_dir}: is no folder of a run (it has no config.yaml)")
    described = load_config(run_dir / "config.yaml", set_ or ())
    if is_worker():
        from facetrain.run import training

        sys.exit(training.resume(described, run_dir, checkpoint, profile=profile))
    arguments = ["resume", str(run_dir), *_sets(set_), *_flag("--profile", profile)]
    if checkpoint is not None:
        arguments += ["--checkpoint", str(checkpoint)]
    _launch(
        arguments,
        nproc_per_node,
        nnodes,
        rdzv_endpoint,
        max_restarts,
        described.train.device,
        described.run.name,
    )


def _sets(set_: list[str] | None) -> list[str]:
    return [word for value in set_ or () for word in ("--set", value)]


def _flag(name: str, is_set: bool) -> list[str]:
    return [name] if is_set else []


def _launch(
    arguments: list[str],
    nproc_per_node: str,
    nnodes: str,
    rdzv_endpoint: str | None,
    max_restarts: int,
    device: str,
    name: str,
) -> None:
    from facetrain.distributed.launch import launch, topology

    where = topology(nproc_per_node, nnodes, rdzv_endpoint, max_restarts, device)
    debug = ["--debug"] if "--debug" in sys.argv else []
    sys.exit(launch([*arguments, *debug], where, run_id=f"facetrain-{name}"))
