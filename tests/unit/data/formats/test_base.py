import os
import pickle
import resource

import numpy as np
import pytest

from facetrain.data.column_cache import Columns
from facetrain.data.formats.base import CatalogDataset
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError, UnreadableError


@pytest.fixture
def catalog(tmp_path):
    """Four images of ten bytes: two side by side, one far away, and one in another file."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(range(20)) + bytes(1 << 20) + b"0123456789")
    columns = Columns.of(
        label=np.array([1, 0, 0, 2], np.int32), file=np.array([0, 0, 0, 1], np.int32), size=np.full(4, 10),
        offset=np.array([10, (1 << 20) + 20, 0, 0]), identities=["ann", "bob"],
    )  # fmt: skip
    return CatalogDataset(tmp_path, [tmp_path / "a", tmp_path / "b"], columns)


def test_images_are_read_at_their_places_and_neighbors_are_announced_in_one_request(catalog, monkeypatch):
    expected = [bytes(range(10, 20)), b"0123456789", bytes(range(10)), bytes(range(10))]
    assert [catalog.read(index) for index in range(4)] == expected
    requests = []
    monkeypatch.setattr(
        PositionalFile, "prefetch_bytes", lambda file, *place: requests.append((file.path.name, *place))
    )
    catalog.prefetch(0, 4)
    assert requests == [("a", 0, 20), ("a", (1 << 20) + 20, 10), ("b", 0, 10)]


def test_an_image_without_bytes_does_not_announce_the_rest_of_its_file(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(10))
    requests = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *place: requests.append(place[:2]))
    columns = Columns.of(label=np.zeros(1, np.int32), offset=np.array([2]), size=np.array([0]))
    CatalogDataset(tmp_path, [tmp_path / "a"], columns).prefetch(0, 1)
    PositionalFile(tmp_path / "a").prefetch_bytes(2, 3)
    assert requests == [(2, 3)]


def test_a_pickled_catalog_has_no_open_files_and_no_names(catalog):
    fresh = len(pickle.dumps(catalog))
    assert catalog.identity_name(1) == "bob" and catalog.identity_name(2) == "2" and catalog.read(3)
    assert len(pickle.dumps(catalog)) == fresh
    assert pickle.loads(pickle.dumps(catalog)).read(1) == b"0123456789"


@pytest.mark.parametrize(("permitted", "most"), [(1024, 32), (1 << 20, 4096)])
def test_as_many_files_stay_open_as_the_system_permits_for_several_datasets(
    catalog, monkeypatch, permitted, most
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (permitted, permitted))
    assert catalog.read(0) and catalog.opened.cache_parameters()["maxsize"] == most


def test_a_file_that_ends_inside_an_image_makes_this_image_unreadable(catalog, tmp_path):
    (tmp_path / "b").write_bytes(bytes(9))
    with pytest.raises(UnreadableError, match=r"b: image at byte 0: "):
        catalog.read(3)
    with pytest.raises(DataError, match="x is left out: too old"):
        CatalogDataset(
            tmp_path, [], Columns.of(label=np.empty(0, np.int32), skipped=[["x", "suffix", "too old"]])
        )
