"""Writer of training sets in InsightFace's layout: train.rec, train.idx, property."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from facetrain.data.formats.recordio import RecordHeader, RecordWriter


def write_identities(
    folder: Path, counts: Sequence[int], images: Iterable[tuple[int, bytes]], image_size: int
) -> None:
    """Write encoded images with their labels into a folder.

    Args:
        folder: output folder; created if it does not exist.
        counts: number of images of each identity. The identity records describe images sorted by label.
        images: (label, encoded image), as many as `counts` announces, in any order.
        image_size: side of the images in pixels, for `property`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    past = sum(counts) + 1
    starts = [1, *(1 + total for total in accumulate(counts))]
    with RecordWriter(folder / "train.rec") as writer:
        writer.write(0, RecordHeader(flag=2, labels=(float(past), float(past + len(counts)))), b"")
        for key, (label, image) in enumerate(images, start=1):
            writer.write(key, RecordHeader.of_image(label, key), image)
        for label in range(len(counts)):
            ranges = (float(starts[label]), float(starts[label + 1]))
            writer.write(past + label, RecordHeader(flag=2, labels=ranges), b"")
    (folder / "property").write_text(f"{len(counts)},{image_size},{image_size}\n", encoding="ascii")
