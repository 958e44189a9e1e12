"""Approximate search with an inverted file of faiss (IVF), in a folder on the disk.

facts.json       gallery, settings and the digest of a sample of the gallery's rows
index.faiss      centers of the lists
lists.ivfdata    the embeddings in float16, list by list; mapped into memory

Entries of the lists whose centers are nearest to a probe are compared with it (Sivic and Zisserman, "Video Google",
ICCV 2003). The cosines of the best ones are then computed again from the gallery, in float64.
"""

# Q probes   q probes of one block   G gallery   D embedding   K results   C candidates

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.embeddings.exact_search import Found, best_of_each, require_same_size, rescore, unit_rows
from facetrain.embeddings.stored_embeddings import StoredEmbeddings
from facetrain.errors import DataError, missing_package
from facetrain.files import error_reason, new_folder, os_errors_as, parse_json
from facetrain.progress import ProgressCallback, ignore_progress

_FACTS, _INDEX, _LISTS = "facts.json", "index.faiss", "lists.ivfdata"
_VERSION = 1
_TRAINING_ROWS_PER_LIST = 64
_SHARD_ROWS = 1 << 18
"""Rows whose lists are in memory at once while an index is built: 256 MiB of embeddings of size 512."""
_PROBES_AT_ONCE = 1024
_SAMPLED_ROWS = 1024


def import_faiss() -> Any:
    """Return the package faiss.

    Raises:
        DataError: it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise DataError(f"this index {missing_package(error, 'faiss')}") from error
    return faiss


@dataclass(frozen=True)
class IndexFacts:
    """Gallery and settings of an index."""

    version: int
    rows: int
    size: int
    nlist: int
    sample: str
    """sha256 of 1,024 evenly spaced rows of the gallery."""


def default_nlist(rows: int) -> int:
    """Return the number of lists for a gallery: about 4 √rows, a power of two, with at least 64 rows for each list."""
    wanted = min(4 * rows**0.5, rows / _TRAINING_ROWS_PER_LIST)
    return max(1 << int(np.log2(max(wanted, 1))), 1)


def build_ivf(
    gallery: StoredEmbeddings,
    folder: Path,
    nlist: int,
    *,
    seed: int = 0,
    progress: ProgressCallback = ignore_progress,
) -> None:
    """Write an index of a gallery to a new folder.

    Needs memory for 64 training rows per list and for the lists of 262,144 rows, and twice the gallery in float16 on
    the disk.

    Raises:
        DataError: faiss is not installed, there are fewer rows than lists, or the folder exists or cannot be written.
    """
    faiss = import_faiss()
    if nlist > gallery.count:
        raise DataError(
            f"{gallery.path}: {nlist:,} lists for {gallery.count:,} embeddings; choose a smaller --nlist"
        )
    quantizer = faiss.IndexFlatIP(gallery.size)
    # by_residual=False: the lists hold the embeddings themselves.
    empty = faiss.IndexIVFScalarQuantizer(
        quantizer, gallery.size, nlist, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
    )
    empty.cp.spherical, empty.cp.seed = True, seed
    empty.cp.min_points_per_centroid = 1  # otherwise faiss prints a warning; `default_nlist` leaves enough
    with new_folder(folder) as scratch:
        empty.train(_training_rows(gallery, nlist, seed))
        shards = list(_write_shards(faiss, empty, gallery, scratch, progress))
        _merge_shards(faiss, empty, shards, scratch)
        for shard in shards:
            shard.unlink()
        facts = IndexFacts(_VERSION, gallery.count, gallery.size, nlist, _sample_digest(gallery))
        (scratch / _FACTS).write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")


class IvfIndex:
    """Index of a gallery that was built before.

    Raises:
        DataError: faiss is not installed, the folder is no index, or that of another gallery.
    """

    def __init__(self, folder: Path, gallery: StoredEmbeddings) -> None:
        faiss = import_faiss()
        self.facts = _read_facts(folder)
        if (self.facts.rows, self.facts.size, self.facts.sample) != (
            gallery.count,
            gallery.size,
            _sample_digest(gallery),
        ):
            raise DataError(
                f"{folder}: index of another gallery: {self.facts.rows:,} embeddings of size {self.facts.size}, "
                f"{gallery.path} has {gallery.count:,} of size {gallery.size} or other numbers; remove the folder to "
                "build the index again"
            )
        self._gallery = gallery
        # The lists are mapped, not read. IO_FLAG_MMAP is for lists inside the index file, and would skip these.
        flags = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR
        try:
            with _without_stdout():
                self._index = faiss.read_index(str(folder / _INDEX), flags)
        except RuntimeError as error:
            raise DataError(
                f"{folder / _INDEX}: {error_reason(error)}; remove the folder to build the index again"
            ) from error
        _require_whole_lists(faiss, self._index, folder / _LISTS)

    def search(
        self,
        probes: StoredEmbeddings,
        count: int,
        nprobe: int,
        *,
        progress: ProgressCallback = ignore_progress,
    ) -> Found:
        """Return up to `count` entries of high cosine for each probe, from its `nprobe` nearest lists.

        Raises:
            DataError: the embeddings have different sizes, a file cannot be read, or a number is not finite.
        """
        require_same_size(probes, self._gallery)
        kept = min(count, self._gallery.count)
        # More than wanted: the order in float16 is not that of the stored numbers.
        asked = min(2 * kept + 8, self._gallery.count)
        self._index.nprobe = min(nprobe, self.facts.nlist)
        row_QK = np.full((probes.count, kept), -1, np.int64)
        cosine_QK = np.full((probes.count, kept), -np.inf)
        for first in range(0, probes.count, _PROBES_AT_ONCE):
            probe_qD = unit_rows(probes.rows(first, first + _PROBES_AT_ONCE))
            row_qC = self._index.search(probe_qD.astype(np.float32), asked)[1]
            probe_C, position = np.nonzero(row_qC >= 0)
            row_C = row_qC[probe_C, position]
            distinct, entry_C = np.unique(row_C, return_inverse=True)
            if len(distinct):
                entry_gD = np.concatenate([self._gallery.rows(row, row + 1) for row in distinct.tolist()])
                cosine_C = rescore(probe_qD, entry_gD, probe_C, entry_C)
                best, position = best_of_each(probe_C, row_C, cosine_C, kept)
                row_QK[first + probe_C[best], position] = row_C[best]
                cosine_QK[first + probe_C[best], position] = cosine_C[best]
            progress(first + len(probe_qD), probes.count)
        return Found(row_QK, cosine_QK)


def _require_whole_lists(faiss: Any, index: Any, path: Path) -> None:
    """Check that the file of the lists has all its bytes: an access to mapped memory behind its end ends the process.

    Raises:
        DataError: it is too short.
    """
    needed = faiss.downcast_InvertedLists(index.invlists).totsize
    if path.stat().st_size < needed:
        raise DataError(
            f"{path}: has {path.stat().st_size:,} of {needed:,} bytes; remove the folder to build the index again"
        )


def recall(found: Found, exact: Found) -> float:
    """Return the share of the exact results that were found."""
    # Probe by probe: all at once would need memory for the square of the number of results.
    hits = (np.isin(row_K, found_K) for found_K, row_K in zip(found.row_QK, exact.row_QK, strict=True))
    return float(np.mean([hit_K.mean() for hit_K in hits]))


def _training_rows(gallery: StoredEmbeddings, nlist: int, seed: int) -> np.ndarray:
    """Return random unit rows, float32 (n, D)."""
    count = min(_TRAINING_ROWS_PER_LIST * nlist, gallery.count)
    chosen = np.sort(np.random.default_rng(seed).choice(gallery.count, count, replace=False))
    training = np.empty((count, gallery.size), np.float32)
    for start, row_nD in gallery.blocks():
        part = slice(*np.searchsorted(chosen, (start, start + len(row_nD))))
        training[part] = unit_rows(row_nD[chosen[part] - start])
    return training


def _write_shards(
    faiss: Any, empty: Any, gallery: StoredEmbeddings, folder: Path, progress: ProgressCallback
) -> Iterator[Path]:
    """Write indexes with 262,144 rows each, and yield the files."""
    index, rows = faiss.clone_index(empty), 0
    for start, row_nD in gallery.blocks():
        numbers = np.arange(start, start + len(row_nD))
        index.add_with_ids(unit_rows(row_nD).astype(np.float32), numbers)
        rows = start + len(row_nD)
        progress(rows, gallery.count)
        if index.ntotal >= _SHARD_ROWS or rows == gallery.count:
            path = folder / f"shard_{start}.faiss"
            faiss.write_index(index, str(path))
            yield path
            index.reset()


def _merge_shards(faiss: Any, index: Any, shards: list[Path], folder: Path) -> None:
    """Write the lists of all shards to one file, one list after another, and the index that refers to it."""
    parts = [faiss.read_index(str(shard), faiss.IO_FLAG_MMAP) for shard in shards]
    pointers = faiss.InvertedListsPtrVector()
    for part in parts:
        pointers.push_back(part.invlists)
    lists = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(folder / _LISTS))
    with _without_stdout():
        index.ntotal = lists.merge_from_multiple(pointers.data(), pointers.size())
    index.replace_invlists(lists, True)
    lists.this.disown()  # the index frees them
    faiss.write_index(index, str(folder / _INDEX))


@contextmanager
def _without_stdout() -> Iterator[None]:
    """Drop what faiss prints to file descriptor 1, where a command prints its JSON."""
    terminal = os.dup(1)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        os.dup2(terminal, 1)
        os.close(terminal)


def _sample_digest(gallery: StoredEmbeddings) -> str:
    digest = hashlib.sha256()
    for row in np.linspace(0, gallery.count - 1, min(_SAMPLED_ROWS, gallery.count)).astype(int).tolist():
        digest.update(gallery.rows(row, row + 1).tobytes())
    return digest.hexdigest()


def _read_facts(folder: Path) -> IndexFacts:
    path = folder / _FACTS
    try:
        with os_errors_as(DataError, path, "the folder is no index of facetrain search"):
            facts = IndexFacts(**parse_json(path.read_text(encoding="utf-8")))
        if facts.version != _VERSION or not isinstance(facts.nlist, int) or facts.nlist < 1:
            raise ValueError(f"version {facts.version}")
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not an index ({error_reason(error)}); remove the folder to build it again"
        ) from error
    return facts
