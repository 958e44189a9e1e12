"""Pipes, folders and loops of links where a file of a dataset is expected: they must not be waited for."""

import os

import pytest

from facetrain.data.formats.bin import read_bin
from facetrain.data.formats.image_folder import read_image_file
from facetrain.data.mixture_file import read_identities
from facetrain.data.npy_file import map_npy
from facetrain.embeddings.embedding_files import open_embeddings
from facetrain.embeddings.embedding_map import open_map
from facetrain.errors import DataError

PLACEMENTS = {"pipe": os.mkfifo, "folder": os.mkdir, "loop": lambda path: os.symlink(path, path)}


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize(
    "read", [read_bin, read_image_file, lambda path: read_identities(path, 1), open_embeddings, open_map]
)
def test_a_file_of_a_user_that_is_something_else_than_a_file_is_refused(tmp_path, kind, read):
    PLACEMENTS[kind](tmp_path / "a.bin")
    with pytest.raises(DataError, match="not a regular file|Too many levels"):
        read(tmp_path / "a.bin")


def test_an_array_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(OSError, match="not a regular file"):
        map_npy(tmp_path / "a.npy")
