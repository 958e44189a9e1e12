"""What is done to images on the device, after they came there as uint8."""

# B local batch   C channels   H height   W width   S rows that an augmentation is drawn for

from __future__ import annotations

import weakref

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.counter_rng import key_of, uniform
from facetrain.data.jpeg_compression import recompress

# One number a purpose: adding an augmentation changes nothing of what the others draw.
_FLIP, _LOW, _LOW_SIZE, _BLUR, _SIGMA, _GRAY, _COLOR, _BRIGHT, _CONTRAST, _SATURATION = range(10)
_CROP, _CROP_SIZE, _CROP_X, _CROP_Y, _ERASE, _ERASE_W, _ERASE_H, _ERASE_X, _ERASE_Y = range(10, 19)
_JPEG, _QUALITY = range(19, 21)
_IN_CACHE = 2
"""Images of 112 × 112 that fit into a core's cache as float32, beside what else is there."""
_LUMA = (0.299, 0.587, 0.114)


def normalize(image_BHWC: Tensor, mirrored_B: Tensor | None = None, room: Room | None = None) -> Tensor:
    """Bring uint8 (B, H, W, 3) to float32 (B, 3, H, W) in [-1, 1], in channels_last memory.

    `mirrored_B`, bool on the host, says which images to mirror on the way. A value is (x - 127.5) / 127.5.
    On the CPU the result lies in `room`, if there is one.
    """
    if image_BHWC.device.type == "cpu":
        return _normalize_in_cache(image_BHWC, mirrored_B, room or Room())
    if mirrored_B is not None:
        mirrored_B = mirrored_B.to(image_BHWC.device, non_blocking=True)
        image_BHWC = torch.where(mirrored_B[:, None, None, None], image_BHWC.flip(2), image_BHWC)
    return image_BHWC.permute(0, 3, 1, 2).float().sub_(127.5).mul_(1 / 127.5)


def _normalize_in_cache(image_BHWC: Tensor, mirrored_B: Tensor | None, room: Room) -> Tensor:
    # A few images at a time, so that each pass finds what the one before it wrote in the cache. NumPy
    # and cv2, not torch: its threads would fight for the cores with the reading processes, and cv2
    # mirrors three-byte pixels twenty times faster.
    source = image_BHWC.numpy()
    out = room.array(source.shape, np.float32)
    turned = np.empty(source.shape[1:], dtype=np.uint8)
    mirrored = mirrored_B.tolist() if mirrored_B is not None else [False] * len(out)
    for start in range(0, len(out), _IN_CACHE):
        part = out[start : start + _IN_CACHE]
        for row, image in enumerate(part, start):
            np.copyto(image, cv2.flip(source[row], 1, dst=turned) if mirrored[row] else source[row])
        np.subtract(part, np.float32(127.5), out=part)
        np.multiply(part, np.float32(1 / 127.5), out=part)
    return torch.from_numpy(out).permute(0, 3, 1, 2)


class Augment:
    """Change each image with given probabilities, then normalize.

    What is drawn for an image depends on (seed, epoch, number of the image) alone, never on the
    batch or the rank it is in. It is drawn on the host, so that the device is not waited for. The
    augmentations beside the flip are those of arcface_torch's DALI reader, plus color, crop, JPEG
    and erasing.
    """

    def __init__(
        self,
        seed: int,
        *,
        flip: float = 0.5,
        low_resolution: float = 0.0,
        blur: float = 0.0,
        gray: float = 0.0,
        color: float = 0.0,
        crop: float = 0.0,
        erase: float = 0.0,
        jpeg: float = 0.0,
    ) -> None:
        self._seed, self._room = seed, Room()
        self._flip = flip
        self._others = [
            (probability, purpose, change)
            for probability, purpose, change in (
                (crop, _CROP, self._cut_out),
                (low_resolution, _LOW, self._lower_resolution),
                (blur, _BLUR, self._soften),
                (color, _COLOR, self._recolor),
                (gray, _GRAY, self._drain),
                (jpeg, _JPEG, self._recompress),
                (erase, _ERASE, self._cover),
            )
            if probability > 0
        ]

    def __call__(self, image_BHWC: Tensor, sample_B: Tensor, epoch: int) -> Tensor:
        """Return float32 (B, 3, H, W) in [-1, 1], channels_last, for uint8 images and their int64 numbers."""
        sample_B = sample_B.cpu()
        mirrored_B = self._draw(sample_B, epoch, _FLIP) < self._flip if self._flip else None
        image = normalize(image_BHWC, mirrored_B, self._room)
        for probability, purpose, change in self._others:
            drawn_S = (self._draw(sample_B, epoch, purpose) < probability).nonzero()[:, 0]
            if len(drawn_S):
                rows_S = drawn_S.to(image.device, non_blocking=True)
                image[rows_S] = change(image[rows_S], sample_B[drawn_S], epoch)
        return image.contiguous(memory_format=torch.channels_last)

    def _draw(self, sample_B: Tensor, epoch: int, purpose: int) -> Tensor:
        return uniform(sample_B, key_of(self._seed, epoch, purpose))

    def _between(
        self, low: float, high: float, image: Tensor, sample_S: Tensor, epoch: int, purpose: int
    ) -> Tensor:
        drawn = (low + (high - low) * self._draw(sample_S, epoch, purpose)).float()
        return drawn.to(image.device, non_blocking=True)[:, None, None, None]

    def _lower_resolution(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Shrink to 50, 60, 70 or 80 % and back."""
        level_S = (self._draw(sample_S, epoch, _LOW_SIZE) * 4).long()
        out = image.clone()
        for level in range(4):
            rows = (level_S == level).nonzero()[:, 0]
            if len(rows):
                rows = rows.to(image.device, non_blocking=True)
                small = F.interpolate(image[rows], scale_factor=0.5 + 0.1 * level, mode="area")
                out[rows] = F.interpolate(small, size=image.shape[2:], mode="bilinear", align_corners=False)
        return out

    def _soften(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Blur by a Gaussian of 0.5 to 2 pixels."""
        sigma = self._between(0.5, 2.0, image, sample_S, epoch, _SIGMA)[:, :, 0, 0]
        offset = torch.arange(-4, 5, device=image.device)
        kernel = torch.exp(-0.5 * (offset / sigma) ** 2)
        kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(3, 0)[:, None]
        flat = F.pad(image, (4, 4, 4, 4), mode="replicate").reshape(1, -1, *(n + 8 for n in image.shape[2:]))
        flat = F.conv2d(flat, kernel[:, :, None, :], groups=len(kernel))
        flat = F.conv2d(flat, kernel[:, :, :, None], groups=len(kernel))
        return flat.view(image.shape)

    def _recolor(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Change brightness, contrast and saturation, each by up to 30 %."""
        image = image + self._between(-0.3, 0.3, image, sample_S, epoch, _BRIGHT)
        mean = image.mean((1, 2, 3), keepdim=True)
        image = mean + (image - mean) * self._between(0.7, 1.3, image, sample_S, epoch, _CONTRAST)
        gray = _luma(image)
        image = gray + (image - gray) * self._between(0.7, 1.3, image, sample_S, epoch, _SATURATION)
        return image.clamp(-1, 1)

    def _drain(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Take the color away."""
        return _luma(image).expand_as(image)

    def _cut_out(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Enlarge a square of 80 to 100 % of the side."""
        share = self._between(0.8, 1.0, image, sample_S, epoch, _CROP_SIZE)[:, 0, 0, 0]
        x, y = (
            (1 - share) * self._between(-1, 1, image, sample_S, epoch, p)[:, 0, 0, 0]
            for p in (_CROP_X, _CROP_Y)
        )
        nothing = torch.zeros_like(share)
        theta = torch.stack([torch.stack([share, nothing, x], 1), torch.stack([nothing, share, y], 1)], 1)
        grid = F.affine_grid(theta, list(image.shape), align_corners=False)
        return F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)

    def _recompress(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Save as JPEG of quality 30 to 95 and open again."""
        quality = self._between(30, 95, image, sample_S, epoch, _QUALITY)
        return recompress(image, quality[:, 0, 0, 0].round())

    def _cover(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Put a gray rectangle of 10 to 40 % of each side somewhere."""
        height, width = image.shape[2:]
        hidden = torch.ones((), dtype=torch.bool, device=image.device)
        for length, axis, size, start in ((width, 3, _ERASE_W, _ERASE_X), (height, 2, _ERASE_H, _ERASE_Y)):
            extent = self._between(0.1, 0.4, image, sample_S, epoch, size) * length
            begin = self._between(0, 1, image, sample_S, epoch, start) * (length - extent)
            place = torch.arange(length, device=image.device).view([-1 if d == axis else 1 for d in range(4)])
            hidden = hidden & (place >= begin) & (place < begin + extent)
        return image.masked_fill(hidden, 0.0)


def _luma(image: Tensor) -> Tensor:
    # Made on the host: torch.tensor(device=…) would wait for the device.
    weight = torch.tensor(_LUMA).to(image.device, non_blocking=True).view(1, 3, 1, 1)
    return (image * weight).sum(1, keepdim=True)


_KEPT = 4


class Room:
    """Gives out arrays in memory that was given out before and that nobody holds any more.

    Fresh memory costs more than the work on it: the system clears every page of it, and takes it back
    as soon as the batch is gone.
    """

    def __init__(self) -> None:
        self._given: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def array(self, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        """Return an array of any content. It stays the caller's until the last reference to it is gone."""
        free = (
            whole
            for whole, held in self._given
            if held() is None and whole.shape == shape and whole.dtype == dtype
        )
        whole = next(free, None)
        if whole is None:
            whole = np.empty(shape, dtype)
        view = whole[...]
        others = [(array, held) for array, held in self._given if array is not whole]
        self._given = [*others[1 - _KEPT :], (whole, weakref.ref(view))]
        return view
