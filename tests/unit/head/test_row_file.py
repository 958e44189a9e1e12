import os

import pytest
import torch

from facetrain.errors import RunError
from facetrain.head.row_file import RowFile
from tests.support.faults import files_limited_to

ROWS = 40
INDEX = torch.tensor([0, 3, 4, 5, 17, ROWS - 1])


# Rows of a whole number of sectors pass the kernel's cache by; others go through it.
@pytest.fixture(params=[256, 128, 24], ids=lambda columns: f"{8 * columns}_bytes")
def file(request, tmp_path):
    layout = {"weight": (request.param, torch.float32), "momentum": (request.param, torch.float32)}
    return RowFile(tmp_path / "rows.bin", ROWS, layout)


def tables_like(file, count, room=0):
    return {name: torch.randn(count + room, table.shape[1]) for name, table in file.tables.items()}


def fill(file):
    content = tables_like(file, ROWS)
    for name, table in file.tables.items():
        table.copy_(content[name])
    return content


def test_rows_that_were_written_through_the_mapping_are_taken_by_calls(file):
    content, near = fill(file), tables_like(file, len(INDEX), room=2)
    beyond = {name: table[len(INDEX) :].clone() for name, table in near.items()}
    file.release_pages()
    file.read_rows(INDEX, near)
    for name, table in near.items():
        assert torch.equal(table[: len(INDEX)], content[name][INDEX])
        assert torch.equal(table[len(INDEX) :], beyond[name])


def test_rows_that_were_put_by_calls_are_seen_through_the_mapping(file):
    content, order = fill(file), torch.tensor([1, 2, 3, 0, 5, 4])
    near = tables_like(file, len(INDEX))
    file.write_rows(INDEX[order], near)
    for name, table in file.tables.items():
        content[name][INDEX[order]] = near[name]
        assert torch.equal(table, content[name])


def test_runs_longer_than_a_transfer_are_moved_whole(tmp_path):
    file = RowFile(tmp_path / "rows.bin", 10_000, {"weight": (128, torch.float32)})
    near = {"weight": torch.randn(10_000, 128)}
    every = torch.arange(10_000)
    file.write_rows(every, near)
    again = {"weight": torch.zeros(10_000, 128)}
    file.read_rows(every, again)
    assert torch.equal(again["weight"], near["weight"])
    assert torch.equal(file.tables["weight"], near["weight"])


def test_no_rows_are_moved_without_a_word(file):
    content, none = fill(file), torch.empty(0, dtype=torch.int64)
    file.read_rows(none, tables_like(file, 0))
    file.write_rows(none, tables_like(file, 0))
    assert all(torch.equal(table, content[name]) for name, table in file.tables.items())


def test_a_file_that_was_cut_is_an_error_that_names_the_row(file, tmp_path):
    path = tmp_path / "rows.bin"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(RunError, match=rf"rows.bin: the transfer at row {ROWS - 1} was incomplete; resume"):
        file.read_rows(INDEX, tables_like(file, len(INDEX)))


def test_a_disk_that_takes_no_rows_is_an_error_that_says_how_to_go_on(file):
    near = tables_like(file, len(INDEX))
    with files_limited_to(0), pytest.raises(RunError, match=r"rows.bin: .*; check the disk, then resume"):
        file.write_rows(INDEX, near)


def test_a_disk_without_room_for_the_centers_is_an_error_before_training(tmp_path):
    with pytest.raises(
        RunError, match=r"rows.bin: .*; the class centers need .* GiB on this disk; free space"
    ):
        RowFile(tmp_path / "rows.bin", 2**50, {"weight": (512, torch.float32)})
