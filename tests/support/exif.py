"""JPEGs with an EXIF orientation, as cameras write them."""

from __future__ import annotations

import struct

import numpy as np

from facetrain.data.images.decode import encode_jpeg


def turned_jpeg(image: np.ndarray, orientation: int) -> bytes:
    """Encode RGB, uint8 (H, W, 3), and add an EXIF segment with the orientation, 1 to 8."""
    tag = struct.pack("<HHIHH", 274, 3, 1, orientation, 0)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + tag + struct.pack("<I", 0)
    data = encode_jpeg(image, 95)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]
