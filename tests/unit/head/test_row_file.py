import os

import pytest
import torch

from facetrain.errors import RunError
from facetrain.head.row_file import DiskRows
from tests.support.faults import files_limited_to

ROWS = 40
INDEX = torch.tensor([0, 3, 4, 5, 17, ROWS - 1])


# The first size fills whole sectors, so transfers bypass the kernel's page cache; the others use it.
@pytest.fixture(params=[256, 128, 24], ids=lambda columns: f"{8 * columns}_bytes")
def file(request, tmp_path):
    layout = {"weight": (request.param, torch.float32), "momentum": (request.param, torch.float32)}
    opened = DiskRows(tmp_path / "rows.bin", ROWS, layout)
    assert not list(tmp_path.iterdir()), "the file has no name: it ends with the process"
    return opened


def tables_like(file, count, spare=0):
    return {name: torch.randn(count + spare, table.shape[1]) for name, table in file.tables.items()}


def fill(file):
    content = tables_like(file, ROWS)
    for name, table in file.tables.items():
        table.copy_(content[name])
    return content


def test_rows_written_through_the_mapping_are_read_by_calls(file):
    content, copies = fill(file), tables_like(file, len(INDEX), spare=2)
    beyond = {name: table[len(INDEX) :].clone() for name, table in copies.items()}
    file.release_pages()
    file.read_rows(INDEX, copies)
    for name, table in copies.items():
        assert torch.equal(table[: len(INDEX)], content[name][INDEX])
        assert torch.equal(table[len(INDEX) :], beyond[name])


def test_rows_written_by_calls_are_read_through_the_mapping(file):
    content, order = fill(file), torch.tensor([1, 2, 3, 0, 5, 4])
    copies = tables_like(file, len(INDEX))
    file.write_rows(INDEX[order], copies)
    for name, table in file.tables.items():
        content[name][INDEX[order]] = copies[name]
        assert torch.equal(table, content[name])


def test_runs_longer_than_a_transfer_are_moved_completely(tmp_path):
    file = DiskRows(tmp_path / "rows.bin", 10_000, {"weight": (128, torch.float32)})
    copies = {"weight": torch.randn(10_000, 128)}
    every = torch.arange(10_000)
    file.write_rows(every, copies)
    again = {"weight": torch.zeros(10_000, 128)}
    file.read_rows(every, again)
    assert torch.equal(again["weight"], copies["weight"])
    assert torch.equal(file.tables["weight"], copies["weight"])


def test_an_empty_index_moves_no_rows(file):
    content, empty = fill(file), torch.empty(0, dtype=torch.int64)
    file.read_rows(empty, tables_like(file, 0))
    file.write_rows(empty, tables_like(file, 0))
    assert all(torch.equal(table, content[name]) for name, table in file.tables.items())


def test_a_truncated_file_is_an_error_that_names_the_row(file):
    os.truncate(file._descriptor, os.fstat(file._descriptor).st_size // 2)
    with pytest.raises(RunError, match=rf"rows.bin: .*row {ROWS - 1} "):
        file.read_rows(INDEX, tables_like(file, len(INDEX)))


def test_a_failed_write_is_an_error_that_advises_to_resume(file):
    copies = tables_like(file, len(INDEX))
    with files_limited_to(0), pytest.raises(RunError, match=r"rows\.bin: "):
        file.write_rows(INDEX, copies)


def test_a_disk_without_space_for_the_centers_is_an_error_at_the_start(tmp_path):
    with pytest.raises(RunError, match=r"rows\.bin: .* GiB"):
        DiskRows(tmp_path / "rows.bin", 2**50, {"weight": (512, torch.float32)})
    assert not list(tmp_path.iterdir()), "no file keeps the rest of the disk"
