"""Refusal of options that have no effect together with the other options of a command line."""

from __future__ import annotations

from typing import Any

import typer

from facetrain.distributed.process_lifetime import outside_launcher
from facetrain.errors import UsageError

_LAUNCH_OPTIONS = ("nproc_per_node", "nnodes", "rdzv_endpoint", "max_restarts")


def refuse_given(context: typer.Context, *names: str, when: str) -> None:
    """Refuse a command line that gives an option which has no effect.

    Args:
        context: Context of the command.
        names: Names of the options, as parameters of the command's function.
        when: End of the message: the condition that takes the effect from them.

    Raises:
        UsageError: one of them is given, even with its default value.
    """
    for parameter in context.command.params:
        if parameter.name in names and _is_given(context, parameter.name):
            raise UsageError(f"{_flag(context, parameter)} has no effect {when}; remove it")


def refuse_launch_options(context: typer.Context) -> None:
    """Refuse a command line that gives a launch option to a rank that torchrun or another launcher has started.

    The ranks of facetrain's own elastic agent have the command line of the agent: there the options have an effect.

    Raises:
        UsageError: a launch option is given.
    """
    if launcher := outside_launcher():
        refuse_given(context, *_LAUNCH_OPTIONS, when=launcher)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flag(context: typer.Context, parameter: Any) -> str:
    """Return an option as it was given: `--flip`, or `--no-flip`."""
    negated = parameter.secondary_opts and context.params[parameter.name] is False
    flag: str = (parameter.secondary_opts if negated else parameter.opts)[0]
    return flag
