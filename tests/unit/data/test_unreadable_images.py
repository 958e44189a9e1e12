"""One image that cannot be read: it is left out or replaced in every format, and named otherwise."""

import os

import numpy as np
import pytest

from facetrain.data.formats import recordio
from facetrain.data.formats.recordio import RecordHeader, encode_record
from facetrain.data.images import header
from facetrain.data.loading.reader import BatchSlots, ImageReader, ReadRequest
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import UnreadableError
from tests.support.datasets import write_records
from tests.support.lmdb_files import trainer_values, write_lmdb
from tests.unit.data.tools.helpers import convert

COUNT = 6


def write_folder(folder):
    source = write_records(folder / "source", [n % 3 for n in range(COUNT)])
    convert(source, folder / "out", "folder", workers=1)
    return folder / "out"


def write_list(folder):
    files = sorted(path.relative_to(folder) for path in write_folder(folder).rglob("*.png"))
    (folder / "list.txt").write_text("".join(f"{file}\t{file.parent.name}\n" for file in files))
    return folder / "list.txt"


def converted(to):
    def write(folder):
        convert(write_records(folder / "source", [n % 3 for n in range(COUNT)]), folder / to, to=to)
        return folder / to

    return write


def remove(path, source):
    max((path if path.is_dir() else path.parent / "out").rglob("*.png")).unlink()


def dangle(path, source):
    file = max(path.rglob("*.png"))
    file.unlink()
    file.symlink_to("absent.png")


def enlarge(path, source):
    os.truncate(max(path.rglob("*.png")), (1 << 30) + 1)  # sparse: it takes no space


def truncate(path, source):
    file = path if path.is_file() else max([*path.glob("*.tar"), *path.glob("*.parquet")])
    with file.open("r+b") as data:
        data.truncate(int(source.columns.arrays["offset"].max()) + 30)


LISTED = {"folder": (write_folder, dangle), "large": (write_folder, enlarge), "list": (write_list, remove)}
"""Formats whose damaged dataset can be opened again."""
TRUNCATED = {
    "webdataset": (converted("webdataset"), truncate),
    "lmdb": (lambda folder: write_lmdb(folder / "a.lmdb", trainer_values([0] * COUNT)), truncate),
    "parquet": (converted("parquet"), truncate),
}


@pytest.fixture
def damaged(request, tmp_path):
    """Return a dataset that was damaged after it was opened."""
    if request.param == "parquet":
        pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    write, damage = (LISTED | TRUNCATED)[request.param]
    path = write(tmp_path)
    source = open_dataset(path)
    damage(path, source)
    return path, source


def unreadable(source):
    """Return the numbers of the images that cannot be read."""
    found = []
    for number in range(source.num_images):
        try:
            source.read(number)
        except UnreadableError:
            found.append(number)
    return found


@pytest.mark.parametrize("damaged", LISTED | TRUNCATED, indirect=True)
def test_the_next_image_replaces_one_that_cannot_be_read(damaged):
    source = damaged[1]
    bad = unreadable(source)
    assert source.num_images == COUNT and len(bad) == 1
    slots = BatchSlots(1, COUNT, 16)
    request = ReadRequest(0, 0, tuple(range(COUNT)))
    strict = ImageReader(source, slots, skip_bad=False).read(request)
    assert isinstance(strict.error, UnreadableError) and not strict.skipped
    lenient = ImageReader(source, slots, skip_bad=True).read(request)
    assert lenient.error is None and len(set(lenient.skipped)) == len(bad)
    assert not np.isin(slots.index[0], bad).any()


@pytest.mark.parametrize("to", ["recordio", "webdataset", "parquet", "folder"])
def test_no_image_has_more_bytes_than_the_limit(tmp_path, monkeypatch, to):
    if to == "parquet":
        pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    monkeypatch.setattr(recordio, "_FIRST_READ_BYTES", 64)  # every record is a long one
    source = open_dataset(converted(to)(tmp_path))
    monkeypatch.setattr(header, "_MAX_BYTES", 100)
    assert unreadable(source) == list(range(COUNT))
    monkeypatch.setattr(header, "_MAX_BYTES", 1 << 20)
    assert unreadable(source) == []


def test_a_label_that_contradicts_the_identity_records_is_never_skipped(tmp_path):
    source = open_dataset(write_records(tmp_path, [n % 3 for n in range(COUNT)]))
    offset = int(source.columns.arrays["offset"][2])
    with (tmp_path / "train.rec").open("r+b") as file:
        file.seek(offset + 8)  # after the magic number and the length
        file.write(encode_record(RecordHeader.of_image(7, 3), b""))
    result = ImageReader(source, BatchSlots(1, COUNT, 16), skip_bad=True).read(ReadRequest(0, 0, (2,)))
    assert not result.skipped and "the label of this record is 7, but" in str(result.error)
