"""Hooks of mkdocs.yml: pages that are generated when the site is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from facetrain.cli.app import app

_PLACEHOLDERS = {str: "TEXT", int: "N", float: "NUMBER", Path: "PATH"}
_ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the command reference and CONTRIBUTING.md to the pages."""
    files.append(File.generated(config, "commands.md", content=command_reference()))
    contributing = (_ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=contributing))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page in which links to CONTRIBUTING.md lead to its page on the site."""
    return re.sub(r"\]\((\.\./)+CONTRIBUTING\.md", "](contributing.md", markdown)


def command_reference() -> str:
    """Return a Markdown page with every command, argument and option of the command line."""
    lines = [
        "# Commands",
        "",
        "Every command with its arguments and options, generated from the program itself. "
        "`facetrain COMMAND --help` prints the same.",
    ]
    for words, command in commands(typer.main.get_command(app), ("facetrain",)):
        lines += ["", f"## {' '.join(words)}", "", *_description(command)]
        if not hasattr(command, "commands"):
            lines += ["", f"    {' '.join(words)} {' '.join(_usage(command))}"]
        lines += _parameters(command)
    return "\n".join(lines) + "\n"


def commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (words, Click command) for a command and, if it is a group, for those in it."""
    yield words, command
    for name in command.list_commands(None) if hasattr(command, "commands") else ():
        yield from commands(command.get_command(None, name), (*words, name))


def _description(command: Any) -> list[str]:
    return [_escape(line) for line in command.help.splitlines()]


def _usage(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield _argument(parameter)
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.required:
            yield f"{parameter.opts[0]} {_value(parameter)}"
    yield "[OPTIONS]"


def _parameters(command: Any) -> Iterator[str]:
    shown = [parameter for parameter in command.params if not parameter.hidden]
    if not shown:
        return
    yield from ("", "| argument or option | description | default |", "|---|---|---|")
    for parameter in shown:
        text = _escape(" ".join((parameter.help or "").split()))
        yield f"| {_name(parameter)} | {text} | {_default(parameter)} |"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names = [_argument(parameter)]
    elif parameter.is_flag:
        names = [*parameter.opts, *parameter.secondary_opts]
    else:
        names = [f"{each} {_value(parameter)}" for each in parameter.opts]
    return ", ".join(f"`{name}`" for name in names)


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper() + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _value(parameter: Any) -> str:
    """Return the placeholder of an option's value: the one that it declares, its choices, or the name of its type."""
    if parameter.metavar:
        return str(parameter.metavar).strip("[]") if "|" in parameter.metavar else str(parameter.metavar)
    kind = parameter.type_descriptor.annotation
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    kind = next(iter(get_args(kind)), kind)  # list[str] and str | None: str
    return _PLACEHOLDERS[kind]


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.default is True:
        return f"`{parameter.opts[0]}`"
    return "" if parameter.default is None or parameter.default is False else f"`{parameter.default}`"


def _escape(text: str) -> str:
    """Return text in which |, *, _, < and [ have no meaning in Markdown, outside of `code`."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([|*_<\[])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
