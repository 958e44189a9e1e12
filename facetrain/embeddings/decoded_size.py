"""Limit of the memory that a compressed file of embeddings may need."""

from __future__ import annotations

from pathlib import Path

from facetrain.errors import DataError

_SPARE_BYTES = 1 << 27


def require_fitting(path: Path, size: int) -> None:
    """Refuse a file that grows too much when it is decompressed: embeddings hardly compress.

    Raises:
        DataError: `size`, the bytes of its columns in memory, is too large.
    """
    limit = 2 * path.stat().st_size + _SPARE_BYTES
    if size > limit:
        raise DataError(
            f"{path}: decompresses to {size:,} bytes, more than the {limit:,} that a file of this size may need"
        )
