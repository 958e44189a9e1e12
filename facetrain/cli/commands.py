"""Groups of commands in sections: the module of a command is imported when it is called or described."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from facetrain.errors import UsageError


class CommandGroup(TyperGroup):
    """Group of commands whose help has a section for each kind of them."""

    sections: ClassVar[dict[str, dict[str, str]]]
    """Title of a section -> name of a command -> `module:function` below facetrain.cli, or `module:app`."""

    def __init__(self, **settings: Any) -> None:
        self._places = {name: place for names in self.sections.values() for name, place in names.items()}
        # typer reads the names only: for the list of commands, and for a guess at a misspelled one.
        super().__init__(**(settings | {"commands": dict.fromkeys(self._places)}))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command and return it in the form that typer runs; None if there is none of this name."""
        return _load(cmd_name, self._places[cmd_name]) if cmd_name in self._places else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each kind of commands: their names, and the first line of their help."""
        for title, names in self.sections.items():
            with formatter.section(title):
                lines = [(name, self.get_command(ctx, name).help.partition("\n")[0]) for name in names]
                formatter.write_dl(lines)


class Program(CommandGroup):
    """The commands of `facetrain`."""

    sections: ClassVar[dict[str, dict[str, str]]] = {
        "Commands": {
            "train": "train:train",
            "resume": "train:resume",
            "finetune": "finetune:finetune",
            "eval": "evaluate:evaluate",
            "export": "export:export",
            "data": "data:app",
        },
        "Faces and embeddings": {
            "embed": "embed:embed",
            "compare": "embed:compare",
            "search": "search:search",
            "calibrate": "calibrate:calibrate",
            "align": "align:align",
        },
        "Models": {"get": "get:get", "average": "average:average"},
        "Runs": {"runs": "train:runs", "report": "train:report"},
        "Before a run": {
            "config": "config:app",
            "plan": "plan:plan",
            "doctor": "doctor:doctor",
            "bench": "bench:app",
        },
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an empty text anywhere on the command line: as a path it would be the current folder."""
        for before, argument in pairwise(["facetrain", *args]):
            if re.fullmatch(r"(--[\w-]+=)?", argument):
                raise UsageError(
                    f"an empty text follows {argument or before}: the value of a variable that is not set? Give a "
                    "text, or leave it out"
                )
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class DataCommands(CommandGroup):
    """The commands of `facetrain data`."""

    sections: ClassVar[dict[str, dict[str, str]]] = {
        "Commands": {
            "pack": "data.create:pack",
            "convert": "data.transform:convert",
            "inspect": "data.inspect:inspect",
            "check": "data.inspect:check",
        },
        "Which images": {
            "clean": "data.clean:clean",
            "merge": "data.transform:merge",
            "split": "data.transform:split",
        },
        "Beside the images": {
            "pairs": "data.pairs:pairs",
            "landmarks": "data.create:landmarks",
            "synth": "data.create:synth",
        },
    }


class _Command(TyperCommand):
    """Command whose errors know it, also that of an option without its value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command."""
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except Exception as error:  # of click, or of the copy of click in typer
            fault: Any = error
            if getattr(fault, "ctx", ctx) is None:
                fault.ctx = ctx
            raise
        return rest


@cache
def _load(name: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    target = getattr(import_module(f"facetrain.cli.{module}"), attribute)
    if isinstance(target, typer.Typer):
        group = typer.main.get_group(target)
        group.name = name
        return group
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=_Command)(target)
    return typer.main.get_command(app)
