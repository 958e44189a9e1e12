"""Writer of .safetensors files that needs no second copy of the tensors in memory.

`safetensors.torch.save_file` takes contiguous tensors only: a table with strided rows, or one that does not
fit into host memory, would have to be copied as a whole. File layout (https://huggingface.co/docs/safetensors):

    byte 0        N, the length of the header: uint64, little-endian
    byte 8        header: N bytes of JSON, {name: {"dtype", "shape", "data_offsets": [first, past the last]}}
    byte 8 + N    data of the tensors, one after another; the offsets count from here

The files are read with the `safetensors` library.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 24
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def write_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> tuple[int, str]:
    """Write named tensors of any shape and device, and metadata, to a new file, and sync it to the disk.

    Return the size in bytes and the SHA-256. The checksum is computed while writing: reading the file
    again would take as long as writing it.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    # Wide types first: the offset of every tensor is then a multiple of its item size.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in _chunks(ordered, metadata):
            digest.update(chunk)
            size += file.write(chunk)
        # On the disk before the manifest lists it: a checkpoint must survive a power cut right after its commit.
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _chunks(tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> Iterator[Any]:
    """Yield the content of the file in order, as buffers of bytes."""
    yield file_header(tensors, metadata)
    for tensor in tensors.values():
        # A few rows at a time: `contiguous()` copies a strided table, and a copy of all of it may not fit.
        rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        row_bytes = rows.element_size() * max(rows[:1].numel(), 1)
        rows_per_chunk = max(_CHUNK_BYTES // row_bytes, 1)
        for start in range(0, len(rows), rows_per_chunk):
            chunk = rows[start : start + rows_per_chunk].contiguous()
            # As uint8: NumPy has no bfloat16.
            yield chunk.view(-1).view(torch.uint8).cpu().numpy()


def file_header(tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> bytes:
    """Return the bytes of a file before its data, for tensors in this order, which may be on the meta device."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # spaces, so that the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text
