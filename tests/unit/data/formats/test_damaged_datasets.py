"""The same damage to a dataset of every format: an error that names a file, or all images with their labels."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from facetrain.data.dataset import FaceDataset
from facetrain.data.formats import lmdb_dataset
from facetrain.data.formats.recordio import RecordReader
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import FORMATS, open_dataset
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, images_of, write_records, write_tar
from tests.support.lmdb_files import trainer_values, write_lmdb
from tests.support.ranks import PRELOADED
from tests.unit.data.tools.helpers import convert

COUNT, SHARDS = 6, 3
LABELS = [number % 3 for number in range(COUNT)]


class Kind(NamedTuple):
    """Format under attack."""

    write: Callable[[Path], Path]
    """Writes a dataset below a folder; returns its path."""
    checks_labels: bool = False
    """Whether the format has checksums of the labels, or has them twice."""
    is_attacked: Callable[[Path], bool] = lambda file: True
    """Whether bytes of a file of the dataset are changed."""
    opens_slowly: bool = False
    """Whether a process is started to open the dataset: fewer places are attacked."""

    def attacks(self, places: Iterable[int]) -> list[int]:
        """Return the sorted places of a file to attack."""
        every = sorted(places)
        return every[:: len(every) // 6 + 1] if self.opens_slowly else every


def _records(folder: Path) -> Path:
    return write_records(folder / "data", sorted(LABELS))


def _folders(folder: Path) -> Path:
    convert(write_records(folder / "source", sorted(LABELS)), folder / "data", to="folder")
    shutil.rmtree(folder / "source")
    return folder / "data"


def _shards(suffix: str, write: Callable[[Path, list[int]], None]) -> Callable[[Path], Path]:
    """Return a writer of shards whose names have their number."""

    def write_all(folder: Path) -> Path:
        (folder / "data").mkdir()
        for shard in range(SHARDS):
            numbers = list(range(shard, COUNT, SHARDS))
            write(folder / "data" / f"train-{shard:05}-of-{SHARDS:05}{suffix}", numbers)
        return folder / "data"

    return write_all


def _tar(path: Path, numbers: list[int]) -> None:
    write_tar(path, {f"p{LABELS[n]}/{n}.png": encoded_image(n) for n in numbers})


def _table(numbers: list[int]) -> Any:
    pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    return pa.table({"image": [encoded_image(n) for n in numbers], "label": [LABELS[n] for n in numbers]})


def _parquet(path: Path, numbers: list[int]) -> None:
    table = _table(numbers)
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, path, compression=None, use_dictionary=False)


def _list(folder: Path) -> Path:
    for number in range(COUNT):
        (folder / f"{number}.png").write_bytes(encoded_image(number))
    (folder / "list.txt").write_text("".join(f"{n}.png\t{LABELS[n]}\n" for n in range(COUNT)))
    return folder / "list.txt"


KINDS = {
    "RecordIO": Kind(_records, checks_labels=True),
    "LMDB": Kind(lambda folder: write_lmdb(folder / "data.lmdb", trainer_values(LABELS)), opens_slowly=True),
    "WebDataset": Kind(_shards(".tar", _tar), checks_labels=True),
    "Parquet": Kind(_shards(".parquet", _parquet)),
    # A list is a text: a line or a letter less gives another list.
    "list file": Kind(_list, is_attacked=lambda file: file.suffix == ".png"),
    "image folder": Kind(_folders),
}
PLACEMENTS = {"pipe": os.mkfifo, "folder": os.mkdir, "loop": lambda path: os.symlink(path, path)}


class Target(NamedTuple):
    """Dataset before it is damaged."""

    kind: Kind
    path: Path
    files: list[Path]
    expected: list[tuple[int, bytes]]

    def require_error_or_all_images(self) -> None:
        """Open the damaged dataset: an error names a file, or no image is missing and none is wrong."""
        for catalog in self.path.parent.rglob(".*catalog"):
            catalog.unlink()  # two changes can have one time
        try:
            dataset = open_dataset(self.path)
        except DataError as error:
            return self._require_name(error)
        found = [
            (int(dataset.labels[number]), self._read(dataset, number)) for number in range(dataset.num_images)
        ]
        assert len(found) <= COUNT <= len(found) + len(dataset.skipped)
        images = {data for _, data in self.expected}
        for label, data in found:
            if data in images:
                assert (label, data) in self.expected or not self.kind.checks_labels
            elif data is not None:
                self._require_same_pixels(data)

    def _read(self, dataset: FaceDataset, number: int) -> bytes | None:
        try:
            return dataset.read(number)
        except DataError as error:
            return self._require_name(error)

    def _require_name(self, error: DataError) -> None:
        message = str(error)
        assert message.isprintable() and any(file.name in message for file in [*self.files, self.path]), (
            message
        )

    def _require_same_pixels(self, data: bytes) -> None:
        try:
            image = decode_rgb(data, location="x")
        except DataError:
            return
        assert any(np.array_equal(image, decode_rgb(one, location="x")) for _, one in self.expected)


@pytest.fixture
def forked_helpers(monkeypatch):
    """The process that opens an LMDB database is forked: a new one takes half a second, and here are many."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(lmdb_dataset, "HelperContext", lambda: multiprocessing.get_context("forkserver"))


@pytest.fixture(params=KINDS)
def target(request, tmp_path, forked_helpers):
    kind = KINDS[request.param]
    path = kind.write(tmp_path)
    files = sorted(
        file for file in tmp_path.rglob("*") if file.is_file() and file.name != "dataset_card.yaml"
    )
    target = Target(kind, path, files, images_of(open_dataset(path)))
    assert len(target.expected) == COUNT
    return target


def attacked(target: Target) -> Iterator[tuple[Path, bytes, list[tuple[int, int]]]]:
    """Yield files of the dataset, their content, and the extents of the images in them."""
    of_suffix = {file.suffix: file for file in reversed(target.files) if target.kind.is_attacked(file)}
    for file in of_suffix.values():
        whole = file.read_bytes()
        starts = [(whole.find(data), len(data)) for _, data in target.expected]
        yield file, whole, [(start, start + size) for start, size in starts if start >= 0]
        file.write_bytes(whole)


def test_every_format_is_under_attack():
    assert KINDS.keys() == {format.name for format in FORMATS}


def test_a_cut_at_any_border_is_an_error_or_loses_no_image(target):
    for file, whole, extents in attacked(target):
        around = {edge + step for extent in extents for edge in extent for step in (-32, -12, -8, -4, 0, 4)}
        cuts = around | set(range(0, len(whole), max(8, len(whole) // 2048 * 8)))
        for cut in target.kind.attacks(cut for cut in cuts if 0 <= cut < len(whole)):
            file.write_bytes(whole[:cut])
            target.require_error_or_all_images()


def test_an_unfinished_copy_in_a_file_of_the_final_size_is_an_error_or_loses_no_image(target):
    for file, whole, extents in attacked(target):
        cuts = {edge + step for extent in extents for edge in extent for step in (-8, 0, 4, 512)}
        for cut in target.kind.attacks(cuts):
            file.write_bytes(whole[:cut] + bytes(20_000))
            target.require_error_or_all_images()


def test_a_flipped_bit_in_a_header_is_an_error_or_changes_no_image(target):
    if target.kind in (KINDS["image folder"], KINDS["list file"]):
        pytest.skip("a file is an image from its first byte to its last")
    attacks = 0
    for file, whole, _ in attacked(target):
        is_image = bytearray(len(whole))
        for _, data in target.expected:
            start = whole.find(data)
            while start >= 0:
                is_image[start : start + len(data)] = b"\1" * len(data)
                start = whole.find(data, start + 1)
        header = [place for place, byte in enumerate(whole) if byte and not is_image[place]]
        for place in target.kind.attacks(header[:: len(header) // 150 + 1]):
            attacks += 1
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            file.write_bytes(damaged)
            target.require_error_or_all_images()
    assert attacks > 10


def units(file: Path, whole: bytes, extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts that a file consists of: records, members, pages, lines, or images."""
    if file.suffix == ".rec":
        starts = [*RecordReader(file).scan_offsets(), len(whole)]
    elif file.suffix == ".tar":
        with tarfile.open(file) as archive:
            starts = [*(member.offset for member in archive), archive.offset]
    elif file.suffix == ".idx":
        starts = [0, *(place + 1 for place, byte in enumerate(whole) if byte == ord("\n"))]
    elif file.suffix == ".lmdb":
        starts = list(range(0, len(whole) + 1, 4096))
    else:
        return extents
    return list(itertools.pairwise(starts))


CHANGES = {
    "removed": lambda whole, start, end: whole[:start] + whole[end:],
    "zeros": lambda whole, start, end: whole[:start] + bytes(end - start) + whole[end:],
    "repeated": lambda whole, start, end: whole[:end] + whole[start:],
    "exchanged for the one before": lambda whole, start, end: (
        whole[:start] + whole[max(2 * start - end, 0) : start] + whole[end:]
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_unit_that_is_lost_or_doubled_is_an_error_or_loses_no_image(target, change):
    for file, whole, extents in attacked(target):
        parts = dict(units(file, whole, extents))
        # What is left is what tar writes without its last member, if that is small.
        if file.suffix == ".tar" and change == "zeros":
            parts.popitem()
        for start in target.kind.attacks(parts):
            file.write_bytes(CHANGES[change](whole, start, parts[start]))
            target.require_error_or_all_images()


def test_a_missing_file_is_named(target):
    if target.kind is KINDS["image folder"]:
        pytest.skip("a folder has the images that are there")
    for file in target.files:
        content = file.read_bytes()
        file.unlink()
        target.require_error_or_all_images()
        file.write_bytes(content)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_file_that_is_no_file_is_named(target, placement):
    for file in target.files:
        content = file.read_bytes()
        file.unlink()
        PLACEMENTS[placement](file)
        target.require_error_or_all_images()
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        file.write_bytes(content)
