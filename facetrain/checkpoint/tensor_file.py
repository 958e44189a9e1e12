"""Write a .safetensors file from tensors of any size, without a second copy of them in memory.

The format (huggingface.co/docs/safetensors): eight bytes that say how long the header is, the header
as JSON, and the tensors' bytes one after another. Read it with `safetensors`.
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

_CHUNK = 1 << 24
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> tuple[int, str]:
    """Write named tensors to a new file and wait until the disk has it; return its size and SHA-256.

    The checksum is taken on the way to the disk: reading the file back would cost as much as writing it.

    Raises:
        OSError: the file cannot be written, or exists.
    """
    # Wide types first: every tensor then starts at a multiple of its own item size.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in _chunks(ordered):
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _chunks(tensors: dict[str, Tensor]) -> Iterator[Any]:
    """Yield the file's content piece by piece, as buffers of bytes."""
    yield _header(tensors)
    for tensor in tensors.values():
        # By rows: of a table whose rows do not follow each other there may be no room for a copy.
        rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        row_bytes = rows.element_size() * max(rows[:1].numel(), 1)
        at_once = max(_CHUNK // row_bytes, 1)
        for start in range(0, len(rows), at_once):
            yield rows[start : start + at_once].contiguous().view(-1).view(torch.uint8).cpu().numpy()


def _header(tensors: dict[str, Tensor]) -> bytes:
    entries, at = {}, 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
