"""Search benchmark: rate, memory and recall of the searches in a generated gallery.

Seconds are CPU time of the process, which other programs change little. With one thread, it is the elapsed time of an
idle machine.
"""

# N gallery entries   n entries of one block   D embedding

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.bench.failed_process import failure_reason
from facetrain.embeddings.embedding_files import Embeddings, load_embeddings, save_embeddings
from facetrain.errors import DataError, RunError, UsageError

METHODS = ("exact", "flat", "ivf")
_IMAGES_PER_PERSON = 8
_BLOCK = 1 << 16
_COSINE_OF_A_PERSON = 0.6
"""Cosine of two images of one person: about that of ArcFace embeddings of good photos."""
_TOP = 5


def measure_search(
    *,
    entries: int,
    size: int,
    dtype: str,
    probes: int,
    clustered: bool,
    faces: Path | None = None,
    methods: Sequence[str],
    nlist: int | None,
    nprobes: Sequence[int],
    folder: Path | None = None,
) -> dict[str, Any]:
    """Write a gallery and probes, and search with each method in a process of its own.

    Args:
        entries: size of the gallery.
        size: numbers of an embedding; those of `faces` if given.
        dtype: type of the numbers in the files.
        probes: number of probes, new images of people of the gallery.
        clustered: eight images of each person instead of independent random directions.
        faces: real embeddings with labels, whose distribution the gallery and the probes get, see `_FaceRows`.
        methods: some of `METHODS`; `ivf` is compared with `exact`.
        nlist: lists of the index; `default_nlist` if None.
        nprobes: numbers of lists per probe to measure.
        folder: where the files are written; a temporary folder if None.

    Raises:
        UsageError: there is no such folder, or the index would have more lists than the gallery has entries.
        RunError: a search failed.
        DataError: `faces` cannot be read, or has fewer than two people with two images each.
    """
    if "ivf" in methods and nlist is not None and nlist > entries:
        raise UsageError(
            f"--nlist {nlist:,}: more lists than --entries {entries:,}; choose a smaller --nlist"
        )
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; name a folder on the disk to measure")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = Path(scratch)
        gallery = _GeneratedRows(entries, size, clustered) if faces is None else _FaceRows(entries, faces)
        labels = np.arange(entries) // _IMAGES_PER_PERSON
        since = time.process_time()
        save_embeddings(place / "gallery.npz", Embeddings(gallery, _Names(entries), labels), dtype)  # type: ignore[arg-type]
        report: dict[str, Any] = {
            "gallery_bytes": (place / "gallery.npz").stat().st_size,
            "write_seconds": time.process_time() - since,
        }
        chosen = np.linspace(0, entries - 1, probes).astype(int)
        probe = gallery.new_images(chosen)
        save_embeddings(place / "probes.npz", Embeddings(probe, _Names(probes), labels[chosen]))
        for method in methods:
            report[method] = _search_in_new_process(place, method, nlist, nprobes)
    return report


class _GeneratedRows:
    """Unit embeddings that are generated on access, so that a gallery of any size fits into memory."""

    def __init__(self, count: int, size: int, clustered: bool) -> None:
        self.shape, self._clustered = (count, size), clustered

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, block: slice) -> np.ndarray:
        start, stop, _ = block.indices(len(self))
        first = start // _BLOCK
        row_nD = np.concatenate([self._block(number) for number in range(first, (stop - 1) // _BLOCK + 1)])
        return row_nD[start - first * _BLOCK : stop - first * _BLOCK]

    def new_images(self, rows: np.ndarray) -> np.ndarray:
        """Return unit embeddings near those of some ascending rows, float32 (n, D)."""
        blocks = [(number, rows[rows // _BLOCK == number]) for number in np.unique(rows // _BLOCK).tolist()]
        known = np.concatenate([self._block(number)[part % _BLOCK] for number, part in blocks])
        return _mixed(known, _directions(np.random.default_rng(1), known.shape), _COSINE_OF_A_PERSON)

    def _block(self, number: int) -> np.ndarray:
        random = np.random.default_rng([0, number])
        own = _directions(random, (_BLOCK, self.shape[1]))
        if not self._clustered:
            return own
        people = _directions(random, (_BLOCK // _IMAGES_PER_PERSON, self.shape[1]))
        return _mixed(np.repeat(people, _IMAGES_PER_PERSON, 0), own, _COSINE_OF_A_PERSON**0.5)


class _FaceRows(_GeneratedRows):
    """Unit embeddings with the distribution of real ones: people around their mean, eight images around each person.

    Both have normal distributions with the covariance of the real embeddings, between people and within them. Real
    embeddings lie in few of their dimensions, and people are close to others: an index has an easier task than with
    independent directions, and the same one as with real faces as far as these two covariances describe them.
    """

    def __init__(self, count: int, faces: Path) -> None:
        real = load_embeddings(faces)
        super().__init__(count, real.embedding.shape[1], clustered=True)
        real_ND = _unit(real.embedding.astype(np.float64))
        people, person_N, images_P = np.unique(real.label, return_inverse=True, return_counts=True)
        if (images_P > 1).sum() < 2:
            raise DataError(
                f"{faces}: has {len(people):,} people; embeddings of two images of many people are needed"
            )
        sums_PD = np.zeros((len(people), real_ND.shape[1]))
        np.add.at(sums_PD, person_N, real_ND)
        center_PD = sums_PD / images_P[:, None]
        within_DD = (real_ND - center_PD[person_N]).T @ (real_ND - center_PD[person_N]) / (images_P - 1).sum()
        # The centers are means of a few images: part of their covariance is that of the images.
        between_DD = np.cov(center_PD.T) - within_DD * (1 / images_P).mean()
        self._mean_D = center_PD.mean(0).astype(np.float32)
        self._people_DD, self._images_DD = _square_root(between_DD), _square_root(within_DD)

    def new_images(self, rows: np.ndarray) -> np.ndarray:
        """Return unit embeddings of the people of some ascending rows, float32 (n, D)."""
        people = [
            self._people(number)[0][rows[rows // _BLOCK == number] % _BLOCK // _IMAGES_PER_PERSON]
            for number in np.unique(rows // _BLOCK).tolist()
        ]
        return self._images(np.concatenate(people), np.random.default_rng(1))

    def _block(self, number: int) -> np.ndarray:
        person_MD, random = self._people(number)
        return self._images(np.repeat(person_MD, _IMAGES_PER_PERSON, 0), random)

    def _people(self, number: int) -> tuple[np.ndarray, np.random.Generator]:
        """Return the people of a block, and the generator that draws their images next."""
        random = np.random.default_rng([0, number])
        normal = random.standard_normal((_BLOCK // _IMAGES_PER_PERSON, self.shape[1]), np.float32)
        return self._mean_D + normal @ self._people_DD, random

    def _images(self, person_nD: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return _unit(person_nD + random.standard_normal(person_nD.shape, np.float32) @ self._images_DD)


def _square_root(covariance_DD: np.ndarray) -> np.ndarray:
    """Return R with RᵀR the covariance: standard normal rows times R have it. Negative eigenvalues count as zero."""
    values_D, vectors_DD = np.linalg.eigh(covariance_DD)
    return ((vectors_DD * np.sqrt(values_D.clip(0))) @ vectors_DD.T).astype(np.float32)


def _directions(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return random unit rows. Bytes are ten times as fast as normal numbers, and in many dimensions as good."""
    return _unit(np.frombuffer(random.bytes(shape[0] * shape[1]), np.int8).reshape(shape) + np.float32(0.5))


def _mixed(center_nD: np.ndarray, noise_nD: np.ndarray, cosine: float) -> np.ndarray:
    """Return unit rows whose cosine with their center is about `cosine`."""
    return _unit(cosine * center_nD + (1 - cosine**2) ** 0.5 * noise_nD)


def _unit(row_nD: np.ndarray) -> np.ndarray:
    return row_nD / np.linalg.norm(row_nD, axis=1, keepdims=True)


class _Names(Sequence[str]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return f"{index // _IMAGES_PER_PERSON:07d}/{index % _IMAGES_PER_PERSON}.jpg"


def _search_in_new_process(
    folder: Path, method: str, nlist: int | None, nprobes: Sequence[int]
) -> dict[str, Any]:
    # A process of its own, because a peak of memory is that of a whole process.
    command = [sys.executable, "-m", __name__, str(folder), method, str(nlist or 0), *map(str, nprobes)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = failure_reason(done)
        raise RunError(f"bench search: the search {method} failed: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(folder: Path, method: str, nlist: int, nprobes: list[int]) -> dict[str, Any]:
    from facetrain.embeddings.exact_search import Found, scan_with_faiss, search_exactly
    from facetrain.embeddings.ivf_index import IvfIndex, build_ivf, default_nlist, import_faiss, recall
    from facetrain.embeddings.stored_embeddings import open_embeddings

    gallery, probes = open_embeddings(folder / "gallery.npz"), open_embeddings(folder / "probes.npz")
    exact = folder / "exact.npz"
    report: dict[str, Any] = {"memory_before_mib": _memory()["VmRSS"]}
    if method != "ivf":
        scan = scan_with_faiss(import_faiss()) if method == "flat" else None
        since = time.process_time()
        found = search_exactly(probes, gallery, _TOP, scan=scan)
        report["queries_per_second"] = probes.count / (time.process_time() - since)
        if method == "exact":
            np.savez(exact, row=found.row_QK, cosine=found.cosine_QK)
        return report | _peak()
    nlist = nlist or default_nlist(gallery.count)
    since = time.process_time()
    build_ivf(gallery, folder / "ivf", nlist)
    report |= {"nlist": nlist, "build_seconds": time.process_time() - since}
    report["build_peak_mib"] = _memory()["VmHWM"]
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))
    index = IvfIndex(folder / "ivf", gallery)
    index.search(probes, _TOP, max(nprobes))  # reads the lists into the system's cache
    for nprobe in nprobes:
        since = time.process_time()
        found = index.search(probes, _TOP, nprobe)
        report[f"nprobe_{nprobe}"] = {"queries_per_second": probes.count / (time.process_time() - since)}
        if exact.exists():
            known = np.load(exact)
            share = recall(found, Found(known["row"], known["cosine"]))
            report[f"nprobe_{nprobe}"][f"recall_at_{_TOP}"] = share
    return report | _peak()


def _peak() -> dict[str, int]:
    memory = _memory()
    return {"peak_mib": memory["VmHWM"], "without_mapped_files_mib": memory["RssAnon"]}


def _memory() -> dict[str, int]:
    """Return the lines of /proc/self/status about memory, in MiB."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) >> 10 for line in lines if line[-1] == "kB"}


if __name__ == "__main__":
    place, method, lists, *rest = sys.argv[1:]
    print(json.dumps(_measure(Path(place), method, int(lists), [int(one) for one in rest])))
