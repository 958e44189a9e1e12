"""JPEGs decoded on the device, a batch at once: nvJPEG on CUDA, by way of torchvision."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from facetrain.data.decode import encode_jpeg
from facetrain.data.worker import Filler, Slots, Task
from facetrain.errors import DataError


class DeviceDecoder:
    """Turns a slot of encoded pictures into pixels on the device.

    The reading processes send JPEGs of the right size as they are, and decode what is not. Where the
    device refuses one, the whole slot is decoded by `filler` on the host, which knows what to say of a
    bad record or what to put in its place. nvJPEG's pixels differ from libjpeg's by rounding.
    """

    def __init__(self, slots: Slots, filler: Filler, device: torch.device) -> None:
        from torchvision.io import ImageReadMode, decode_jpeg

        self._slots, self._filler, self._device = slots, filler, device
        self._decode = lambda encoded: decode_jpeg(encoded, ImageReadMode.RGB, device=device)
        self.skipped: list[str] = []
        """What the host has skipped, where the device refused a batch."""
        probe = np.frombuffer(encode_jpeg(np.zeros((16, 16, 3), np.uint8), 90), np.uint8)
        try:
            self._decode([torch.from_numpy(probe.copy())])
        except RuntimeError as error:
            said = " ".join(str(error).split())[:200]
            raise DataError(
                f"data.decode: gpu: torchvision cannot decode JPEG on {device} ({said})"
            ) from error

    def __call__(self, slot: int) -> Tensor:
        """Return the images of a slot: uint8 (rows, H, W, 3) on the device.

        Raises:
            DataError: a picture cannot be decoded on the host either, and bad records are not to be skipped.
        """
        size, pixels = self._slots.encoded[slot], torch.from_numpy(self._slots.image[slot])
        rows = np.flatnonzero(size)
        flat = pixels.view(len(pixels), -1)
        encoded = [flat[row, : size[row]] for row in rows.tolist()]
        try:
            decoded = self._decode(encoded) if encoded else []
        except RuntimeError:
            self._decode_on_host(slot)
            return pixels.to(self._device)
        image_BHWC = torch.empty_like(pixels, device=self._device)
        for row, image_CHW in zip(rows.tolist(), decoded, strict=True):
            image_BHWC[row] = image_CHW.permute(1, 2, 0)
        for row in np.flatnonzero(size == 0).tolist():
            image_BHWC[row] = pixels[row].to(self._device, non_blocking=True)
        return image_BHWC

    def _decode_on_host(self, slot: int) -> None:
        done = self._filler.fill(Task(slot, 0, tuple(self._slots.number[slot].tolist())))
        if done.error is not None:
            raise done.error
        self.skipped += done.skipped
