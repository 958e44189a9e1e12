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
            jpeg_BCHW = torch.stack(self._decode(encoded)) if encoded else None
        except RuntimeError:
            self._decode_on_host(slot)
            jpeg_BCHW = None
        if jpeg_BCHW is None:
            return pixels.to(self._device, copy=True)
        jpeg_BHWC = jpeg_BCHW.permute(0, 2, 3, 1)
        if len(rows) == len(pixels):
            return jpeg_BHWC.contiguous()
        image_BHWC = pixels.to(self._device, copy=True)
        image_BHWC[torch.from_numpy(rows).to(self._device)] = jpeg_BHWC
        return image_BHWC

    def _decode_on_host(self, slot: int) -> None:
        done = self._filler.fill(Task(slot, 0, tuple(self._slots.number[slot].tolist())))
        if done.error is not None:
            raise done.error
        self.skipped += done.skipped
