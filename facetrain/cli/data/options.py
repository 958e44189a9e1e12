"""What the options of several `facetrain data` commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
Dataset = Annotated[
    Path, typer.Argument(help="A dataset: records, a folder per identity, shards, or a mixture's YAML.")
]
Output = Annotated[Path, typer.Option(help="Folder to write; it must not be there yet.")]
Seed = Annotated[int, typer.Option(min=0, help="Another seed chooses otherwise.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Threads; by default one per core.")]
