"""Command lines in documents and recipes, checked without running them."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from facetrain.cli.app import app
from facetrain.config.schema import Config
from scripts.config_docs import all_keys

CONFIG_KEYS = set(all_keys(Config))


def complaint(words: Sequence[str], *, complete: bool) -> str | None:
    """Return the reason why a command line cannot be right, or None. `complete`: required options must be there."""
    command = typer.main.get_command(app)
    words = [word for word in words if word != "--debug"]
    while words and hasattr(command, "commands"):
        if words[0].startswith("--") or (not complete and words[0].isupper()):
            break
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command, words = command.get_command(None, words[0]), words[1:]
    if hasattr(command, "commands"):
        return None
    context = command.context_class(command, info_name="facetrain")
    try:
        values, rest, _ = command.make_parser(context).parse_args(list(words))
    except Exception as error:  # Typer's usage errors have no public base class
        return str(error)
    if rest:
        return f"unexpected {rest}"
    missing = [each.name for each in command.params if each.required and not values.get(each.name)]
    if complete and missing and "--help" not in words:
        return f"{missing} missing"
    return next((f"no key {key}" for key in keys_set_by(words) if key not in CONFIG_KEYS), None)


def keys_set_by(words: Sequence[str]) -> list[str]:
    """Return the config keys of the options --set."""
    return [value.split("=")[0] for option, value in zip(words, words[1:], strict=False)
            if option == "--set" and "." in value]  # fmt: skip
