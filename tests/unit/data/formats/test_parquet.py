import pickle

import pytest

from facetrain.data.dataset import original_name
from facetrain.data.formats import parquet
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, images_of


@pytest.mark.parametrize("names", [["p1", "p0", "p1"], [1, 0, 1]])
@pytest.mark.parametrize("nested", [False, True])
def test_parquet_rows_are_images(tmp_path, names, nested):
    pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    import pyarrow.parquet as pq

    images = [encoded_image(n) for n in range(3)]
    column = [{"bytes": p, "path": None} for p in images] if nested else images
    table = pa.table({"image": column, "label": names})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(table, tmp_path / "b.parquet", compression=None, use_dictionary=False)
    dataset = pickle.loads(pickle.dumps(open_dataset(tmp_path)))
    assert images_of(dataset) == list(zip([1, 0, 1, 1, 0, 1], images * 2, strict=True))
    assert "a.parquet: row group 1, row 0" in dataset.location(2)


def test_parquet_without_the_columns_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"what": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column for the image: it has what"):
        open_dataset(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(DataError, match=r"a\.parquet"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_images_of_a_plain_column_are_read_in_place(tmp_path, nested):
    pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    import pyarrow.parquet as pq

    # Equal and empty values, and values that contain others: each must be found at its own place.
    images = [encoded_image(n % 5, 16 + n % 3) for n in range(40)]
    images[7], images[8] = images[6] + images[5], images[5]
    column = [{"bytes": image, "path": f"{n}.png"} for n, image in enumerate(images)] if nested else images
    table = pa.table({"image": column, "label": [n % 3 for n in range(40)]})
    pq.write_table(
        table,
        tmp_path / "a.parquet",
        compression=None,
        use_dictionary=False,
        row_group_size=15,
        data_page_size=3000,
    )
    for _ in range(2):  # the second time from the catalog
        dataset = open_dataset(tmp_path)
        assert (dataset._offset >= 0).all()
        assert images_of(dataset) == [(n % 3, image) for n, image in enumerate(images)]
    assert original_name(dataset, 3) == ("3.png" if nested else None)
    dataset.prefetch(0, 40)


def test_row_groups_in_memory_are_bounded_by_their_bytes(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    import pyarrow.parquet as pq

    images = [encoded_image(n) for n in range(20)]
    size = len(images[0])
    pq.write_table(pa.table({"image": images, "label": [0] * 20}), tmp_path / "a.parquet", row_group_size=2)
    monkeypatch.setattr(parquet, "_CACHE_BYTES", 5 * size)
    dataset = open_dataset(tmp_path)
    for index in [0, 19, 7, 3, 7, 0, 12]:
        assert dataset.read(index) == images[index]
        assert dataset._cache._bytes <= 5 * size
    assert dataset._cache._bytes == sum(rows.nbytes for rows in dataset._cache._groups.values()) > 0
