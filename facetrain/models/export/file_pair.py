"""Two files of one network, a graph and its weights, that appear together."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from facetrain.errors import RunError
from facetrain.files import os_errors_as, sync_file, sync_folder


@contextmanager
def new_file_pair(graph: Path, weights: Path) -> Iterator[Path]:
    """Yield a temporary folder; its files of these names move beside each other when the block ends without an error.

    Older files are replaced, other files in the folder are removed. After a crash there are both new files, both old
    ones, or no graph, so that a program never opens a graph with the weights of another.

    Raises:
        RunError: the operating system refuses.
    """
    with (
        os_errors_as(RunError, graph),
        tempfile.TemporaryDirectory(prefix=f".{graph.name}.", dir=graph.parent) as name,
    ):
        folder = Path(name)
        yield folder
        for path in (weights, graph):
            with (folder / path.name).open("rb") as file:
                sync_file(file.fileno(), path)
        graph.unlink(missing_ok=True)
        for path in (weights, graph):
            os.replace(folder / path.name, path)
            sync_folder(path.parent)
