"""Options that say where the landmarks of faces come from, and the printed summary of a detector."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.outputs import echo_line
from facetrain.errors import UsageError

if TYPE_CHECKING:
    from facetrain.data.tools.landmarks import LandmarkFinder

_SHOWN_NAMES = 10
"""Names of images that a list on the console has at most."""


@dataclass(frozen=True)
class FaceLandmarks:
    """Source of the landmarks of faces: a file or a detector."""

    landmarks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the landmarks of each image in pixels: JSON, or CSV with lines name,x1,y1,…,x5,y5.",
        ),
    ] = None
    detector: Annotated[
        Path | None,
        typer.Option(
            metavar="ONNX", help="Model file of OpenCV's detector YuNet, which then finds the landmarks."
        ),
    ] = None

    def finder(self, *, center_crop: bool = False) -> LandmarkFinder | None:
        """Return the function that finds landmarks; None if neither option is given.

        Raises:
            UsageError: both options are given.
            DataError: the file or the model cannot be read.
        """
        if self.landmarks is not None and self.detector is not None:
            raise UsageError("--landmarks and --detector cannot be combined; give one of them")
        from facetrain.data.tools.landmarks import YuNet, read_landmarks

        if self.landmarks is not None:
            return read_landmarks(self.landmarks)
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
        # All of them: they are few, or the detector is wrong.
        echo_line(f"  no face detected at first in {len(fallbacks):,} images:")
        for name, fallback in sorted(fallbacks.items()):
            echo_line(f"    {name}: {fallback}")
    if several_faces:
        echo_line(
            f"  several faces of similar size in {len(several_faces):,} images, of which the one nearest the center "
            f"was taken (--json lists all): {first_names(sorted(several_faces))}"
        )


def first_names(names: Iterable[str]) -> str:
    """Return the first names of a list, for one line of the console."""
    shown = list(islice(names, _SHOWN_NAMES + 1))
    return ", ".join(shown[:_SHOWN_NAMES]) + (", …" if len(shown) > _SHOWN_NAMES else "")
