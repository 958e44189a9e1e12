"""Export of a network to files, which appear complete and compared with the network, or not at all."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from facetrain.errors import RunError
from facetrain.files import error_reason, sync_file, sync_folder
from facetrain.models.export.checks import compare, require_exportable
from facetrain.models.export.formats import FORMATS, Exported, ExportOptions
from facetrain.models.export.runtime import Writer, runtime_model
from facetrain.models.model_file import EmbeddingModel


def export(model: EmbeddingModel, format: str, path: Path, options: ExportOptions) -> Exported:
    """Write a network to a file of a format, a row of `FORMATS`, and perhaps to a second one beside it.

    The file appears after its embeddings have been compared with the embeddings of the network.

    Raises:
        ModelError: the network was opened from an ONNX file or has diverged, or the format cannot store it.
        RunError: the files cannot be written, or their embeddings differ too much.
    """
    row = FORMATS[format]
    write: Writer = row.load()
    require_exportable(model)
    comparison = None
    with _new_files(row.files(path)) as folder:
        with _quiet():
            runtime = write(model, folder / path.name, options)
        if runtime is not None:
            comparison = compare(path, runtime, model, options)
    return Exported(
        [file for file in row.files(path) if file.exists()],
        path if runtime is None else runtime_model(model, runtime, options),
        comparison,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and logs of other programs, which advise on deprecated parts and other tools.

    A failed conversion ends with an error of one line, and not with the traceback that they log.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _new_files(files: Sequence[Path]) -> Iterator[Path]:
    """Yield a temporary folder; its files of these names move beside each other when the block ends without an error.

    The first file is needed, the others belong to it: older ones are replaced or removed. After a crash there are all
    new files, all old ones, or no first one, so that a program never opens a graph with the weights of another.

    Raises:
        RunError: the operating system refuses.
    """
    first, *others = files
    try:
        with tempfile.TemporaryDirectory(prefix=f".{first.name}.", dir=first.parent) as name:
            folder = Path(name)
            yield folder
            for file in folder.iterdir():
                with file.open("rb") as opened:
                    sync_file(opened.fileno(), file)
            # First the old first file goes: a crash now leaves no graph that opens the weights of another.
            if others:
                first.unlink(missing_ok=True)
            for file in (*others, first):
                if (folder / file.name).exists():
                    os.replace(folder / file.name, file)
                else:
                    file.unlink(missing_ok=True)
            sync_folder(first.parent)
    except OSError as error:  # it may name the temporary folder, which the user has not given
        raise RunError(f"{first}: {error_reason(error)}") from error
