"""Options and arguments that several `facetrain data` commands share, and their printed results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.options import Detector, Json, local_file
from facetrain.cli.outputs import echo_line
from facetrain.cli.progress_bar import progress_bar
from facetrain.data.beside_dataset import SKIPPED_TABLE
from facetrain.data.images.header import MAX_PIXELS
from facetrain.errors import UsageError
from facetrain.files import unfinished
from facetrain.telemetry.log import warn
from facetrain.text import count_text, images_text

if TYPE_CHECKING:
    from facetrain.data.skipped_files import SkippedFile
    from facetrain.data.tools.landmark_finder import LandmarkFinder
    from facetrain.data.tools.selection import Selection
    from facetrain.data.tools.writing import WrittenDataset

_SHOWN_NAMES = 10
"""Names of images that a list on the console has at most."""
Dataset = Annotated[
    Path,
    typer.Argument(
        metavar="DATASET",
        parser=local_file,
        help="Dataset: a folder with train.rec, a folder per identity, shards, or a mixture's YAML.",
    ),
]


def _warn_of_unfinished(output: Path) -> Path:
    for path in unfinished(output):
        warn(f"{path}: unfinished output of a command that was killed or still runs; remove it if none runs")
    return output


Output = Annotated[
    Path,
    typer.Option(callback=_warn_of_unfinished, help="Folder to write the dataset to; it must not exist."),
]
# At most the largest square image that facetrain decodes.
IMAGE_SIZE = typer.Option(
    min=16, max=math.isqrt(MAX_PIXELS), help="Width and height of the written images, in pixels."
)
SEED = typer.Option(min=0, help="Seed of the random numbers.")
Seed = Annotated[int, SEED]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Threads or processes; the default is one per usable core."),
]


@dataclass(frozen=True)
class Writing:
    """Output of a command that writes a dataset."""

    output: Output
    workers: Workers = None
    as_json: Json = False

    def write(self, title: str, selection: Selection, dataset: Path, to: str = "recordio") -> WrittenDataset:
        """Write a dataset with a progress bar, and print its size, and whether labels differ from those of `dataset`.

        `dataset` is the one that is copied whole, of several the first.
        """
        from facetrain.data.tools.writing import write_dataset

        with progress_bar(title) as progress:
            written = write_dataset(selection, self.output, to=to, workers=self.workers, progress=progress)
        print_written([written], self.as_json)
        if self.as_json:
            return written
        if written.empty_identities:
            echo_line(f"  identities without images: {written.empty_identities:,}, left out")
        other = "" if selection.keeps_labels else "the labels after them are renumbered"
        if written.is_reordered:
            other = "a folder per identity is numbered by its name, which is another order"
        if other:
            echo_line(
                f"  {other}, so that a run on {dataset} cannot continue on {self.output}, nor another one "
                "start from its centers"
            )
        return written


def print_written(written: Sequence[WrittenDataset], as_json: bool = False, **facts: Any) -> None:
    """Print the datasets that a command wrote: a line for each, or JSON with further facts."""
    if as_json:
        results = [json_facts(dataset) | facts for dataset in written]
        typer.echo(json.dumps(results[0] if len(results) == 1 else results))
        return
    for dataset in written:
        echo_line(f"{dataset.folder}: {images_text(dataset.images, dataset.identities)}")
        if dataset.lost_identities:
            echo_lost(dataset.lost_identities)
    # The parts of a split dataset have left out the same files and settings.
    if skipped := next((dataset.skipped for dataset in written), []):
        echo_left_out(skipped, f", see {Path(written[0].folder) / SKIPPED_TABLE}")
    if settings := next((dataset.mixture_settings for dataset in written), ()):
        echo_line(
            f"  settings of the mixture, left out: {', '.join(settings)}; to keep them, train on the mixture"
        )


def echo_lost(identities: Sequence[str]) -> None:
    """Print the identities of which a copy has no image."""
    count = count_text(len(identities), "identity", "identities")
    echo_line(f"  all images of {count} were left out: {first_names(identities)}")


def echo_left_out(skipped: Sequence[SkippedFile], where: str) -> None:
    """Print how many files were left out and where they are listed, and the reasons with examples."""
    from facetrain.data.skipped_files import skipped_count, skipped_summary

    echo_line(f"  left out {skipped_count(skipped)}{where}:")
    for line in skipped_summary(skipped):
        echo_line(f"    {line}")


def json_facts(dataset: WrittenDataset) -> dict[str, Any]:
    """Return a written dataset as JSON values."""
    return vars(dataset) | {"skipped": [file._asdict() for file in dataset.skipped]}


@dataclass(frozen=True)
class FaceLandmarks:
    """Source of the landmarks of faces: a file or a detector."""

    landmarks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV file with the landmarks of each image, in pixels or in fractions of its sides: lines "
            "name,x1,y1,…,x5,y5.",
        ),
    ] = None
    detector: Detector = None

    def finder(self, *, center_crop: bool = False) -> LandmarkFinder | None:
        """Return the function that finds landmarks; None if neither option is given.

        Raises:
            UsageError: both options are given.
            DataError: the file or the model cannot be read.
        """
        if self.landmarks is not None and self.detector is not None:
            raise UsageError("--landmarks and --detector cannot be combined; give one of them")
        from facetrain.data.tools.landmark_table import read_landmark_table
        from facetrain.data.tools.yunet import YuNet

        if self.landmarks is not None:
            return read_landmark_table(self.landmarks)
        return YuNet(self.detector, center_crop=center_crop) if self.detector is not None else None


def detections(finder: LandmarkFinder | None) -> dict[str, object]:
    """Return what a detector reports, for JSON: images that needed a second attempt, and images with several faces."""
    return {
        "fallbacks": getattr(finder, "fallbacks", {}),
        "several_faces": getattr(finder, "several_faces", {}),
    }


def print_detections(finder: LandmarkFinder | None) -> None:
    """Print the images in which a detector may have found the wrong face or none."""
    fallbacks: dict[str, str] = getattr(finder, "fallbacks", {})
    several_faces: dict[str, int] = getattr(finder, "several_faces", {})
    if fallbacks:
        echo_line(
            f"  no face detected at first in {count_text(len(fallbacks), 'image')} (--json lists all): "
            f"{first_names(sorted(fallbacks))}"
        )
    if several_faces:
        echo_line(
            f"  several faces of similar size in {count_text(len(several_faces), 'image')}, of which the largest one "
            f"near the center was taken (--json lists all): {first_names(sorted(several_faces))}"
        )


def first_names(names: Iterable[str]) -> str:
    """Return the first names of a list, for one line of the console."""
    shown = list(islice(names, _SHOWN_NAMES + 1))
    return ", ".join(shown[:_SHOWN_NAMES]) + (", …" if len(shown) > _SHOWN_NAMES else "")
