"""`facetrain data merge | split | convert`: new datasets from existing ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from facetrain.cli.data.dataset_options import Dataset, Seed, Writing, print_written
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import local_file
from facetrain.cli.outputs import echo_line
from facetrain.cli.progress_bar import progress_bar
from facetrain.errors import UsageError
from facetrain.text import count_text


@option_groups
def merge(
    datasets: Annotated[
        list[Path], typer.Argument(metavar="DATASET", parser=local_file, help="Two or more datasets.")
    ],
    writing: Writing,
) -> None:
    """Write several datasets as one.

    Identities of different datasets stay different.
    """
    from facetrain.data.tools.selection import select_merged

    if len(datasets) < 2:
        raise UsageError(
            f"{datasets[0]}: merge needs two or more datasets; to copy one, use `facetrain data pack`"
        )
    written = writing.write("merging", select_merged(datasets), datasets[0])
    if written.without_landmarks and not writing.as_json:
        echo_line(
            f"  landmarks are left out, because {', '.join(written.without_landmarks)} has none; "
            "`facetrain data landmarks` can write them"
        )


@option_groups
def split(
    dataset: Dataset,
    writing: Writing,
    validation: Annotated[float, typer.Option(help="Share of the identities for validation.")] = 0.1,
    seed: Seed = 0,
) -> None:
    """Split a dataset by identities into training and validation.

    OUTPUT/train and OUTPUT/validation have no identity in common.
    """
    import numpy as np

    from facetrain.data.pair_folds import FOLDS
    from facetrain.data.tools.sample_pairs import needed_share
    from facetrain.data.tools.selection import select_parts
    from facetrain.data.tools.writing import write_parts

    parts = select_parts(dataset, validation=validation, seed=seed)
    with progress_bar("splitting") as progress:
        written = write_parts(parts, writing.output, workers=writing.workers, progress=progress)
    print_written(written, writing.as_json)
    _, counts = np.unique(parts["validation"].label, return_counts=True)
    eligible = int((counts > 1).sum())
    if 0 < eligible < 2 * FOLDS and not writing.as_json:
        share = needed_share(len(counts), eligible, len(counts) + written[0].identities)
        found = count_text(eligible, "identity for validation has", "identities for validation have")
        echo_line(
            f"  {found} two images or more; `facetrain data pairs` needs {2 * FOLDS}: split with --validation {share}"
        )


@option_groups
def convert(
    dataset: Dataset,
    writing: Writing,
    to: Annotated[
        Literal["recordio", "webdataset", "parquet", "folder"],
        typer.Option(help="Format to write."),
    ],
) -> None:
    """Write a dataset in another format.

    Bytes and names stay the same, and the order except in folders; labels lose their gaps.
    """
    from facetrain.data.tools.selection import select_all

    writing.write("converting", select_all(dataset), dataset, to)
