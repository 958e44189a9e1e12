"""Output of commands: lines with names in them, and files, checked before long work starts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import typer

from facetrain.distributed.process_lifetime import is_first_rank
from facetrain.errors import UsageError
from facetrain.files import os_errors_as, write_atomically, write_fault
from facetrain.text import printable

_SHEET_SUFFIX = ".html"


def leave_to_first_rank() -> None:
    """End the command on all ranks but the first: they have computed their share of the results, and one writes them.

    Raises:
        typer.Exit: this is another rank.
    """
    if not is_first_rank():
        raise typer.Exit


def require_writable(*files: Path | None) -> None:
    """Check that files can be written, each to another path; None is skipped.

    Raises:
        UsageError: the path is a folder, its folder does not exist, it may not be written, or it is given twice.
    """
    require_distinct(*files)
    for path in files:
        if path is None:
            continue
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}; create it or choose another path")
        if fault := write_fault(path if path.exists() else path.parent):
            raise UsageError(f"{path}: {fault}; choose another path")


def require_existing(*inputs: Path | None) -> None:
    """Check that inputs exist, before torch is imported, which takes seconds; None is skipped.

    Raises:
        UsageError: one does not.
    """
    for path in inputs:
        if path is not None and not path.exists():
            # Names of the catalog look like identifiers; a misspelled one is taken for a path.
            names = ", and no name that `facetrain get` lists" if str(path).isidentifier() else ""
            raise UsageError(f"{path}: no such file or folder{names}")


def require_distinct(*paths: Path | None) -> None:
    """Check that no two outputs of a command have one path; None is skipped.

    Raises:
        UsageError: two have.
    """
    seen = set()
    for path in paths:
        if path is None:
            continue
        # Not Path.resolve: it fails for a loop of symbolic links.
        place = os.path.realpath(path)
        if place in seen:
            raise UsageError(
                f"{path}: is given for two outputs, and the second would replace the first; rename one"
            )
        seen.add(place)


def require_no_input(inputs: Iterable[Path | None], *outputs: Path | None) -> None:
    """Check that no output of a command replaces one of its inputs; None is skipped.

    Raises:
        UsageError: one does.
    """
    places = {os.path.realpath(place) for path in inputs if path is not None for place in _places_of(path)}
    for path in outputs:
        if path is not None and os.path.realpath(path) in places:
            raise UsageError(
                f"{path}: is an input of the command, which the result would replace; choose another path"
            )


def _places_of(path: Path) -> list[Path]:
    """Return an input and, for a run folder, the model in it."""
    if not path.is_dir():
        return [path]
    from facetrain.models.model_file import MODEL_FILE  # imports torch

    return [path, path / MODEL_FILE]


def require_sheet(path: Path | None) -> None:
    """Check that a contact sheet can be written, and that its name has the suffix of a page; None is skipped.

    Raises:
        UsageError: the suffix is another one, or the file cannot be written.
    """
    if path is not None and path.suffix.lower() != _SHEET_SUFFIX:
        raise UsageError(f"{path}: a contact sheet is an .html file; change the suffix")
    require_writable(path)


def write_text(path: Path, text: str) -> None:
    """Write a small output file.

    Raises:
        UsageError: the file cannot be written.
        RunError: the disk is full.
    """
    with os_errors_as(UsageError, path):
        if path.exists():  # in place: it may be a pipe, or in a folder that is not writable
            path.write_text(text, encoding="utf-8")
        else:
            write_atomically(path, text)


def echo_line(line: str, *, err: bool = False) -> None:
    """Print a line, to standard error with `err`. Control characters are escaped: it may have names of files."""
    typer.echo(printable(line), err=err)
