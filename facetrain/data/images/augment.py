"""Image augmentations on the device, applied to uint8 batches."""

# B local batch   C channels   H height   W width   S rows that an augmentation is drawn for

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from facetrain.counter_rng import hash64, key_of, uniform
from facetrain.data.augmentations.draws import Draws
from facetrain.data.images.normalize import BufferPool, normalize
from facetrain.errors import ConfigError
from facetrain.face_landmarks import MIRRORED_ORDER
from facetrain.own_parts import describe_result

_FLIP, _NETWORK, _OWN = 0, 21, 22
"""Purposes of the random keys; see `Draws` for those of the augmentations."""


def mirror_landmarks(landmarks_B52: Tensor) -> Tensor:
    """Return the landmarks (B, 5, 2) of mirror images, as fractions of the sides."""
    mirrored = landmarks_B52[:, list(MIRRORED_ORDER)]
    mirrored[..., 0] = 1 - mirrored[..., 0]
    return mirrored


@dataclass(frozen=True)
class Augmentation:
    """One of `facetrain.data.augmentations`, and the probability for an image."""

    name: str
    probability: float
    augment: Callable[[Tensor, Draws], Tensor]
    move: Callable[[Tensor, Draws], Tensor] | None
    """What it does to landmarks; None: nothing."""


@dataclass(frozen=True)
class OwnAugment:
    """Augmentation of the user's own, a function of images and a key of each, and the probability for an image."""

    name: str
    """Key of the config and place of the code, for messages."""
    probability: float
    augment: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, image_SCHW: Tensor, key_S: Tensor) -> Tensor:
        """Return the augmented images, (S, 3, H, W).

        Raises:
            ConfigError: the function returns anything else, such as one image, which would be broadcast in silence.
        """
        augmented: object = self.augment(image_SCHW, key_S)
        expected = image_SCHW.shape, image_SCHW.dtype
        if not isinstance(augmented, Tensor) or (augmented.shape, augmented.dtype) != expected:
            raise ConfigError(
                f"{self.name} maps {describe_result(image_SCHW)} to {describe_result(augmented)}; return images of the "
                "same shape and dtype"
            )
        return augmented


class Augment:
    """Random augmentations of a batch, then normalization.

    The random draws of an image depend on (seed, epoch, number of the image) only, never on its batch or rank. They
    are computed on the host, so that the host never waits for the device.

    Args:
        seed: seed of the draws.
        flip: probability of a horizontal flip.
        parts: augmentations in the order of their application.
        own: augmentations of the user's own, after them.
    """

    def __init__(
        self,
        seed: int,
        flip: float = 0.5,
        parts: Sequence[Augmentation] = (),
        own: Sequence[OwnAugment] = (),
    ) -> None:
        self._seed, self._flip, self._parts, self._own = seed, flip, list(parts), list(own)
        self._buffers = BufferPool()

    def __call__(self, image_BHWC: Tensor, draw_B: Tensor, epoch: int) -> Tensor:
        """Augment and normalize a batch.

        Args:
            image_BHWC: uint8 (B, H, W, 3) on any device.
            draw_B: number of each image, int64 (B,) on the host, on which its draws depend: `Batch.draw_B`.
            epoch: epoch, from 0.

        Returns:
            float32 (B, 3, H, W) in [-1, 1], channels_last, on the same device.

        Raises:
            ConfigError: an augmentation of the user's own returns anything but such images.
        """
        image = normalize(image_BHWC, self.flips(draw_B, epoch), self._buffers)
        for part in self._parts:
            rows_S, draws = self._drawn(part, draw_B, epoch, image.device)
            if len(rows_S):
                rows_S = draws.to_device(rows_S)
                image[rows_S] = part.augment(image[rows_S], draws)
        for number, own in enumerate(self._own):
            rows_S = (uniform(draw_B, self._key(epoch, _OWN, number)) < own.probability).nonzero()[:, 0]
            if len(rows_S):
                key_S = hash64(draw_B[rows_S], self._key(epoch, _OWN, number, 1))
                rows_S, key_S = (each.to(image.device, non_blocking=True) for each in (rows_S, key_S))
                image[rows_S] = own(image[rows_S], key_S)
        return image.contiguous(memory_format=torch.channels_last)

    def flips(self, draw_B: Tensor, epoch: int) -> Tensor | None:
        """Return which samples are mirrored in an epoch, bool (B,) on the host; None if none ever is."""
        return uniform(draw_B, self._key(epoch, _FLIP)) < self._flip if self._flip else None

    def move_landmarks(self, landmarks_B52: Tensor, draw_B: Tensor, epoch: int) -> Tensor:
        """Return the landmarks (B, 5, 2) of augmented images, as fractions of their sides, on the host.

        The arguments are as for the images, and the landmarks before augmentation.
        """
        flip_B = self.flips(draw_B, epoch)
        if flip_B is not None:
            mirrored = mirror_landmarks(landmarks_B52)
            landmarks_B52 = torch.where(flip_B[:, None, None], mirrored, landmarks_B52)
        for part in self._parts:
            rows_S, draws = self._drawn(part, draw_B, epoch, landmarks_B52.device)
            if part.move is not None and len(rows_S):
                landmarks_B52 = landmarks_B52.index_copy(0, rows_S, part.move(landmarks_B52[rows_S], draws))
        return landmarks_B52

    def network_keys(self, draw_B: Tensor, epoch: int) -> Tensor:
        """Return a key of each sample, int64 (B,), for what the network itself draws (`Backbone.draws_by_sample`)."""
        return hash64(draw_B, self._key(epoch, _NETWORK))

    def _drawn(
        self, part: Augmentation, draw_B: Tensor, epoch: int, device: torch.device
    ) -> tuple[Tensor, Draws]:
        """Return the rows that a part is drawn for, on the host, and their numbers."""
        chance_B = Draws(self._seed, epoch, part.name, draw_B, device).on_host(0)
        rows_S = (chance_B < part.probability).nonzero()[:, 0]
        return rows_S, Draws(self._seed, epoch, part.name, draw_B[rows_S], device)

    def _key(self, epoch: int, *purpose: int) -> int:
        return key_of(self._seed, epoch, *purpose)
