"""A list of pairs and a folder of pictures → a .bin verification set."""

from __future__ import annotations

from pathlib import Path

from facetrain.data.align import align
from facetrain.data.bin import write_bin
from facetrain.data.decode import decode_rgb, encode_jpeg
from facetrain.data.tools.landmarks import Finder
from facetrain.data.tools.pair_lists import read_pairs
from facetrain.data.tools.work import Progress, counted, in_order, silent
from facetrain.errors import PairsError

_QUALITY = 95


def build_pairs(
    list_path: Path,
    images: Path | None,
    output: Path,
    *,
    landmarks: Finder | None = None,
    image_size: int = 112,
    workers: int | None = None,
    progress: Progress = silent,
) -> tuple[int, int]:
    """Write the pairs of a list, in its order; return how many there are, and how many of one person.

    Pictures keep their bytes, or are cut out of `image_size` pixels a side by their landmarks; their names
    are their paths below `images` (for CFP without `images`, person/pose/picture).

    Raises:
        PairsError: the list cannot be followed, or a picture is missing or has no landmarks.
    """
    pairs = read_pairs(list_path, images)
    paths = [path for pair in pairs for path in (pair.first, pair.second)]

    def picture(number: int) -> bytes:
        path = paths[number]
        data = path.read_bytes()
        if landmarks is None:
            return data
        name = path.relative_to(images).as_posix() if images is not None else "/".join(path.parts[-3:])
        image = decode_rgb(data, where=str(path))
        points = landmarks(name, image)
        if points is None:
            raise PairsError(f"{path}: no landmarks of a face ({name})")
        return encode_jpeg(align(image, points, image_size), _QUALITY)

    pictures = counted(in_order(picture, range(len(paths)), workers), len(paths), progress)
    same = [pair.same for pair in pairs]
    write_bin(output, pictures, same)
    return len(same), sum(same)
