"""JPEGs decoded a batch at once, by the device or by DALI, instead of one by one in the reading processes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from facetrain.data.dali import DaliDecoder
from facetrain.data.decode import encode_jpeg
from facetrain.data.reader import Filler, Slots, Task
from facetrain.errors import DataError

BatchDecode = Callable[[list[Tensor]], Tensor]
"""Takes JPEGs of one size, each uint8 (bytes,) on the host; returns uint8 (B, H, W, 3) on the device.

Raises RuntimeError where one of them cannot be decoded.
"""


def build_decoder(name: str, device: torch.device, *, batch_size: int, threads: int) -> BatchDecode:
    """Return what decodes batches of up to `batch_size` images on a device: `gpu` (torchvision) or `dali`.

    Raises:
        DataError: it is not installed, or cannot decode there.
    """
    is_dali = name == "dali"
    decode = DaliDecoder(device, batch_size=batch_size, threads=threads) if is_dali else _torchvision(device)
    probe = np.frombuffer(encode_jpeg(np.zeros((16, 16, 3), np.uint8), 90), np.uint8)
    try:
        decode([torch.from_numpy(probe.copy())])
    except RuntimeError as error:
        said = " ".join(str(error).split())[:200]
        library = "DALI" if is_dali else "torchvision"
        raise DataError(f"data.decode: {name}: {library} cannot decode JPEG on {device} ({said})") from error
    return decode


def _torchvision(device: torch.device) -> BatchDecode:
    from torchvision.io import ImageReadMode, decode_jpeg

    def decode(encoded: list[Tensor]) -> Tensor:
        jpeg_BCHW = torch.stack(decode_jpeg(encoded, ImageReadMode.RGB, device=device))
        return jpeg_BCHW.permute(0, 2, 3, 1).contiguous()

    return decode


class DeviceDecoder:
    """Turns a slot of encoded images into pixels on the device.

    The reading processes send JPEGs of the right size as they are, and decode what is not. Where
    `decode` refuses one, the whole slot is decoded by `filler` on the host, which knows what to say of a
    bad record or what to put in its place. nvJPEG's pixels differ from libjpeg's by rounding.
    """

    def __init__(self, slots: Slots, filler: Filler, device: torch.device, decode: BatchDecode) -> None:
        self._slots, self._filler, self._device, self._decode = slots, filler, device, decode
        self.skipped: list[str] = []
        """What the host has skipped, where a batch was refused."""

    def __call__(self, slot: int) -> Tensor:
        """Return the images of a slot: uint8 (rows, H, W, 3) on the device.

        Raises:
            DataError: an image cannot be decoded on the host either, and bad records are not to be skipped.
        """
        size, pixels = self._slots.encoded[slot], torch.from_numpy(self._slots.image[slot])
        rows = np.flatnonzero(size)
        flat = pixels.view(len(pixels), -1)
        encoded = [flat[row, : size[row]] for row in rows.tolist()]
        try:
            jpeg_BHWC = self._decode(encoded) if encoded else None
        except RuntimeError:
            self._decode_on_host(slot)
            jpeg_BHWC = None
        if jpeg_BHWC is None:
            return pixels.to(self._device, copy=True)
        if len(rows) == len(pixels):
            return jpeg_BHWC
        image_BHWC = pixels.to(self._device, copy=True)
        image_BHWC[torch.from_numpy(rows).to(self._device)] = jpeg_BHWC
        return image_BHWC

    def _decode_on_host(self, slot: int) -> None:
        done = self._filler.fill(Task(slot, 0, tuple(self._slots.number[slot].tolist())))
        if done.error is not None:
            raise done.error
        self.skipped += done.skipped
