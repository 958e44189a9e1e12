"""Options about the processes of a run, and its start in them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, NoReturn

import typer

from facetrain.errors import UsageError
from facetrain.signals import exit_on_signals

Processes = Annotated[
    str, typer.Option(metavar="N|auto", help="Processes on this host. auto: one per GPU, or one on CPU.")
]


@dataclass(frozen=True)
class LaunchOptions:
    """Options about the processes of a run."""

    nproc_per_node: Processes = "auto"
    nnodes: Annotated[
        str,
        typer.Option(
            metavar="N|MIN:MAX",
            help="Number of hosts, the machines of the run, or MIN:MAX for elastic training.",
        ),
    ] = "1"
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Name and port of one host; give the same value on all."),
    ] = None
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How many times training may restart after a failure.")
    ] = 0


def end_on_signals() -> None:
    """End this process by an exception at a signal, until an agent or a training loop handles it.

    The default action would leave a new run folder with its lock. The first process of a container has no default
    action.
    """
    exit_on_signals(signal.SIGUSR1)


def start(
    run: Callable[[], int], rank_arguments: list[str], options: LaunchOptions, device: Callable[[], str]
) -> NoReturn:
    """Run in this process, or in the ranks that are started for it; end with the exit code.

    Args:
        run: what this process does if it is a rank, or the only one.
        rank_arguments: arguments of Python in the other ranks.
        options: processes and hosts.
        device: returns the device that the config asks for.

    Raises:
        UsageError: options about processes are given where another launcher than facetrain starts them.
    """
    from facetrain.distributed.launch import launch
    from facetrain.distributed.process_lifetime import launched_by_torchrun, outside_launcher
    from facetrain.distributed.topology import topology

    usual = asdict(LaunchOptions())
    given = {name: value for name, value in asdict(options).items() if value != usual[name]}
    if given and (launcher := outside_launcher()):
        names = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
        raise UsageError(f"{names}: has no effect {launcher}; remove it, or give it to the launcher")
    if launched_by_torchrun():
        if os.getpid() == 1:  # of a container: a signal without a handler does nothing
            end_on_signals()
        sys.exit(run())
    end_on_signals()
    sys.exit(launch(run, topology(**asdict(options), device=device()), rank_arguments))
