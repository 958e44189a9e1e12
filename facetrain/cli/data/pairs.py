"""`facetrain data pairs`: verification sets, from pair lists, from other sets and from datasets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.data.dataset_options import (
    IMAGE_SIZE,
    FaceLandmarks,
    Workers,
    detections,
    print_detections,
)
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import Json, local_file
from facetrain.cli.outputs import echo_line, require_writable
from facetrain.cli.progress_bar import progress_bar
from facetrain.errors import UsageError
from facetrain.text import count_text

# None in the options: one that is given where it has no effect is refused.
_IMAGE_SIZE, _COUNT, _SEED = 112, 6000, 0


@dataclass(frozen=True)
class ListedImages(FaceLandmarks):
    """Images of a pair list, and their alignment."""

    images: Annotated[Path | None, typer.Option(help="Folder of the images of a pair list.")] = None
    image_size: Annotated[
        int | None,
        typer.Option(
            min=IMAGE_SIZE.min,
            max=IMAGE_SIZE.max,
            help="Width and height of the images that --landmarks or --detector align, in pixels; by default "
            f"{_IMAGE_SIZE}.",
        ),
    ] = None


@dataclass(frozen=True)
class PairWriting:
    """Pairs that are written, and where."""

    output: Annotated[Path, typer.Option(help="The .bin file to write.")]
    count: Annotated[
        int | None,
        typer.Option(
            min=20,
            max=10_000_000,
            help=f"Pairs to sample from a dataset, a multiple of 20; by default {_COUNT}.",
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(min=0, help=f"Seed of the pairs from a dataset; by default {_SEED}.")
    ] = None
    workers: Workers = None


@option_groups
def pairs(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            parser=local_file,
            help="Pair list in the form of LFW, CALFW, CPLFW, AgeDB, MLFW or CFP; a folder with RFW's four .bin; a "
            ".bin set; or a dataset to sample pairs from.",
        ),
    ],
    listed: ListedImages,
    writing: PairWriting,
    reduce_to: Annotated[
        int | None,
        typer.Option(
            min=4,
            metavar="PIXELS",
            help="With a .bin set, shrink its images to this width and height, for an evaluation on small faces.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a verification set (.bin).

    From a pair list and its images, from other sets, or from the identities of a dataset.
    """
    from facetrain.data.formats.set_names import is_bin
    from facetrain.data.tools.pair_sources import (
        bin_pairs,
        find_group_bins,
        group_bin_pairs,
        is_pair_list,
        list_pairs,
    )
    from facetrain.data.tools.pair_writer import require_new_set, write_pairs
    from facetrain.data.tools.sample_pairs import sample_pairs
    from facetrain.telemetry.log import warn

    finder, output = listed.finder(center_crop=True), writing.output
    is_list = is_pair_list(source, listed.images)
    groups = {} if is_list else find_group_bins(source)
    if finder is not None and not is_list:
        raise UsageError(
            "--landmarks and --detector need a pair list; to align a dataset, use `facetrain data pack`"
        )
    if listed.image_size is not None and finder is None:
        raise UsageError(
            "--image-size needs --landmarks or --detector; images that are not aligned keep their size"
        )
    for option, value in (("--count", writing.count), ("--seed", writing.seed)):
        if value is not None and (is_list or groups or is_bin(source)):
            raise UsageError(f"{option} needs a dataset to sample pairs from; {source} has its own pairs")
    if reduce_to is not None and not is_bin(source):
        raise UsageError(
            "--reduce-to needs a .bin set; write it first without --reduce-to, then reduce the .bin"
        )
    if output.suffix != ".bin":
        raise UsageError(f"{output}: a verification set is a .bin file; change the suffix")
    require_new_set(output)
    require_writable(output)
    if is_list:
        selected = list_pairs(
            source, listed.images, landmarks=finder, image_size=listed.image_size or _IMAGE_SIZE
        )
    elif groups:
        selected = group_bin_pairs(source)
    elif is_bin(source):
        selected = bin_pairs(source, reduce_to=reduce_to)
    else:
        selected = sample_pairs(source, writing.count or _COUNT, seed=writing.seed or _SEED)
    with progress_bar("reading images") as progress:
        write_pairs(selected, output, workers=writing.workers, progress=progress)
    if selected.remark:
        warn(selected.remark)
    count, same = len(selected.same), sum(selected.same)
    if as_json:
        facts = {"output": str(output), "pairs": count, "same": same}
        typer.echo(json.dumps(facts | detections(finder)))
        return
    echo_line(f"{output}: {count_text(count, 'pair')}, {same:,} of one person")
    print_detections(finder)
