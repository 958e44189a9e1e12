"""Verification sets of decoded pixels, as recent trainers prepare them; read without pickle.

SOTA-Face-Recognition-Train-and-Test: `NAME/NAME.npy`, uint8 (N, 3, H, W) in RGB, and `NAME/issame.txt`.

AdaFace and InsightFace_Pytorch: `NAME/memfile/mem_file.dat`, float32 (N, 3, H, W) from −1 to 1 in BGR, its shape in
`mem_file.dat.conf` beside it, and the labels in `NAME_list.npy` beside the folder `NAME`.

The pixels are encoded as PNG, without loss.
"""

# N images, two per pair   P pairs   H W height and width

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import cv2
import numpy as np

from facetrain.cpu_cores import usable_cores
from facetrain.data.npy_file import map_npy
from facetrain.errors import PairsError
from facetrain.files import error_reason

_CHANNELS = 3
_MAX_SIDE = 4096
"""Largest height and width in pixels that is read."""
_MAX_CONF_BYTES = 4096
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
    if _npy_path(folder).is_file():
        path, labels_path = _npy_path(folder), folder / "issame.txt"
        pixel_NCHW = _read_npy(path)
        same_P = _text_labels(labels_path, images=pixel_NCHW.shape[0] if pixel_NCHW.ndim else 0)
    else:
        path, labels_path = _memory_path(folder), folder.with_name(f"{folder.name}_list.npy")
        pixel_NCHW = _read_memory_file(path)
        same_P = _boolean(_read_npy(labels_path), labels_path)
    shape = pixel_NCHW.shape
    if pixel_NCHW.ndim != 4 or shape[1] != _CHANNELS or not 0 < min(shape[2:]) <= max(shape[2:]) <= _MAX_SIDE:
        raise PairsError(
            f"{path}: an array of shape {shape}; expected images of shape (N, {_CHANNELS}, H, W)"
        )
    if len(same_P) == 0 or shape[0] != 2 * len(same_P):
        raise PairsError(
            f"{path}: {shape[0]:,} images for {len(same_P):,} pairs in {labels_path}; expected two for each pair"
        )
    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(lambda number: _encode(pixel_NCHW[number], path), range(shape[0]))), same_P


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


def _read_npy(path: Path) -> np.ndarray:
    try:
        array = map_npy(path)
    except (OSError, ValueError) as error:
        raise PairsError(f"{path}: not an array ({error_reason(error)})") from error
    if array.ndim > 1 and array.dtype != np.uint8:
        raise PairsError(f"{path}: not an array of uint8 images or of labels")
    return array


def _read_memory_file(path: Path) -> np.ndarray:
    """Map the file that `mem_file.dat.conf` describes: JSON with shape and dtype."""
    description = path.with_name(f"{path.name}.conf")
    try:
        with description.open(encoding="utf-8") as file:
            content = json.loads(file.read(_MAX_CONF_BYTES))
        shape, dtype = content["shape"], content["dtype"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PairsError(
            f"{description}: expected JSON with shape and dtype ({error_reason(error)})"
        ) from error
    valid = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if not valid or dtype != "float32":
        raise PairsError(f"{description}: shape {shape!r} and dtype {dtype!r}; expected float32 images")
    if path.stat().st_size != prod(shape) * np.dtype(np.float32).itemsize:
        raise PairsError(f"{path}: {path.stat().st_size:,} bytes are not an array of shape {tuple(shape)}")
    return np.memmap(path, np.float32, mode="r", shape=tuple(shape))


def _text_labels(path: Path, images: int) -> np.ndarray:
    try:
        if path.stat().st_size > images * _MAX_LABEL_BYTES:
            raise PairsError(f"{path}: too large for the labels of {images:,} images")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a file without labels, which is refused by their number
            return _boolean(np.loadtxt(path, ndmin=1), path)
    except (OSError, ValueError) as error:
        raise PairsError(f"{path}: expected a line 0 or 1 for each pair ({error_reason(error)})") from error


def _boolean(label_P: np.ndarray, path: Path) -> np.ndarray:
    if label_P.ndim != 1 or label_P.dtype.kind not in "bif" or not np.isin(label_P, (0, 1)).all():
        raise PairsError(f"{path}: expected 0 or 1 for each pair")
    return np.asarray(label_P, bool)
