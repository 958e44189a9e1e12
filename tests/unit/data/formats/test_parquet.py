import pickle

import pytest

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
    pq.write_table(table, tmp_path / "b.parquet")
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
