"""Image augmentations on the device, applied to uint8 batches, and normalization to [-1, 1]."""

# B local batch   C channels   H height   W width   S rows that an augmentation is drawn for

from __future__ import annotations

import weakref
from functools import partial

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.counter_rng import hash64, key_of, uniform
from facetrain.data.settings import AugmentSettings
from facetrain.face_landmarks import MIRRORED_ORDER
from facetrain.own_parts import load_part

# One number per random draw: a new augmentation does not change the draws of the others.
_FLIP, _LOW_RESOLUTION, _LOW_RESOLUTION_SCALE, _BLUR, _BLUR_SIGMA = range(5)
_GRAY, _COLOR, _BRIGHTNESS, _CONTRAST, _SATURATION = range(5, 10)
_CROP, _CROP_SIZE, _CROP_X, _CROP_Y = range(10, 14)
_NETWORK, _OWN = 21, 22
_IMAGES_IN_CACHE = 2
"""Float32 images of 112 × 112 that fit into a core's level-2 cache with room to spare."""
_LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in gray: ITU-R BT.601, as in OpenCV
_BUFFERS_KEPT = 4
_DEFAULTS = AugmentSettings()


class BufferPool:
    """Arrays that are reused as soon as the caller drops the last reference to them.

    New memory costs more than the work on it: the operating system clears every page, and takes it back when
    the batch is freed.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def array(self, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        """Return an uninitialized array; it belongs to the caller until the last reference to it is gone."""
        free = (
            buffer
            for buffer, view in self._buffers
            if view() is None and buffer.shape == shape and buffer.dtype == dtype
        )
        buffer = next(free, None)
        if buffer is None:
            buffer = np.empty(shape, dtype)
        view = buffer[...]
        others = [(other, reference) for other, reference in self._buffers if other is not buffer]
        self._buffers = [*others[1 - _BUFFERS_KEPT :], (buffer, weakref.ref(view))]
        return view


def mirror_landmarks(landmarks_B52: Tensor) -> Tensor:
    """Return the landmarks (B, 5, 2) of mirror images, as fractions of the sides."""
    mirrored = landmarks_B52[:, list(MIRRORED_ORDER)]
    mirrored[..., 0] = 1 - mirrored[..., 0]
    return mirrored


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
    out = buffers.array(image.shape, np.float32)
    mirrored = np.empty(image.shape[1:], dtype=np.uint8)
    flips = flip_B.tolist() if flip_B is not None else [False] * len(out)
    for start in range(0, len(out), _IMAGES_IN_CACHE):
        part = out[start : start + _IMAGES_IN_CACHE]
        for row, target in enumerate(part, start):
            np.copyto(target, cv2.flip(image[row], 1, dst=mirrored) if flips[row] else image[row])
        np.subtract(part, np.float32(127.5), out=part)
        np.multiply(part, np.float32(1 / 127.5), out=part)
    return torch.from_numpy(out).permute(0, 3, 1, 2)


class Augment:
    """Random augmentations of a batch, then normalization.

    The random draws of an image depend on (seed, epoch, dataset index) only, never on its batch or rank. They
    are computed on the host, so that the host never waits for the device. Flip, low resolution, blur and gray are
    as in arcface_torch's DALI reader.

    Args:
        seed: seed of the draws.
        settings: probabilities; the methods below describe the augmentations.
    """

    def __init__(self, seed: int, settings: AugmentSettings = _DEFAULTS) -> None:
        self._seed, self._settings, self._buffers = seed, settings, BufferPool()
        self._augmentations = [
            (probability, purpose, augment)
            for probability, purpose, augment in (
                (settings.crop, _CROP, self._random_crop),
                (settings.low_resolution, _LOW_RESOLUTION, self._lower_resolution),
                (settings.blur, _BLUR, self._gaussian_blur),
                (settings.color, _COLOR, self._color_jitter),
                (settings.gray, _GRAY, self._to_gray),
            )
            if probability > 0
        ]
        own = [(each, load_part(each.type, "data.augment.own")) for each in settings.own]
        self._own = [(each.probability, partial(part, **each.options)) for each, part in own]

    def __call__(self, image_BHWC: Tensor, sample_B: Tensor, epoch: int) -> Tensor:
        """Augment and normalize a batch.

        Args:
            image_BHWC: uint8 (B, H, W, 3) on any device.
            sample_B: dataset index of each image, int64 (B,).
            epoch: epoch, from 0.

        Returns:
            float32 (B, 3, H, W) in [-1, 1], channels_last, on the same device.
        """
        sample_B = sample_B.cpu()
        image = normalize(image_BHWC, self.flips(sample_B, epoch), self._buffers)
        for probability, purpose, augment in self._augmentations:
            selected_S = (self._uniform(sample_B, epoch, purpose) < probability).nonzero()[:, 0]
            if len(selected_S):
                rows_S = selected_S.to(image.device, non_blocking=True)
                image[rows_S] = augment(image[rows_S], sample_B[selected_S], epoch)
        for number, (probability, part) in enumerate(self._own):
            drawn_B = uniform(sample_B, key_of(self._seed, epoch, _OWN, number))
            selected_S = (drawn_B < probability).nonzero()[:, 0]
            if len(selected_S):
                key_S = hash64(sample_B[selected_S], key_of(self._seed, epoch, _OWN, number, 1))
                rows_S = selected_S.to(image.device, non_blocking=True)
                image[rows_S] = part(image[rows_S], key_S)
        return image.contiguous(memory_format=torch.channels_last)

    def flips(self, sample_B: Tensor, epoch: int) -> Tensor | None:
        """Return which samples are mirrored in an epoch, bool (B,) on the host; None if none ever is."""
        return self._uniform(sample_B, epoch, _FLIP) < self._settings.flip if self._settings.flip else None

    def move_landmarks(self, landmarks_B52: Tensor, sample_B: Tensor, epoch: int) -> Tensor:
        """Return the landmarks (B, 5, 2) of augmented images, as fractions of their sides, on the host.

        The arguments are as for the images, and the landmarks before augmentation. A flip and a crop move them.
        """
        flip_B = self.flips(sample_B, epoch)
        if flip_B is not None:
            mirrored = mirror_landmarks(landmarks_B52)
            landmarks_B52 = torch.where(flip_B[:, None, None], mirrored, landmarks_B52)
        selected_S = (self._uniform(sample_B, epoch, _CROP) < self._settings.crop).nonzero()[:, 0]
        if len(selected_S):
            scale, x, y = self._crop_window(landmarks_B52, sample_B[selected_S], epoch)
            # The crop shows the coordinate scale · c + shift, both from −1 to 1, at c.
            shift = torch.stack([x, y], 1)[:, None]
            moved = (2 * landmarks_B52[selected_S] - 1 - shift) / scale[:, None, None]
            landmarks_B52 = landmarks_B52.index_copy(0, selected_S, (moved + 1) / 2)
        return landmarks_B52

    def network_keys(self, sample_B: Tensor, epoch: int) -> Tensor:
        """Return a key of each sample, int64 (B,), for what the network itself draws (`Backbone.draws_by_sample`)."""
        return hash64(sample_B, key_of(self._seed, epoch, _NETWORK))

    def _uniform(self, sample_B: Tensor, epoch: int, purpose: int) -> Tensor:
        return uniform(sample_B, key_of(self._seed, epoch, purpose))

    def _uniform_between(
        self, low: float, high: float, image: Tensor, sample_S: Tensor, epoch: int, purpose: int
    ) -> Tensor:
        value = (low + (high - low) * self._uniform(sample_S, epoch, purpose)).float()
        return value.to(image.device, non_blocking=True)[:, None, None, None]

    def _lower_resolution(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Shrink to one of the sizes, or to 50, 60, 70 or 80 % of the size, and enlarge again."""
        sizes = self._settings.low_resolution_sizes or [
            int((0.5 + 0.1 * n) * image.shape[2]) for n in range(4)
        ]
        level_S = (self._uniform(sample_S, epoch, _LOW_RESOLUTION_SCALE) * len(sizes)).long()
        out = image.clone()
        for level, size in enumerate(sizes):
            rows = (level_S == level).nonzero()[:, 0]
            if len(rows):
                rows = rows.to(image.device, non_blocking=True)
                small = F.interpolate(image[rows], size=(size, size), mode="area")
                out[rows] = F.interpolate(small, size=image.shape[2:], mode="bilinear", align_corners=False)
        return out

    def _gaussian_blur(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Blur by a Gaussian with a standard deviation of 0.5 to 2 pixels."""
        # Grouped convolutions: every image has its own kernel of 9 taps, applied along rows and then columns.
        sigma = self._uniform_between(0.5, 2.0, image, sample_S, epoch, _BLUR_SIGMA)[:, :, 0, 0]
        offset = torch.arange(-4, 5, device=image.device)
        kernel = torch.exp(-0.5 * (offset / sigma) ** 2)
        kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(3, 0)[:, None]
        flat = F.pad(image, (4, 4, 4, 4), mode="replicate").reshape(1, -1, *(n + 8 for n in image.shape[2:]))
        flat = F.conv2d(flat, kernel[:, :, None, :], groups=len(kernel))
        flat = F.conv2d(flat, kernel[:, :, :, None], groups=len(kernel))
        return flat.view(image.shape)

    def _color_jitter(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Change brightness, contrast and saturation, each by up to 30 %."""
        image = image + self._uniform_between(-0.3, 0.3, image, sample_S, epoch, _BRIGHTNESS)
        mean = image.mean((1, 2, 3), keepdim=True)
        image = mean + (image - mean) * self._uniform_between(0.7, 1.3, image, sample_S, epoch, _CONTRAST)
        gray = _luma(image)
        image = gray + (image - gray) * self._uniform_between(0.7, 1.3, image, sample_S, epoch, _SATURATION)
        return image.clamp(-1, 1)

    def _to_gray(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Convert to gray, with three equal channels."""
        return _luma(image).expand_as(image)

    def _random_crop(self, image: Tensor, sample_S: Tensor, epoch: int) -> Tensor:
        """Crop a square of 80 to 100 % of the side and enlarge it."""
        scale, x, y = self._crop_window(image, sample_S, epoch)
        zero = torch.zeros_like(scale)
        theta = torch.stack([torch.stack([scale, zero, x], 1), torch.stack([zero, scale, y], 1)], 1)
        grid = F.affine_grid(theta, list(image.shape), align_corners=False)
        return F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)

    def _crop_window(self, like: Tensor, sample_S: Tensor, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the side of each crop as a fraction, and x and y of its center, −1 to 1; on the device of `like`."""
        scale = self._uniform_between(0.8, 1.0, like, sample_S, epoch, _CROP_SIZE)[:, 0, 0, 0]
        x, y = (
            (1 - scale) * self._uniform_between(-1, 1, like, sample_S, epoch, p)[:, 0, 0, 0]
            for p in (_CROP_X, _CROP_Y)
        )
        return scale, x, y


def _luma(image: Tensor) -> Tensor:
    # Created on the host: torch.tensor(device=…) would synchronize with the device.
    weight = torch.tensor(_LUMA).to(image.device, non_blocking=True).view(1, 3, 1, 1)
    return (image * weight).sum(1, keepdim=True)
