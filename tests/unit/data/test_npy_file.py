import io
import struct

import numpy as np
import pytest

from facetrain.data.formats.landmark_file import landmarks_path, read_landmarks_beside
from facetrain.data.npy_file import map_npy
from facetrain.errors import DataError


def with_header(header):
    text = header.encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text + bytes(64)


def archive():
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        b"PK\x03\x04 no archive",
        archive(),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,"),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': 2L 3}"),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 3)}"),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000, 5, 2)}"),
        with_header("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}"),
        with_header("{'descr': [], 'fortran_order': 3, 'shape': 'x'}"),
        with_header("(" * 1000),
    ],
)
def test_a_file_that_is_not_an_array_is_a_value_error(tmp_path, content):
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="."):
        map_npy(path)
    landmarks_path(tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(DataError, match="2 images"):
        read_landmarks_beside(tmp_path / "x.bin", 2)


def test_an_array_is_mapped(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    assert map_npy(tmp_path / "a.npy").tolist() == [[0, 1, 2], [3, 4, 5]]
