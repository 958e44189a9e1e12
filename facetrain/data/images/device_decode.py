"""Decoding of whole batches of JPEGs, by torchvision on the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from facetrain.data.images.decode import encode_jpeg
from facetrain.data.loading.batch_slots import BatchSlots
from facetrain.data.loading.reader import ImageReader, ReadRequest
from facetrain.errors import DataError
from facetrain.files import error_reason

BatchDecode = Callable[[list[Tensor]], Tensor]
"""Decoder of JPEGs of one size, each uint8 (bytes,) on the host: returns uint8 (B, H, W, 3) on the device.

Raises RuntimeError if one of them cannot be decoded.
"""


def build_decoder(device: torch.device) -> BatchDecode:
    """Return torchvision's decoder for a device: nvJPEG on CUDA.

    Raises:
        DataError: it cannot decode on the device.
    """
    # Imported here: torchvision takes a second to import, and is used with `data.decode: gpu` only.
    from torchvision.io import ImageReadMode, decode_jpeg

    def decode(encoded: list[Tensor]) -> Tensor:
        image_BCHW = torch.stack(decode_jpeg(encoded, ImageReadMode.RGB, device=device))
        return image_BCHW.permute(0, 2, 3, 1).contiguous()

    probe = np.frombuffer(encode_jpeg(np.zeros((16, 16, 3), np.uint8), 90), np.uint8)
    try:
        decode([torch.from_numpy(probe.copy())])
    except RuntimeError as error:
        raise DataError(
            f"data.decode: gpu: torchvision cannot decode JPEG on {device} ({error_reason(error)}); set it to cpu"
        ) from error
    return decode


class DeviceDecoder:
    """Decoder of batch slots that hold JPEGs.

    The reading processes leave JPEGs of the right size undecoded, and decode all other images. If `decode`
    refuses a batch, `reader` decodes the whole slot on the host, and reports or replaces the bad image.
    nvJPEG's pixels differ from libjpeg's by rounding.
    """

    def __init__(
        self, slots: BatchSlots, reader: ImageReader, device: torch.device, decode: BatchDecode
    ) -> None:
        self._slots, self._reader, self._device, self._decode = slots, reader, device, decode
        self.skipped: list[str] = []
        """Messages about the bad images that were replaced after `decode` refused a batch."""

    def __call__(self, slot: int) -> Tensor:
        """Return the images of a slot: uint8 (rows, H, W, 3) on the device.

        Raises:
            DataError: if the host cannot decode an image either, and bad images are not to be skipped.
        """
        size, pixels = self._slots.jpeg_bytes[slot], torch.from_numpy(self._slots.image[slot])
        rows = np.flatnonzero(size)
        flat = pixels.view(len(pixels), -1)
        encoded = [flat[row, : size[row]] for row in rows.tolist()]
        try:
            decoded_BHWC = self._decode(encoded) if encoded else None
        except RuntimeError:
            self._decode_on_host(slot)
            decoded_BHWC = None
        if decoded_BHWC is None:
            return pixels.to(self._device, copy=True)
        if len(rows) == len(pixels):
            return decoded_BHWC
        image_BHWC = pixels.to(self._device, copy=True)
        image_BHWC[torch.from_numpy(rows).to(self._device)] = decoded_BHWC
        return image_BHWC

    def _decode_on_host(self, slot: int) -> None:
        result = self._reader.read(ReadRequest(slot, 0, tuple(self._slots.index[slot].tolist())))
        if result.error is not None:
            raise result.error
        self.skipped += result.skipped
