"""Command `facetrain get`: the catalog of models and datasets, and downloads."""

from __future__ import annotations

import json
import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.options import Json, download
from facetrain.cli.outputs import echo_line
from facetrain.errors import UsageError
from facetrain.files import make_folder, new_folder, os_errors_as, replacing, require_absent
from facetrain.text import count_text


def get(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name in the catalog, or an address. Default: list the catalog.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Also copy the file or folder here; it must not exist.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a model, detector or dataset, or list the catalog."""
    from facetrain.remote.address import is_remote
    from facetrain.remote.catalog import catalog

    if name is None and output is not None:
        raise UsageError(
            f"--output {output}: give the name of what to download too; `facetrain get` lists it"
        )
    if name is None:
        entries = [asdict(entry) for entry in catalog().values()]
        typer.echo(json.dumps(entries, indent=1, default=str) if as_json else _table())
        return
    entry = catalog().get(name)
    if entry is None and not is_remote(name):
        raise UsageError(
            f"{name}: not in the catalog, which `facetrain get` lists; give a name of it, or an address such as hf://org/repo"
        )
    require_absent(output)
    path, address = download(name)
    if output is not None:
        with os_errors_as(UsageError, output):
            if path.is_dir():
                with new_folder(output) as scratch:
                    shutil.copytree(path, scratch, dirs_exist_ok=True)
            else:
                make_folder(output.parent)
                with replacing(output) as scratch:
                    shutil.copyfile(path, scratch)
        path = output
    if as_json:
        typer.echo(json.dumps({"path": str(path), "address": address}))
        return
    echo_line(str(path))
    if entry and entry.ask:
        echo_line(f"next: {entry.ask}")


def _table() -> str:
    """Return the catalog as text: a line of numbers for each entry, and below it what it is and its state."""
    from facetrain.remote.catalog import catalog

    lines = []
    for entry in catalog().values():
        size = f"{entry.bytes / 1e6:,.1f} MB" if entry.bytes else ""
        people = count_text(entry.people, "person", "people") if entry.people else ""
        images = count_text(entry.images, "image") if entry.images else ""
        facts = ", ".join(filter(None, (entry.kind, size, people, images)))
        mark = " " if entry.address else "-"
        lines += _wrapped(f"{mark} {entry.name:24}", f"{entry.about} ({facts})")
        lines += _wrapped("", f"{entry.advice()}; terms: {entry.terms}")
    return "\n".join([*lines, "", "- cannot be downloaded by its name. To download: facetrain get NAME"])


def _wrapped(first: str, text: str) -> list[str]:
    """Return the lines of a text below each other in the second column, the first one after `first`."""
    margin, columns = " " * 26, min(shutil.get_terminal_size().columns, 120)
    # An address or a command stays in one piece, to be copied.
    return textwrap.wrap(
        text, max(columns, 60), initial_indent=f"{first:26}", subsequent_indent=margin, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
