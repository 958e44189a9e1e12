"""The table of commands: each command's module is imported when the command is called."""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

_COMMANDS = {
    "train": "train.train",
    "resume": "train.resume",
    "finetune": "finetune.finetune",
    "runs": "train.runs",
    "report": "train.report",
    "eval": "evaluate.evaluate",
    "embed": "embed.embed",
    "calibrate": "calibrate.calibrate",
    "compare": "embed.compare",
    "search": "search.search",
    "average": "average.average",
    "export": "export.export",
    "get": "get.get",
    "doctor": "doctor.doctor",
    "plan": "plan.plan",
    "data": "data.app",
    "config": "config.app",
    "bench": "bench.app",
}
"""Name of a command -> module below facetrain.cli and function, or `app` for a group of commands."""


class CommandGroup(TyperGroup):
    """Group whose help shows the whole summary of each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names of the commands and their summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(name)) for name in self.commands])

    def summary(self, name: str) -> str:
        """Return the first line of the help of a command."""
        return (self.commands[name].help or "").partition("\n")[0]


class Program(CommandGroup):
    """The program `facetrain`: its help reads the summaries from the source files, and imports no command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**(settings | {"commands": _Commands()}))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return list(_COMMANDS)

    def summary(self, name: str) -> str:
        """Return the first line of the docstring of a command, or the help of a group."""
        module, _, function = _COMMANDS[name].rpartition(".")
        path = Path(__file__).parent / module
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
        pattern = (
            r'typer\.Typer\([^)]*?help="([^"]*)"'
            if function == "app"
            else rf'^def {function}\(.*?"""([^"\n]*)'
        )
        match = re.search(pattern, source, re.DOTALL | re.MULTILINE)
        assert match is not None, f"{path}: no summary of {function}"
        return match[1]


class _Commands(MutableMapping[str, Any]):
    """Commands by name; read-only, although typer declares the mapping as one that can be changed."""

    def __getitem__(self, name: str) -> Any:
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)

    def __setitem__(self, name: str, command: Any) -> None:
        raise TypeError("the table of commands cannot be changed")

    def __delitem__(self, name: str) -> None:
        raise TypeError("the table of commands cannot be changed")


@cache
def _load(name: str) -> Any:
    """Import a command; return it in the form that typer runs.

    Raises:
        KeyError: there is no such command.
    """
    module, _, function = _COMMANDS[name].rpartition(".")
    target = getattr(import_module(f"facetrain.cli.{module}"), function)
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name)(target)
        return typer.main.get_command(app)
    target.info.cls, target.rich_markup_mode = CommandGroup, None
    group = typer.main.get_group(target)
    group.name = name
    return group
