"""Normalization of uint8 images to [-1, 1]."""

# B local batch   H height   W width

from __future__ import annotations

import weakref

import cv2
import numpy as np
import torch
from torch import Tensor

_IMAGES_IN_CACHE = 2
"""Float32 images of 112 × 112 that fit into a core's level-2 cache with room to spare."""
_BUFFERS_KEPT = 4


class BufferPool:
    """Arrays that are reused as soon as the caller drops the last reference to them.

    New memory costs more than the work on it: the operating system clears every page, and takes it back when
    the batch is freed.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def array(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return an uninitialized array of float32; it belongs to the caller until the last reference to it is gone."""
        free = (buffer for buffer, view in self._buffers if view() is None and buffer.shape == shape)
        buffer = next(free, None)
        if buffer is None:
            buffer = np.empty(shape, np.float32)
        view = buffer[...]
        others = [(other, reference) for other, reference in self._buffers if other is not buffer]
        self._buffers = [*others[1 - _BUFFERS_KEPT :], (buffer, weakref.ref(view))]
        return view


def normalize(image_BHWC: Tensor, flip_B: Tensor | None = None, buffers: BufferPool | None = None) -> Tensor:
    """Convert images from uint8 (B, H, W, 3) to float32 (B, 3, H, W) in [-1, 1], channels_last.

    Computes (x - 127.5) / 127.5, as arcface_torch does.

    Args:
        image_BHWC: images on any device.
        flip_B: bool (B,) on the host, the images to mirror; None: no image.
        buffers: memory for the result on the CPU; None: new memory.
    """
    if image_BHWC.device.type == "cpu":
        return _normalize_on_cpu(image_BHWC, flip_B, buffers or BufferPool())
    if flip_B is not None:
        flip_B = flip_B.to(image_BHWC.device, non_blocking=True)
        image_BHWC = torch.where(flip_B[:, None, None, None], image_BHWC.flip(2), image_BHWC)
    return image_BHWC.permute(0, 3, 1, 2).float().sub_(127.5).mul_(1 / 127.5)


def _normalize_on_cpu(image_BHWC: Tensor, flip_B: Tensor | None, buffers: BufferPool) -> Tensor:
    # A few images at a time, so that every pass finds the result of the previous one in the cache. NumPy
    # and cv2, not torch: torch's threads would compete with the reading processes for the cores, and cv2
    # mirrors three-byte pixels twenty times faster.
    image = image_BHWC.numpy()
    out = buffers.array(image.shape)
    mirrored = np.empty(image.shape[1:], dtype=np.uint8)
    flips = flip_B.tolist() if flip_B is not None else [False] * len(out)
    for start in range(0, len(out), _IMAGES_IN_CACHE):
        part = out[start : start + _IMAGES_IN_CACHE]
        for row, target in enumerate(part, start):
            np.copyto(target, cv2.flip(image[row], 1, dst=mirrored) if flips[row] else image[row])
        np.subtract(part, np.float32(127.5), out=part)
        np.multiply(part, np.float32(1 / 127.5), out=part)
    return torch.from_numpy(out).permute(0, 3, 1, 2)
