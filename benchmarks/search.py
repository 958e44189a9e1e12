"""Rate and memory of the exact search in a generated gallery, beside faiss's flat index where faiss is installed.

Rates are per second of CPU time of the process, which other programs change little. With OMP_NUM_THREADS=1, it is the
elapsed time of an idle machine. The embeddings are random directions: the time does not depend on their values.
"""

# n rows of one block   D embedding

from __future__ import annotations

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import in_new_process, memory_mib, run
from facetrain.embeddings.embedding_files import open_embeddings, save_embeddings
from facetrain.embeddings.embeddings import Embeddings
from facetrain.embeddings.gallery_search import search_gallery
from facetrain.embeddings.image_inputs import LazySequence

_BLOCK = 1 << 16
_TOP = 5


def measure_search(
    entries: int = 1_000_000,
    size: int = 512,
    probes: int = 1000,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Write a gallery of `entries` embeddings and `probes` probes into `folder`, and search with each method."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        gallery, probe = Path(scratch) / "gallery.npz", Path(scratch) / "probes.npz"
        rows = _generated_rows(Path(scratch) / "rows.npy", entries, size)
        save_embeddings(gallery, Embeddings(rows, _names(entries), np.arange(entries)))
        some = np.array(rows[:probes])
        save_embeddings(probe, Embeddings(some, _names(len(some)), np.arange(len(some))))
        report: dict[str, Any] = {"gallery_bytes": gallery.stat().st_size}
        report["exact"] = in_new_process(_search_gallery, probe, gallery)
        if find_spec("faiss"):
            report["faiss flat"] = in_new_process(_search_with_faiss, probe, gallery)
    return report


def _names(count: int) -> LazySequence[str]:
    return LazySequence(count, "{:09d}.jpg".format)


def _generated_rows(path: Path, count: int, size: int) -> np.ndarray:
    """Return random unit embeddings, float32 (count, size), in a file: a gallery may be larger than the memory."""
    rows = np.lib.format.open_memmap(path, "w+", np.float32, (count, size))
    for start in range(0, count, _BLOCK):
        row_nD = np.random.default_rng(start).normal(size=rows[start : start + _BLOCK].shape)
        rows[start : start + _BLOCK] = row_nD / np.linalg.norm(row_nD, axis=1, keepdims=True)
    return rows


def _search_gallery(probe: Path, gallery: Path) -> dict[str, Any]:
    probes, before, start = open_embeddings(probe), memory_mib("VmRSS"), time.process_time()
    search_gallery(probes, open_embeddings(gallery), _TOP)
    return _report(probes.count, before, time.process_time() - start)


def _search_with_faiss(probe: Path, gallery: Path) -> dict[str, Any]:
    import faiss

    stored, probes = open_embeddings(gallery), open_embeddings(probe)
    before = memory_mib("VmRSS")
    index = faiss.IndexFlatIP(stored.size)
    for _, row_nD in stored.blocks():
        index.add(np.ascontiguousarray(row_nD, np.float32))
    start = time.process_time()
    index.search(probes.rows(0, probes.count).astype(np.float32), _TOP)
    return _report(probes.count, before, time.process_time() - start)


def _report(probes: int, memory_before: int, seconds: float) -> dict[str, Any]:
    return {
        "queries_per_second": probes / seconds,
        "memory_before_mib": memory_before,
        "peak_mib": memory_mib(),
        "without_mapped_files_mib": memory_mib("RssAnon"),
    }


if __name__ == "__main__":
    run(measure_search)
