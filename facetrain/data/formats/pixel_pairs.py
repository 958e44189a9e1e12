"""Verification sets of decoded pixels, as recent trainers prepare them; read without pickle.

SOTA-Face-Recognition-Train-and-Test: `NAME/NAME.npy`, uint8 (N, 3, H, W) in RGB, and `NAME/issame.txt`.

AdaFace and InsightFace_Pytorch: `NAME/memfile/mem_file.dat`, float32 (N, 3, H, W) from −1 to 1 in BGR, its shape in
`mem_file.dat.conf` beside it, and the labels in `NAME_list.npy` beside the folder `NAME`.

The pixels are encoded as PNG, without loss.
"""

# N images, two per pair   P pairs   H W height and width

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import cv2
import numpy as np

from facetrain.cpu_cores import usable_cores
from facetrain.data.npy_file import map_npy
from facetrain.errors import PairsError
from facetrain.files import error_reason, parse_json, read_regular_text

_CHANNELS = 3
_MAX_LABEL_BYTES = 32
"""Longest line of `issame.txt`, which NumPy may have written as 1.000000000000000000e+00."""
_PNG_LEVEL = [cv2.IMWRITE_PNG_COMPRESSION, 1]
"""The fastest compression: the images are encoded for one evaluation."""


def is_pixel_set(folder: Path) -> bool:
    """Return whether a folder has the files of one of the forms."""
    return _npy_path(folder).is_file() or _memory_path(folder).is_file()


def read_pixel_set(folder: Path) -> tuple[list[bytes], np.ndarray]:
    """Read a set of one of the forms.

    Returns:
        The images as PNG, two per pair, and whether each pair shows one person: bool (P,).

    Raises:
        PairsError: a file is missing or damaged, or their sizes contradict each other. No code of a file is run.
    """
    is_npy = _npy_path(folder).is_file()
    path = _npy_path(folder) if is_npy else _memory_path(folder)
    labels_path = folder / "issame.txt" if is_npy else folder.with_name(f"{folder.name}_list.npy")
    try:
        pixel_NCHW = map_npy(path) if is_npy else _read_memory_file(path)
        shape, dtype = pixel_NCHW.shape, np.uint8 if is_npy else np.float32
        if len(shape) != 4 or shape[1] != _CHANNELS or not prod(shape) or pixel_NCHW.dtype != dtype:
            raise ValueError(
                f"{pixel_NCHW.dtype} of shape {shape}; expected images of shape (N, {_CHANNELS}, H, W)"
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PairsError(f"{path}: not an array of images ({error_reason(error)})") from error
    try:
        label_P = _read_text(labels_path, shape[0]) if is_npy else map_npy(labels_path)
        if label_P.ndim != 1 or label_P.dtype.kind not in "bif" or not np.isin(label_P, (0, 1)).all():
            raise ValueError("expected 0 or 1 for each pair")
        if shape[0] != 2 * len(label_P):
            raise ValueError(f"{shape[0]:,} images for {len(label_P):,} pairs; expected two for each pair")
    except (OSError, ValueError) as error:
        raise PairsError(f"{labels_path}: not the labels of the set ({error_reason(error)})") from error
    with ThreadPoolExecutor(usable_cores()) as pool:
        images = pool.map(lambda number: _encode(pixel_NCHW[number], path), range(shape[0]))
        return list(images), np.asarray(label_P, bool)


def _npy_path(folder: Path) -> Path:
    return folder / f"{folder.name}.npy"


def _memory_path(folder: Path) -> Path:
    return folder / "memfile" / "mem_file.dat"


def _encode(pixel_CHW: np.ndarray, path: Path) -> bytes:
    """Return the PNG of one image: uint8 RGB, or float BGR from −1 to 1."""
    image = np.moveaxis(pixel_CHW, 0, 2)
    if image.dtype == np.uint8:
        bgr = image[:, :, ::-1]
    else:
        if not np.isfinite(image).all():
            raise PairsError(f"{path}: a pixel is not a finite number")
        bgr = np.rint((np.clip(image, -1, 1) * 0.5 + 0.5) * 255).astype(np.uint8)
    return bytes(cv2.imencode(".png", np.ascontiguousarray(bgr), _PNG_LEVEL)[1])


def _read_memory_file(path: Path) -> np.ndarray:
    """Map the file that `mem_file.dat.conf` describes: JSON with shape and dtype; NumPy compares the sizes.

    Raises:
        ValueError, KeyError, TypeError: the description is another one.
    """
    described = parse_json(read_regular_text(path.with_name(f"{path.name}.conf")))
    shape, dtype = described["shape"], described["dtype"]
    if not all(type(size) is int and size > 0 for size in shape) or dtype != "float32":
        raise ValueError(f"shape {shape!r} and dtype {dtype!r}; expected float32 images")
    if path.stat().st_size != prod(shape) * np.dtype(np.float32).itemsize:
        raise ValueError(f"{path.stat().st_size:,} bytes for the shape {tuple(shape)}")
    return np.memmap(path, np.float32, mode="r", shape=tuple(shape))


def _read_text(path: Path, images: int) -> np.ndarray:
    if path.stat().st_size > images * _MAX_LABEL_BYTES:
        raise ValueError(f"too large for the labels of {images:,} images")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a file without labels, which is refused by their number
        return np.loadtxt(path, ndmin=1)
