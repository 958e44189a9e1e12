from pathlib import Path

import numpy as np
import pytest

from facetrain.errors import DataError
from facetrain.verify import identification
from facetrain.verify.embedding_files import Embeddings, load_embeddings, save_embeddings
from facetrain.verify.identification import top_k
from tests.support import bombs


def some(count=7, size=4):
    unit = np.random.default_rng(0).normal(size=(count, size)).astype(np.float32)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    return Embeddings(unit, [f"ä {n}.jpg" for n in range(count)], np.arange(count) - 1)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_embeddings_are_read_as_they_were_written(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    save_embeddings(tmp_path / f"e{suffix}", some())
    found = load_embeddings(tmp_path / f"e{suffix}")
    np.testing.assert_allclose(found.embedding, some().embedding, rtol=1e-6)
    assert (found.name, found.label.tolist()) == (some().name, some().label.tolist())
    assert [path.name for path in tmp_path.iterdir()] == [f"e{suffix}"]


def test_a_table_of_embeddings_has_a_row_for_each_face(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    save_embeddings(tmp_path / "e.parquet", some())
    table = parquet.read_table(tmp_path / "e.parquet")
    assert table.column_names == ["name", "label", "embedding"] and table.num_rows == 7
    np.testing.assert_allclose(table["embedding"][3].as_py(), some().embedding[3])


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_file_that_holds_no_embeddings_is_refused(tmp_path, suffix):
    path = tmp_path / f"e{suffix}"
    with pytest.raises(DataError, match="No such file"):
        load_embeddings(path)
    path.write_bytes(b"not an archive" * 9)
    with pytest.raises(DataError, match="not a file of embeddings"):
        load_embeddings(path)


def test_a_file_with_fewer_names_than_embeddings_is_refused(tmp_path):
    np.savez(tmp_path / "e.npz", embedding=np.ones((3, 4)), name=np.array(["a"]), label=np.zeros(3))
    with pytest.raises(DataError, match="1 names, 3 labels and embeddings of shape"):
        load_embeddings(tmp_path / "e.npz")
    np.savez(tmp_path / "p.npz", embedding=np.ones((1, 4)), name=np.array(["a"], object), label=np.zeros(1))
    with pytest.raises(DataError, match="not a file of embeddings"):
        load_embeddings(tmp_path / "p.npz")


def test_an_unknown_suffix_is_refused():
    with pytest.raises(DataError, match=r"unknown suffix .* use \.npz or \.parquet"):
        save_embeddings(Path("e.csv"), some())


@pytest.mark.parametrize("at_once", [3, 1 << 24])
def test_top_k_agrees_with_a_full_sort(at_once, monkeypatch):
    monkeypatch.setattr(identification, "_MAX_SIMILARITIES", at_once)
    random = np.random.default_rng(0)
    probe, gallery = (
        random.normal(size=(9, 5)).astype(np.float32),
        random.normal(size=(40, 5)).astype(np.float32),
    )
    entry, cosine = top_k(probe, gallery, 6)
    similarity = probe @ gallery.T
    np.testing.assert_array_equal(entry, np.argsort(-similarity, axis=1)[:, :6])
    np.testing.assert_allclose(cosine, -np.sort(-similarity, axis=1)[:, :6], rtol=1e-5)
    assert top_k(probe, gallery[:2], 6)[0].shape == (9, 2)


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\5\6" + bytes(18), b"\x93NUMPY\1\0\1\0 ", bytes(100)],
    ids=["empty", "no arrays", "npy", "zeros"],
)
@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path, content, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a file of embeddings") as caught:
        load_embeddings(path)
    assert "\n" not in str(caught.value)


def test_an_array_that_claims_more_than_it_has_is_refused_before_it_is_allocated(tmp_path):
    claimed = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 512)}"
    with pytest.raises(DataError, match=r"claims the shape \(1099511627776, 512\)"):
        load_embeddings(bombs._npz(tmp_path / "a.npz", claimed=claimed))


def test_only_the_beginning_of_a_long_header_is_read(tmp_path):
    with pytest.raises(DataError, match="expected 20000 bytes got 16"):
        load_embeddings(bombs._npz(tmp_path / "a.npz", claimed=" " * 20_000))


def test_embeddings_that_compress_a_hundred_times_are_refused(tmp_path):
    with pytest.raises(DataError, match="decompresses to .* more than"):
        load_embeddings(bombs._npz(tmp_path / "a.npz", rows=1 << 17))
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="decompresses to .* more than"):
        load_embeddings(bombs._embeddings_parquet(tmp_path / "a.parquet", rows=2_000, size=40_000, name="x"))


@pytest.mark.parametrize("label", [["x", "y"], [0.5, 1.5]])
def test_labels_that_are_no_whole_numbers_are_refused(tmp_path, label):
    np.savez(tmp_path / "a.npz", embedding=np.eye(2), name=["a", "b"], label=label)
    with pytest.raises(DataError, match="labels whole numbers"):
        load_embeddings(tmp_path / "a.npz")
